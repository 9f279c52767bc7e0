"""What is wrong with an input: one sentence per fault, all of them at once."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from ostler.errors import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")

_MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One broken rule: the field, what is allowed there, and the value that was found."""

    field: str
    bound: str
    value: str = ""

    @property
    def message(self) -> str:
        said = f"{self.field} {self.bound}".strip()
        return f"{said}, was {self.value}" if self.value else said

    def under(self, prefix: str) -> Fault:
        return Fault(field=f"{prefix}.{self.field}", bound=self.bound, value=self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult(Generic[T]):
    """The outcome of `validate()`; true when there is no fault. `value` is then the coerced copy."""

    faults: tuple[Fault, ...] = ()
    value: T | None = None

    @classmethod
    def success(cls, value: T | None = None) -> ValidationResult[T]:
        return cls(value=value)

    @classmethod
    def failure(cls, errors: Iterable[Fault | str]) -> ValidationResult[T]:
        faults = (error if isinstance(error, Fault) else Fault(field="", bound=error) for error in errors)
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


def fault(field: str, bound: str, value: object = None) -> ValidationError:
    """A `ValidationError` with a single fault."""
    return ValidationError([Fault(field=field, bound=bound, value="" if value is None else shown(value))])


# --- values in sentences -----------------------------------------------------------------------------


def shown(value: Any) -> str:
    """The value as a sentence may carry it: short, printable, on one line."""
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        text = " ".join(ascii(value).split())
    except Exception:  # noqa: BLE001 - a foreign repr may raise anything
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def named(key: object) -> str:
    """The key as a field name: unchanged where it is safe to print."""
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= _MAX_SHOWN
    return str(key) if plain else shown(key)


def duration_text(value: timedelta) -> str:
    """The duration as a person writes it: 90 s, 5 min, 1 h."""
    seconds = value.total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.12g} {unit}"
    return f"{seconds:.12g} s"


# --- pydantic's errors as faults ---------------------------------------------------------------------

_EXPECTED: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "must be a whole number",
        float: "must be a finite number",
        bool: "must be true or false",
        str: "must be text",
        UUID: "must be a UUID",
        datetime: "must be a time with its zone",
        timedelta: "must be a duration such as 30s",
        tuple: "must be a list",
        Mapping: "must be a mapping",
    }
)
_RANGE_ERRORS = frozenset({"greater_than_equal", "less_than_equal"})


def faults_of(cls: type[Any], details: Iterable[ErrorDetails]) -> Iterator[Fault]:
    """Each error of pydantic in our words. `cls` is the record that was validated."""
    for detail in details:
        path = [str(part) for part in detail["loc"]]
        yield _fault(cls, path, detail)


def _fault(cls: type[Any], path: list[str], detail: ErrorDetails) -> Fault:
    if path and path[-1] == "[key]":
        _, mapping = _declared(cls, path[:-2])
        keys = _expected(typing.get_args(_bare(mapping))[0], detail).removeprefix("must be ")
        return Fault(field=_dotted(path[:-2]), bound=f"must have only {keys} as keys", value=shown(detail["input"]))
    name, value = _dotted(path) or "body", shown(detail["input"])
    owner, hint = _declared(cls, path)
    match detail["type"]:
        case "missing":
            return Fault(field=name, bound="is required")
        case "unexpected_keyword_argument" | "extra_forbidden":
            return Fault(field=name, bound=f"is not a known field{_nearest(owner, path[-1])}")
        case "json_invalid":
            return Fault(field=name, bound=f"must be valid JSON ({detail['msg'].removeprefix('Invalid JSON: ')})")
        case "string_unicode":
            return Fault(field=name, bound="must be text without lone surrogates", value=value)
        case "value_error":
            return Fault(field=name, bound=str(detail["ctx"]["error"]), value=value)
        case kind if kind in _RANGE_ERRORS and (text := _range_text(hint)):
            return Fault(field=name, bound=text, value=value)
        case _:
            return Fault(field=name, bound=_expected(_bare(hint), detail), value=value)


def _dotted(path: list[str]) -> str:
    return ".".join(named(part) for part in path)


def _nearest(owner: Any, name: str) -> str:
    known = [field.name for field in fields(owner)] if is_dataclass(owner) else []
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _declared(cls: Any, path: list[str]) -> tuple[Any, Any]:
    """The record or container that the path ends in, and the annotation at its end."""
    owner: Any = None
    hint: Any = cls
    for part in path:
        owner = _bare(hint)
        if isinstance(owner, type) and is_dataclass(owner):
            hint = _hints(owner).get(part, object)
        else:
            arguments = [argument for argument in typing.get_args(owner) if argument is not Ellipsis]
            hint = arguments[-1] if arguments else object
    return owner, hint


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    """The annotation without `Annotated` and `None`."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if origin in {typing.Union, types.UnionType}:
        return _bare(next(argument for argument in typing.get_args(hint) if argument is not type(None)))
    return hint


def _range_text(hint: Any) -> str:
    """The declared range: "must be 64 to 8192"."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return next((text for argument in typing.get_args(hint) if (text := _range_text(argument))), "")
    for mark in getattr(hint, "__metadata__", ()):
        if hasattr(mark, "ge") and hasattr(mark, "le"):
            least, most = _bound_text(mark.ge), _bound_text(mark.le)
            return f"must be {least} to {most}" if mark.le is not None else f"must be at least {least}"
    return ""


def _bound_text(value: Any) -> str:
    return duration_text(value) if isinstance(value, timedelta) else f"{value}"


def _expected(base: Any, detail: ErrorDetails) -> str:
    if isinstance(base, type) and issubclass(base, Enum):
        return "must be one of " + ", ".join(str(member.value) for member in base)
    origin = typing.get_origin(base) or base
    if origin in _EXPECTED:
        return _EXPECTED[origin]
    if isinstance(base, type) and is_dataclass(base):
        return f"must be a {base.__name__}"
    return str(detail["msg"]).replace("Input should be", "must be")
