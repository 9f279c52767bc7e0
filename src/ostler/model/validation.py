"""The faults of an input: one sentence for each, all of them at once."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ostler.durations import duration_text
from ostler.errors import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")

_MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One broken rule: the field, what is allowed there, and the value that stands there."""

    field: str
    bound: str
    value: str = ""

    @property
    def message(self) -> str:
        sentence = f"{self.field} {self.bound}".strip()
        return f"{sentence}, was {self.value}" if self.value else sentence

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

    def require(self) -> T:
        """The coerced copy; raises one `ValidationError` that carries every fault."""
        if self.faults:
            raise ValidationError(self.faults)
        return self.value  # type: ignore[return-value]  # without a fault it is there


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


def as_written(value: Any) -> str:
    """The value as it stands in a file; in quotes where it would not read as one word."""
    if isinstance(value, bool):
        return str(value).lower()
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_SHOWN and " " not in value
    return str(value) if plain else shown(value)


# --- pydantic's errors as faults ---------------------------------------------------------------------

#: By how the name of pydantic's error begins; the first that fits.
_EXPECTED: Mapping[str, str] = types.MappingProxyType(
    {
        "int_": "must be a whole number",
        "float_": "must be a finite number",
        "finite_number": "must be a finite number",
        "bool_": "must be true or false",
        "string_unicode": "must be text without lone surrogates",
        "string_": "must be text",
        "uuid_": "must be a UUID",
        "datetime_": "must be a time with its zone",
        "timezone_": "must be a time with its zone",
        "time_delta_": "must be a duration such as 30s",
        "tuple_": "must be a list",
        "dict_": "must be a mapping",
        "mapping_": "must be a mapping",
    }
)
_UNKNOWN_ERRORS = frozenset({"unexpected_keyword_argument", "extra_forbidden"})


def faults_of(cls: type[Any], details: Iterable[ErrorDetails]) -> Iterator[Fault]:
    """Each error of pydantic in our words. `cls` is the record that was validated.

    A record with `KEYS` is written in a file: its values and bounds are shown as a person writes them.
    """
    for detail in details:
        yield _fault(cls, [str(part) for part in detail["loc"]], detail, in_file=hasattr(cls, "KEYS"))


def _fault(cls: type[Any], path: list[str], detail: ErrorDetails, *, in_file: bool) -> Fault:
    kind, value, name = detail["type"], detail["input"], _dotted(path) or "body"
    owner, hint = _declared(cls, path)
    if path and path[-1] == "[key]":
        keys = _expected(detail).removeprefix("must be ")
        return Fault(field=_dotted(path[:-2]), bound=f"must have only {keys} as keys", value=shown(value))
    if kind == "missing":
        return Fault(field=name, bound="is required")
    if kind in _UNKNOWN_ERRORS:
        unknown = "is not known" if in_file else "is not a known field"
        return Fault(field=name, bound=f"{unknown}{_nearest(owner, path[-1])}")
    if in_file and value is None:
        return Fault(field=name, bound="has no value; write one, or remove the key")
    bound = _bound_in_file(hint, detail) if in_file else _bound(hint, detail)
    return Fault(field=name, bound=bound, value=as_written(value) if in_file else shown(value))


def _bound(hint: Any, detail: ErrorDetails) -> str:
    interval = _mark(hint, "ge")
    if detail["type"] not in {"greater_than_equal", "less_than_equal"} or interval is None:
        return _expected(detail)
    least, most = (duration_text(end) if isinstance(end, timedelta) else end for end in (interval.ge, interval.le))
    return f"must be at least {least}" if most is None else f"must be {least} to {most}"


def _bound_in_file(hint: Any, detail: ErrorDetails) -> str:
    interval, parsed = _mark(hint, "ge"), _mark(hint, "expects")
    write = str if parsed is None else parsed.write
    match detail["type"]:
        case "greater_than_equal":
            return f"must be at least {write(interval.ge)}"
        case "less_than_equal":
            return f"must be at most {write(interval.le)}"
        case "value_error":
            return _expected(detail)
        case kind if parsed is not None and parsed.expects:
            return f"must be {parsed.expects}"
        case kind:
            return "must be a mapping" if kind.startswith("dataclass") else _expected(detail)


def _expected(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "value_error":
            return str(context["error"])
        case "enum" | "literal_error":
            return "must be one of " + str(context["expected"]).replace("' or '", "', '").replace("'", "")
        case "dataclass_type":
            return f"must be a {context['class_name']}"
    sentences = (sentence for beginning, sentence in _EXPECTED.items() if kind.startswith(beginning))
    return next(sentences, detail["msg"].replace("Input should be", "must be"))


def _dotted(path: list[str]) -> str:
    return ".".join(named(part) for part in path)


def _nearest(owner: Any, name: str) -> str:
    """The end of a sentence about an unknown name: the field that was probably meant, also of a record inside."""
    hints: dict[str, Any] = _by_key(owner) if is_dataclass(owner) else {}  # type: ignore[arg-type]  # a class
    inside = {key: _bare(hint) for key, hint in hints.items() if is_dataclass(_bare(hint))}
    close = difflib.get_close_matches(name, hints, n=1)
    close = close or [f"{key}.{name}" for key, inner in inside.items() if name in _by_key(inner)]
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


def _mark(hint: Any, attribute: str) -> Any:
    """What an annotation, or a part of a union, carries beside its type, by an attribute of it; None for nothing."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, types.UnionType} else (hint,)
    marks = (mark for part in parts for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if hasattr(mark, attribute)), None)
