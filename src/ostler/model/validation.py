"""What is wrong with an input, all of it at once, one sentence per fault."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from ostler.errors import ValidationError

_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One broken rule: which field, what is allowed there, what stood there."""

    field: str
    bound: str
    value: str = ""

    @property
    def message(self) -> str:
        return f"{self.field} {self.bound}" + (f", was {self.value}" if self.value else "")

    def under(self, prefix: str) -> Fault:
        return Fault(field=f"{prefix}.{self.field}", bound=self.bound, value=self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """The outcome of `validate()`: true when there is no fault."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def success(cls) -> ValidationResult:
        return cls()

    @classmethod
    def failure(cls, faults: Iterable[Fault]) -> ValidationResult:
        return cls(faults=tuple(faults))

    @property
    def is_valid(self) -> bool:
        return not self.faults

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(fault.message for fault in self.faults)

    def __bool__(self) -> bool:
        return self.is_valid

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def require(self) -> None:
        """Raise one `ValidationError` that carries every fault."""
        if self.faults:
            raise ValidationError(self.faults)


def faults_of(error: ValidationError) -> tuple[Fault, ...]:
    """Those that it carries. The tree of errors knows only their looks, for it stands below the model."""
    return cast("tuple[Fault, ...]", error.faults)


def all_are(kind: type, *values: object) -> bool:
    """Whether rules may compare these: constructing a record checks no types."""
    return all(isinstance(value, kind) for value in values)


def whole_number(value: Any) -> int | None:
    """A whole number of any make, such as numpy's, as Python's own; None if it is none, and true and false are none."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shown(value: Any) -> str:
    """A value as a sentence may carry it: short, printable, on one line."""
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        text = " ".join(ascii(value).split())
    except Exception:  # noqa: BLE001 - a foreign repr may do anything; a number of 5000 digits has none
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def named(key: object) -> str:
    """A key as a field name may carry it: as it is where that is safe to print."""
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= _SHOWN
    return str(key) if plain else shown(key)


def duration_text(value: timedelta) -> str:
    """A duration as a person writes it: 90 s, 5 min, 1 h."""
    seconds = value.total_seconds()
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.12g} {unit}"
    return f"{seconds:.12g} s"
