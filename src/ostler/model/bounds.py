"""The range of a number, a time or a duration, declared in the annotation of a field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Interval:
    """What `annotated_types.Interval` is, which pydantic heeds, without loading that library.

    Loading it takes longer than all that an agent needs of this room, and an agent checks no record. By the mark
    below, which is part of what that library promises, it knows one of its own.
    """

    __slots__ = ("ge", "le")
    __is_annotated_types_grouped_metadata__ = True

    def __init__(self, *, ge: Any = None, le: Any = None) -> None:
        self.ge = ge
        self.le = le

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Ge, Le  # noqa: PLC0415 - see above

        if self.ge is not None:
            yield Ge(self.ge)
        if self.le is not None:
            yield Le(self.le)


def interval_of(mark: Any) -> tuple[Any, Any] | None:
    """The bounds, by ours or by the one of `annotated_types`; None for what is no interval."""
    if getattr(mark, "__is_annotated_types_grouped_metadata__", False) and hasattr(mark, "ge"):
        return mark.ge, mark.le
    return None
