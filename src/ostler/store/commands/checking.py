"""Checks of a command's own fields. Records bring theirs; these are for what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any
from uuid import UUID

from ostler.model import Fault, shown
from ostler.model.text import plain_text_faults

#: Room for a sentence; what is longer belongs into a record.
MAX_WORDS = 2000

_NAMES: dict[type, str] = {UUID: "must be a UUID", int: "must be a whole number", str: "must be text"}


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


def word_faults(field: str, value: Any, limit: int = MAX_WORDS) -> Iterator[Fault]:
    """That it is text which every store can keep."""
    yield from kind_faults(field, value, str)
    yield from plain_text_faults(field, value, limit)
