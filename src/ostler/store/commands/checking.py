"""Checks of a command's own fields. Records bring theirs; these are for what stands beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from ostler.errors import ValidationError
from ostler.model import Fault, Record, shown
from ostler.model.context import json_faults
from ostler.model.text import plain_text_faults

#: Room for a sentence; what is longer belongs into a record.
MAX_WORDS = 2000
#: No count of ours comes near it, and every store can hold it.
MAX_COUNT = 2**53
#: Nobody waits longer for a restart, and every reader can bear it.
MAX_DELAY = timedelta(days=3650)

_NAMES: dict[type, str] = {
    UUID: "must be a UUID",
    int: "must be a whole number",
    str: "must be text",
    timedelta: "must be a duration",
}


def require(faults: Iterable[Fault]) -> None:
    """Raise one `ValidationError` that carries every fault, if there is any."""
    found = tuple(faults)
    if found:
        raise ValidationError(found)


def kind_faults(field: str, value: Any, kind: type) -> Iterator[Fault]:
    """That a value is what the annotation says: a mistake is found where it is made, not in the writer."""
    if isinstance(value, kind) and not isinstance(value, bool):
        return
    if issubclass(kind, Enum):
        same = next((member.name for member in kind if member.value == value), None)
        choices = ", ".join(str(member.value) for member in kind)
        bound = f"must be {kind.__name__}.{same}" if same else f"must be one of {choices}"
    else:
        bound = _NAMES.get(kind, f"must be of type {kind.__name__}")
    yield Fault(field=field, bound=bound, value=shown(value))


def optional_faults(field: str, value: Any, kind: type) -> Iterator[Fault]:
    if value is not None:
        yield from kind_faults(field, value, kind)


def record_faults(field: str, value: Any, kind: type[Record]) -> Iterator[Fault]:
    """That it is such a record, and then what the record itself has to say."""
    if isinstance(value, kind):
        yield from value.validate()
    else:
        yield from kind_faults(field, value, kind)


def moment_faults(field: str, value: Any) -> Iterator[Fault]:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        yield Fault(field=field, bound="must be a time with its zone", value=shown(value))


def ids_faults(field: str, value: Any) -> Iterator[Fault]:
    if not isinstance(value, tuple):
        yield Fault(field=field, bound="must be a tuple of UUIDs", value=shown(value))
        return
    for place, one in enumerate(value):
        yield from kind_faults(f"{field}.{place}", one, UUID)


def word_faults(field: str, value: Any, limit: int = MAX_WORDS) -> Iterator[Fault]:
    """That it is text which every store can keep."""
    yield from kind_faults(field, value, str)
    yield from plain_text_faults(field, value, limit)


def said_faults(field: str, value: Any) -> Iterator[Fault]:
    """That a reason or a detail, where there is one, is a sentence and not a book. What is in it is cleaned later."""
    if isinstance(value, str) and len(value) > MAX_WORDS:
        bound = f"must have at most {MAX_WORDS} characters"
        yield Fault(field=field, bound=bound, value=f"{len(value)} characters")
    else:
        yield from optional_faults(field, value, str)


def mapping_faults(field: str, value: Any) -> Iterator[Fault]:
    """That data can be kept as JSON."""
    if isinstance(value, Mapping):
        yield from json_faults(field, value)
    else:
        yield Fault(field=field, bound="must be a mapping", value=shown(value))


def as_kept(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data as every store will give it back, and out of the reach of whoever made it."""
    kept: dict[str, Any] = json.loads(json.dumps(dict(data)))
    return kept


def count_faults(field: str, value: Any) -> Iterator[Fault]:
    if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value <= MAX_COUNT:
        yield Fault(field=field, bound=f"must be 0 to {MAX_COUNT}", value=shown(value))
    else:
        yield from kind_faults(field, value, int)


def delay_faults(field: str, value: Any) -> Iterator[Fault]:
    if isinstance(value, timedelta) and not timedelta(0) <= value <= MAX_DELAY:
        yield Fault(field=field, bound="must be 0 s to 3650 days", value=shown(value))
    else:
        yield from kind_faults(field, value, timedelta)


def flag_faults(field: str, value: Any) -> Iterator[Fault]:
    if not isinstance(value, bool):
        yield Fault(field=field, bound="must be true or false", value=shown(value))
