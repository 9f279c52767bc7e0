"""Events on their way into a row and back.

What a row holds in columns of its own is left out of its JSON, and an event is not made into a record until
somebody reads it: a row is written for every change of every agent.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields
from datetime import datetime
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple
from uuid import UUID

from ostler.model import AgentInstance, Event, Task, event_class
from ostler.model.codec import dump_compact, revive


class EventRow(NamedTuple):
    """A row of the log, in the order of its columns, with Python's own values."""

    sequence: int
    #: As a number, because most databases want neither a UUID object nor its text.
    event_id: int
    workspace_id: UUID | None
    instance_id: UUID | None
    task_id: UUID | None
    event_type: str
    body: str
    occurred_at: datetime
    correlation_id: str | None


_IN_COLUMNS = frozenset({
    "correlation_id",
    "event_id",
    "instance_id",
    "occurred_at",
    "sequence",
    "task_id",
    "workspace_id",
})  # fmt: skip


def body(event: Any, record: AgentInstance | Task, said: dict[str, Any]) -> str:
    """The JSON of what has no column: version and attempt of the record, and what the event itself says."""
    parts = [f'"version":{record.version}']
    if isinstance(record, AgentInstance):
        parts.append(f'"attempt":{record.attempt}')
    for name, value in said.items():
        if isinstance(value, str):
            parts.append(f'"{name}":{quoted(value)}')
        elif value is True or value is False:
            parts.append(f'"{name}":{"true" if value else "false"}')
        elif type(value) is int:
            parts.append(f'"{name}":{value}')
        elif value is not None or name not in _optional(event):
            return _whole(event, record, said)
    return f"{{{','.join(parts)}}}"


def _whole(event: type[Event], record: AgentInstance | Task, said: dict[str, Any]) -> str:
    """The same by way of a record, for events that say more than words and numbers."""
    known: dict[str, Any] = {"version": record.version, "occurred_at": record.updated_at}
    if isinstance(record, AgentInstance):
        known |= {"instance_id": record.instance_id, "attempt": record.attempt}
    else:
        known["task_id"] = record.task_id
    return dump_compact(event(**known, **said), exclude=_IN_COLUMNS)


def event_of(row: EventRow) -> Event:
    """The event again."""
    known: dict[str, Any] = json.loads(row.body)
    known["sequence"], known["event_id"], known["occurred_at"] = row.sequence, UUID(int=row.event_id), row.occurred_at
    for name in ("workspace_id", "instance_id", "task_id", "correlation_id"):
        value = getattr(row, name)
        if value is not None:
            known[name] = value
    return revive(event_class(row.event_type), known)


@functools.cache
def _optional(event: Any) -> frozenset[str]:
    """Fields that mean None when they are not there."""
    return frozenset(one.name for one in fields(event) if one.default is None)
