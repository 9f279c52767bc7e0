"""The API as a document: OpenAPI, made of the table and the handlers, and a page of it that loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ostler.api.routes.instances import SpawnBody
from ostler.api.routes.tasks import TaskBody
from ostler.api.table import PUBLIC, ROUTES, Route
from ostler.model.attempt import Request
from ostler.model.audit import AuditReport
from ostler.model.crew import CrewView
from ostler.model.disk import DiskUsage
from ostler.model.instance import AgentInstance, TerminationResult, Why
from ostler.model.log import LogLine
from ostler.model.loop import Iteration, PullRequest
from ostler.model.query import InboxRow, LifecycleStatistics
from ostler.model.record import adapter
from ostler.model.spawn import TerminationOptions
from ostler.model.task import Task, TaskWhy
from ostler.model.wait import Wait
from ostler.version import __version__

_PROBLEM = "#/components/schemas/Problem"
#: Bodies that the handlers read into records of their own.
_BODIES: Mapping[str, Any] = {"spawn": SpawnBody, "add_task": TaskBody, "terminate": TerminationOptions}
#: What is answered; a field more than those of the record may be there.
_ANSWERS: Mapping[str, Any] = {
    **dict.fromkeys(("spawn", "instance", "suspend", "resume", "restart"), AgentInstance),
    **dict.fromkeys(("add_task", "task", "cancel_task", "requeue_task", "hold_task", "send_back"), Task),
    **dict.fromkeys(("accept", "reject", "undo", "retire", "unretire", "put_in_loop"), Task),
    **dict.fromkeys(("pull_request", "comment", "approve", "merge", "close"), PullRequest),
    **dict.fromkeys(("crews", "crew_up", "crew_stop", "crew_reload"), list[CrewView]),
    "instances": list[AgentInstance],
    "tasks": list[Task],
    "pull_requests": list[PullRequest],
    "iterations": list[Iteration],
    "crew_scale": CrewView,
    "terminate": TerminationResult,
    "why": Why,
    "why_task": TaskWhy,
    "requests": list[Request],
    "request": Request,
    "waits": list[Wait],
    "answer": Wait,
    "logs": list[LogLine],
    "inbox": list[InboxRow],
    "statistics": LifecycleStatistics,
    "disk": DiskUsage,
    "verify_audit": AuditReport,
}


def openapi(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of every route. It takes a tenth of a second."""
    document = get_openapi(title="Ostler", version=__version__, routes=app.routes)
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # what we answer instead is a problem
        schemas.pop(name, None)
    schemas["Problem"] = {
        "type": "object",
        "description": "RFC 9457; `code` is stable, `detail` is a sentence for people.",
        "properties": {name: {"type": "string"} for name in ("type", "code", "title", "detail")}
        | {"status": {"type": "integer"}},
    }
    for route in ROUTES:
        _complete(document["paths"][route.path][route.method.lower()], route, schemas)
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    return document


def _complete(operation: dict[str, Any], route: Route, schemas: dict[str, Any]) -> None:
    operation["operationId"] = route.name
    operation["summary"] = route.name.replace("_", " ")
    operation["tags"] = [route.path.split("/")[2] if route.path.startswith("/v1/") else "daemon"]
    operation["x-permission"] = route.permission
    if route.permission == PUBLIC:
        operation["security"] = []
    if route.name in _BODIES:
        operation["requestBody"]["content"]["application/json"]["schema"] = _schema(
            _BODIES[route.name], "validation", schemas
        )
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "A problem",
        "content": {"application/problem+json": {"schema": {"$ref": _PROBLEM}}},
    }
    if route.name in _ANSWERS:
        answer = _schema(_ANSWERS[route.name], "serialization", schemas)
        responses[str(route.status)]["content"] = {"application/json": {"schema": answer}}


def _schema(kind: Any, mode: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = adapter(kind).json_schema(mode=mode, ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    for part in (schema, *parts.values()) if mode == "serialization" else ():
        part.pop("additionalProperties", None)
    schemas.update(parts)
    return schema


# --- the page ----------------------------------------------------------------------------------------

#: The page needs no script, so none may run in it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; font-family: ui-monospace, monospace; }
summary b { display: inline-block; width: 5rem; } summary i { float: right; opacity: .6; }
table { border-collapse: collapse; margin: .5rem 0 1rem 1rem; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
pre { margin-left: 1rem; overflow: auto; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } }
"""


def page(document: dict[str, Any]) -> str:
    """The document for people: one part for each route, to be opened by a click."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Ostler API</title>",
        f"<style>{_STYLE}</style><h1>Ostler {_text(document['info']['version'])}</h1>",
        "<p>Send a token as <code>Authorization: Bearer TOKEN</code>; ",
        "<code>ostler token create NAME</code> makes one. ",
        "The same for programs: <a href=/openapi.json>openapi.json</a>.</p>",
    ]
    tags: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tags.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    for tag, operations_of_tag in tags.items():
        parts += [f"<h2>{_text(tag)}</h2>", *operations_of_tag]
    parts.append("<h2>schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"<details id='{_text(name)}'><summary>{_text(name)}</summary>{_json(schema)}</details>")
    return "".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{_text(parameter['name'])}</code><td>{_text(parameter['in'])}<td>{_type(parameter['schema'])}"
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answers = [_answer(status, response) for status, response in operation["responses"].items()]
    return "".join(
        (
            f"<details><summary><b>{method.upper()}</b>{_text(path)}<i>{_text(operation['x-permission'])}</i></summary>",
            f"<p>{_text(operation.get('description') or operation['summary'])}</p>",
            f"<table>{''.join(rows)}</table>" if rows else "",
            f"<p>Body:</p>{_shown(body)}" if body else "",
            *answers,
            "</details>",
        )
    )


def _answer(status: str, response: dict[str, Any]) -> str:
    schemas = [content.get("schema") for content in response.get("content", {}).values()]
    return f"<p>{_text(status)}: {''.join(_shown(schema) for schema in schemas if schema) or 'JSON'}</p>"


def _shown(schema: dict[str, Any]) -> str:
    names = list(_references(schema))
    if schema.keys() <= {"$ref", "items", "type", "title"} and names:
        many = "list of " if "items" in schema else ""
        return many + ", ".join(f"<a href='#{_text(name)}'>{_text(name)}</a>" for name in names)
    return _json(schema)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)


def _type(schema: dict[str, Any]) -> str:
    kinds = [part.get("type") for part in schema.get("anyOf", (schema,))]
    return _text(", ".join(kind for kind in kinds if isinstance(kind, str) and kind != "null"))


def _json(schema: Any) -> str:
    return f"<pre>{_text(json.dumps(schema, indent=1))}</pre>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
