"""The table of keys for people and for editors: `explain`, and a JSON Schema."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from types import UnionType
from typing import Any

from ostler.agents.files.checking import nearest
from ostler.agents.files.forms import FORMS, Form
from ostler.agents.files.keys import LIFECYCLE, Key
from ostler.agents.files.project import PROJECT, Project
from ostler.agents.manifest import AgentManifest
from ostler.errors import ValidationError
from ostler.model.faults import Fault, duration_text
from ostler.model.types import Interval

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def lifecycle_schema() -> dict[str, Any]:
    """What an editor needs to complete and check the `lifecycle` key."""
    return {"$schema": _DIALECT, "title": LIFECYCLE.name, **_schema(LIFECYCLE)}


def explain(key_path: str) -> str:
    """What a key does and how it is written: "lifecycle.restart", or "limits.agents" of a project file."""
    parts = key_path.removeprefix(f"{LIFECYCLE.name}.").split(".")
    if key_path in {LIFECYCLE.name, PROJECT.name}:
        parts = []
    table = PROJECT if key_path == PROJECT.name else LIFECYCLE
    found = _find(table, parts)
    if found is None and not key_path.startswith(f"{LIFECYCLE.name}."):
        table, found = PROJECT, _find(PROJECT, parts)
    if found is None:
        raise ValidationError([_unknown(key_path, parts)])
    title = LIFECYCLE.name if not parts and table is LIFECYCLE else key_path
    return "\n".join([title, f"  {found.says}", *(f"  {line}" for line in _facts(found, table))])


def _find(table: Key, parts: list[str]) -> Key | None:
    found = table
    for part in parts:
        inner = found.by_name.get(part) or found.each
        # The inner keys of a named entry stand one level deeper, under the name.
        if inner is None:
            return None
        found = inner
    return found


def _unknown(key_path: str, parts: list[str]) -> Fault:
    owner = _find(LIFECYCLE, parts[:-1]) or LIFECYCLE
    return Fault(field=key_path, bound=f"is not known{nearest(parts[-1], owner)}")


def _facts(key: Key, table: Key) -> Iterator[str]:
    if key.choices:
        yield f"One of: {', '.join(key.choices)}"
    elif key.form not in {Form.KEYS, Form.NAMED}:
        yield f"Written as {FORMS[key.form].hint}"
    bound, default = _declared(Project if table is PROJECT else AgentManifest, key.field)
    if bound is not None:
        yield f"Allowed: {_said(bound.ge, key)} to {_said(bound.le, key)}"
    if default is not None:
        yield f"Unless written: {_said(default, key)}"
    if key.example:
        yield f"Example: {key.example}".replace("\n", f"\n{' ' * 11}")
    inner = key.each.keys if key.each else key.keys
    if key.each:
        yield f"Under each {key.each.name}: {key.each.says}"
    for one in inner:
        yield f"  {one.name}: {one.says}"


def _said(value: Any, key: Key) -> str:
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value} {key.unit}".strip()


def _declared(record: Any, field: str) -> tuple[Interval | None, Any]:
    """The range and the default that the record declares for what a key fills."""
    owner, mark, default = record, None, None
    for part in field.split(".") if field else ():
        if not is_dataclass(owner):
            return None, None
        hint = typing.get_type_hints(owner, include_extras=True).get(part)
        default = next((one.default for one in fields(owner) if one.name == part), None)
        owner, mark = _unwrapped(hint)
    simple = isinstance(default, (bool, int, float, str, timedelta))
    return mark, default if simple and default is not MISSING else None


def _unwrapped(hint: Any) -> tuple[Any, Interval | None]:
    if typing.get_origin(hint) in {typing.Union, UnionType}:
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is typing.Annotated:
        mark = next((one for one in hint.__metadata__ if isinstance(one, Interval)), None)
        return typing.get_args(hint)[0], mark
    return hint, None


def _schema(key: Key) -> dict[str, Any]:
    shapes: list[dict[str, Any]] = []
    if key.choices:
        shapes.append({"enum": list(key.choices)})
    elif key.form not in {Form.KEYS, Form.NAMED}:
        shapes.append(_bounded(dict(FORMS[key.form].schema), key))
    if key.keys:
        properties = {inner.name: _schema(inner) for inner in key.keys}
        shapes.append({"type": "object", "properties": properties, "additionalProperties": False})
    if key.each:
        named = {"propertyNames": {"pattern": f"^(?:{key.names})$"}} if key.names else {}
        shapes.append({"type": "object", **named, "additionalProperties": _schema(key.each)})
    said: dict[str, Any] = {"description": key.says}
    if key.example and not key.keys and not key.each:
        said["examples"] = [key.example]
    return {**said, **(shapes[0] if len(shapes) == 1 else {"anyOf": shapes})}


def _bounded(shape: dict[str, Any], key: Key) -> dict[str, Any]:
    """Numbers carry the range of the record; what is written with a unit is left to the reader."""
    mark, _ = _declared(AgentManifest, key.field)
    if mark is None or key.form not in {Form.COUNT, Form.PERCENT, Form.NUMBER}:
        return shape
    bounds = {"minimum": mark.ge, "maximum": mark.le}
    if key.form is Form.NUMBER:
        return {**shape, **bounds}
    return {"anyOf": [{"type": "integer", **bounds}, *shape["anyOf"][1:]]}
