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

from ostler.durations import duration_text
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
        return Fault(field=f"{prefix}.{self.field}".rstrip("."), bound=self.bound, value=self.value)


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
_UNKNOWN_ERRORS = frozenset({"unexpected_keyword_argument", "extra_forbidden"})


def faults_of(cls: type[Any], details: Iterable[ErrorDetails]) -> Iterator[Fault]:
    """Each error of pydantic in our words. `cls` is the record that was validated."""
    say = _fault_in_file if hasattr(cls, "KEYS") else _fault
    for detail in details:
        yield say(cls, [str(part) for part in detail["loc"]], detail)


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


def _fault_in_file(cls: type[Any], path: list[str], detail: ErrorDetails) -> Fault:
    """The same for a record with `KEYS`, which is written in a file: values and bounds as a person writes them."""
    fault, (owner, hint), kind = _fault(cls, path, detail), _declared(cls, path), detail["type"]
    if kind in _UNKNOWN_ERRORS:
        return Fault(field=fault.field, bound=f"is not known{_nearest(owner, path[-1])}")
    if detail["input"] is None:
        return Fault(field=fault.field, bound="has no value; write one, or remove the key")
    marks = _marks(hint)
    parsed = next((mark for mark in marks if hasattr(mark, "expects")), None)
    bound, base = fault.bound, _bare(hint)
    if kind in _RANGE_ERRORS:
        mark = next(mark for mark in marks if hasattr(mark, "ge"))
        words, limit = ("at least", mark.ge) if kind == "greater_than_equal" else ("at most", mark.le)
        bound = f"must be {words} {parsed.write(limit) if parsed else limit}"
    elif kind != "value_error" and parsed is not None and parsed.expects:
        bound = f"must be {parsed.expects}"
    elif kind != "value_error" and isinstance(base, type) and is_dataclass(base):
        bound = _EXPECTED[Mapping]
    return Fault(field=fault.field, bound=bound, value=as_written(detail["input"]))


def as_written(value: Any) -> str:
    """The value as it stands in a file; in quotes where it would not read as one word."""
    if isinstance(value, bool):
        return str(value).lower()
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_SHOWN and " " not in value
    return str(value) if plain else shown(value)


def _dotted(path: list[str]) -> str:
    return ".".join(named(part) for part in path)


def _nearest(owner: Any, name: str) -> str:
    """The end of a sentence about an unknown name: the field that was probably meant, also of a record inside."""
    known: dict[str, Any] = _by_key(owner) if is_dataclass(owner) else {}  # type: ignore[arg-type]  # a class
    close = difflib.get_close_matches(name, known, n=1)
    if not close:
        close = [
            f"{key}.{name}" for key, hint in known.items() if is_dataclass(_bare(hint)) and name in _by_key(_bare(hint))
        ]
    return f"; did you mean {close[0]}?" if close else ""


def _declared(cls: Any, path: list[str]) -> tuple[Any, Any]:
    """The record or container that the path ends in, and the annotation at its end."""
    owner: Any = None
    hint: Any = cls
    for part in path:
        owner = _bare(hint)
        if isinstance(owner, type) and is_dataclass(owner):
            hint = _by_key(owner).get(part, object)
        else:
            arguments = [argument for argument in typing.get_args(owner) if argument is not Ellipsis]
            hint = arguments[-1] if arguments else object
    return owner, hint


@cache
def _by_key(cls: Any) -> dict[str, Any]:
    """The annotations of a record by the keys of its fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {cls.spelled(field.name): hints[field.name] for field in fields(cls)}


def _bare(hint: Any) -> Any:
    """The annotation without `Annotated` and `None`."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if origin in {typing.Union, types.UnionType}:
        return _bare(next(argument for argument in typing.get_args(hint) if argument is not type(None)))
    return hint


def _marks(hint: Any) -> tuple[Any, ...]:
    """What an annotation carries beside its type; of a union, what its parts carry."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return tuple(mark for argument in typing.get_args(hint) for mark in _marks(argument))
    return tuple(getattr(hint, "__metadata__", ()))


def _range_text(hint: Any) -> str:
    """The declared range: "must be 64 to 8192"."""
    for mark in _marks(hint):
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
    if origin is typing.Literal:
        return "must be one of " + ", ".join(str(one) for one in typing.get_args(base))
    if origin in _EXPECTED:
        return _EXPECTED[origin]
    if isinstance(base, type) and is_dataclass(base):
        return f"must be a {base.__name__}"
    return str(detail["msg"]).replace("Input should be", "must be")
