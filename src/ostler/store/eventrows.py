"""Events on their way into a row and back.

What a row holds in columns of its own is left out of its JSON, and an event is not made into a record until
somebody reads it: this is written for every change of every agent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import fields
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ostler.model import Event, event_class
from ostler.model.codec import dump_compact, revive

#: The class of an event and its fields.
EventDraft = tuple[type[Event], dict[str, Any]]

COLUMNS = ("sequence", "event_id", "workspace_id", "instance_id", "task_id", "occurred_at", "correlation_id")
_IN_COLUMNS = frozenset(COLUMNS)


def body(draft: EventDraft) -> str:
    """The JSON of what has no column."""
    cls: Any
    cls, values = draft
    parts = []
    for name, start, optional in _parts(cls):
        value = values.get(name)
        if type(value) is int:
            parts.append(f"{start}{value}")
        elif isinstance(value, str):
            parts.append(start + quoted(value))
        elif value is not None or not optional:
            return dump_compact(cls(**values), exclude=_IN_COLUMNS)
    return f"{{{','.join(parts)}}}"


def made(draft: EventDraft) -> Event:
    cls, values = draft
    return cls(**values)


def from_row(event_type: str, text: str, columns: Mapping[str, Any]) -> Event:
    """The event again; columns hold Python values, those that are None do not belong to it."""
    known = {name: value for name, value in columns.items() if value is not None}
    return revive(event_class(event_type), known | json.loads(text))


@functools.cache
def _parts(cls: Any) -> tuple[tuple[str, str, bool], ...]:
    """Per field without a column: its name, how its JSON begins, and whether leaving it out means None."""
    return tuple(
        (one.name, f"{quoted(one.name)}:", one.default is None) for one in fields(cls) if one.name not in _IN_COLUMNS
    )
