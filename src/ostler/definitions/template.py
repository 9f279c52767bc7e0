"""What `ostler init` writes into `ostler.toml`: every table and key of the settings, as comments. And the JSON Schemas
of that file and of definition files, for editors. Both are made from the records, and say what these say of a key.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ostler.definitions.keys import AgentFile, FileRecord
from ostler.definitions.project import ProjectSettings
from ostler.durations import write_duration, write_megabytes
from ostler.home import HOME_NAME
from ostler.model.record import Record, adapter
from ostler.model.types import Parsed

Kind = Literal["agent", "project"]
#: Names of the schemas in the home of a project, where `ostler init` puts them, and in `docs/schemas`.
SCHEMA_FILES: Mapping[Kind, str] = {"agent": "agent.schema.json", "project": "ostler.schema.json"}

_WIDTH = 100
_HEAD = f"""\
#:schema ./{HOME_NAME}/{SCHEMA_FILES["project"]}
# Settings of Ostler for this project. Every key is here: with its default or, where it has none, with an example.
# Take the # away to change one; `ostler agents validate` checks the file, `ostler restart-daemon` applies it.
"""
#: Names of the examples of tables that have names.
_NAMED = {"crew": "coder", "agent": "greeter"}
#: In TOML, for keys without a default, and for those whose default shows little.
_EXAMPLES = {
    "daemon.listen": '"127.0.0.1:7177"',
    "daemon.on-wait": '"notify-send Ostler \\"$OSTLER_REASON\\""',
    "daemon.on-failed": '"echo $OSTLER_AGENT $OSTLER_TASK >> failed.txt"',
    "daemon.on-idle": '"./sync-results.sh"',
    "daemon.environment": '["PATH", "HOME", "LANG"]',
    "retention.audit": '"365d"',
    "retention.disk": '"20G"',
    "tasks.at-once": "2",
    "tasks.setup": '"uv sync"',
    "tasks.on-change": '"echo $OSTLER_TASK $OSTLER_STATE >> tasks.log"',
    "loop.blocked-timeout": '"1h"',
    "loop.max-iterations": "20",
    "loop.until": '"ALL_TESTS_PASS"',
    "loop.max-tokens": "1_000_000",
    "loop.max-cost-usd": "10.0",
    "loop.ci": '["pytest -q"]',
    "crew.agent": '"claude"',
    "crew.model": '"opus"',
    "crew.tasks": '"tag:night"',
    "agent.description": '"Says hello"',
    "agent.instructions": '"Say hello."',
    "agent.driver": '{command = ["cat", "{prompt_file}"]}',
    "agent.isolation": '"process"',
    "agent.env": '["LANG"]',
    "agent.restart": '"on-failure:3"',
    "agent.setup": '"uv sync"',
    "agent.tags": '["night"]',
    "agent.checks": '["pytest -q"]',
}


# --- ostler.toml -------------------------------------------------------------------------------------


def settings_template() -> str:
    """`ostler.toml` with every table and key, all of them comments."""
    parts = [_HEAD]
    for table, kind in _tables():
        is_named, comments = table in _NAMED, _comments(kind)
        lines = [f"# [{table}.{_NAMED[table]}]" if is_named else f"[{table}]"]
        if is_named:
            lines[:0] = _comment(inspect.getdoc(kind) or "")
        for field in dataclasses.fields(kind):
            lines += _comment(comments.get(field.name, ""))
            key = kind.spelled(field.name)
            lines.append(f"# {key} = {_EXAMPLES.get(f'{table}.{key}') or _default(kind, field)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _tables() -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(ProjectSettings, include_extras=True)
    for field in dataclasses.fields(ProjectSettings):
        hint = hints[field.name]
        yield ProjectSettings.spelled(field.name), get_args(hint)[1] if get_origin(hint) is not None else hint


def _comment(text: str) -> list[str]:
    return [f"#   {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH)]


def _default(kind: Any, field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is None or value is dataclasses.MISSING:
        return '"..."'
    return _toml(value, get_type_hints(kind, include_extras=True)[field.name])


def _toml(value: Any, hint: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case timedelta():
            return json.dumps(write_duration(value))
        case Enum() | str():
            return json.dumps(str(value))
        case int() if any(mark.write is write_megabytes for mark in _marks(hint)):
            return json.dumps(write_megabytes(value))
        case int() | float():
            return next((mark.write(value) for mark in _marks(hint)), str(value))
        case FileRecord():
            return _inline_table(value)
        case Mapping():
            return "{}"
        case _:
            return json.dumps(list(value))


def _inline_table(value: Any) -> str:
    hints = get_type_hints(type(value), include_extras=True)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    pairs = [
        f"{value.spelled(name)} = {_toml(inner, hints[name])}" for name, inner in fields.items() if inner is not None
    ]
    return f"{{{', '.join(pairs)}}}"


def _marks(hint: Any) -> Iterator[Parsed]:
    """How values of a field are read, as its annotations say it; also those inside of a union."""
    for inner in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        if isinstance(inner, Parsed):
            yield inner
        elif inner is not hint:
            yield from _marks(inner)


def _comments(kind: type[Record]) -> dict[str, str]:
    """What stands as `#:` above each field of a record, in its own source and in that of its bases."""
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Record) or base is Record:
            continue
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            text = line.strip()
            if text.startswith("#:"):
                above.append(text.removeprefix("#:").strip())
                continue
            if above and (match := re.match(r"(\w+):", text)):
                comments[match[1]] = " ".join(above)
            above = []
    return comments


# --- for editors -------------------------------------------------------------------------------------


def json_schema(kind: Kind = "agent") -> dict[str, Any]:
    """What an editor needs to complete and check the front matter of a definition file, or `ostler.toml`."""
    top = AgentFile if kind == "agent" else ProjectSettings
    schema = adapter(top).json_schema()
    kinds = {record.__name__: record for record in _records(top)}
    _describe(schema, top)
    for name, part in schema.get("$defs", {}).items():
        if name in kinds:
            _describe(part, kinds[name])
    if kind == "agent":
        del schema["additionalProperties"]  # keys of other tools
    what = "The front matter of a definition file of Ostler" if kind == "agent" else "ostler.toml"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": what}


def _describe(part: dict[str, Any], kind: type[FileRecord]) -> None:
    for name, comment in _comments(kind).items():
        properties = part["properties"].get(kind.spelled(name))
        if properties is not None:
            properties["description"] = comment


def _records(hint: Any) -> Iterator[type[FileRecord]]:
    """All records that a record is made of."""
    if isinstance(hint, type) and issubclass(hint, FileRecord):
        yield hint
        for inner in get_type_hints(hint, include_extras=True).values():
            yield from _records(inner)
        return
    for inner in get_args(hint):
        yield from _records(inner)
