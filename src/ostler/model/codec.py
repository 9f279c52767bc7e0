"""Records to JSON and back, and the check of types and ranges that their annotations declare.

Pydantic does the work. It is imported at the first use, so that a program which only names a state (the
command line) does not pay for it.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from ostler.errors import ValidationError
from ostler.model.bounds import interval_of
from ostler.model.validation import Fault, duration_text, named, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "must be a whole number",
        float: "must be a finite number",
        bool: "must be true or false",
        str: "must be text",
        UUID: "must be a UUID",
        datetime: "must be a time with its zone",
        timedelta: "must be a duration",
        tuple: "must be a list",
        Mapping: "must be a mapping",
    }
)
_BOUND_KINDS = frozenset({"greater_than_equal", "less_than_equal", "finite_number"})


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - lazily, see the head of this file

    return TypeAdapter(cls)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def dump(value: Any) -> str:
    cls: Any = type(value)
    return _adapter(cls).dump_json(value).decode()


def dump_compact(value: Any, *, exclude: frozenset[str] = frozenset()) -> str:
    """Without what a reader would assume anyway; for rows that are written by the million."""
    cls: Any = type(value)
    return _adapter(cls).dump_json(value, exclude_defaults=True, exclude=set(exclude)).decode()


def revive(cls: type[T], values: dict[str, Any]) -> T:
    """A record from values of which some are Python's and some are as JSON has them."""
    kind: Any = cls
    return cast("T", _adapter(kind).validate_python(values))


def load(cls: type[T], text: str | bytes) -> T:
    """Decode strictly; every fault at once in one `ValidationError`."""
    from pydantic import ValidationError as PydanticError  # noqa: PLC0415 - lazily, see the head of this file

    kind: Any = cls
    try:
        loaded: T = _adapter(kind).validate_json(text, strict=True)
    except PydanticError as error:
        raise ValidationError(tuple(_faults(cls, error.errors()))) from error
    return loaded


def check(record: Any) -> Iterator[Fault]:
    """The faults of types and ranges in a record that was made in Python."""
    from pydantic import ValidationError as PydanticError  # noqa: PLC0415 - lazily, see the head of this file

    cls: Any = type(record)
    try:
        _adapter(cls).validate_python(record, strict=True)
    except PydanticError as error:
        yield from _faults(cls, error.errors())


def _faults(cls: type[Any], details: list[ErrorDetails]) -> Iterator[Fault]:
    for detail in details:
        path = [str(part) for part in detail["loc"]]
        yield _fault(cls, path, detail["type"], detail)


def _fault(cls: type[Any], path: list[str], kind: str, detail: ErrorDetails) -> Fault:
    name = ".".join(named(part) for part in path) or "body"
    if kind == "missing":
        return Fault(field=name, bound="is required")
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        return Fault(field=name, bound=f"is not a known field{_nearest(cls, path)}")
    if kind == "json_invalid":
        return Fault(field=name, bound=f"must be valid JSON ({detail['msg'].removeprefix('Invalid JSON: ')})")
    if path and path[-1] == "[key]":
        return _key_fault(cls, path[:-2], detail)
    if kind == "string_unicode":
        return Fault(field=name, bound="must be text without lone surrogates", value=shown(detail["input"]))
    base, bound = _declared(cls, path)
    if kind in _BOUND_KINDS and bound:
        return Fault(field=name, bound=bound, value=shown(detail["input"]))
    return Fault(field=name, bound=_expected(base, detail), value=shown(detail["input"]))


def _key_fault(cls: type[Any], path: list[str], detail: ErrorDetails) -> Fault:
    """A wrong key of a mapping: pydantic puts it at the end of the path, before a mark."""
    hint, _ = _declared(cls, path)
    key = _unwrap((typing.get_args(hint) or (str,))[0])
    what = _expected(key, detail).replace("must be", "must have only", 1) + " as keys"
    return Fault(field=".".join(named(part) for part in path), bound=what, value=shown(detail["input"]))


def _nearest(cls: type[Any], path: list[str]) -> str:
    owner: Any = cls
    for part in path[:-1]:
        owner = _unwrap(_field_hint(owner, part))
    known = [field.name for field in fields(owner)] if is_dataclass(owner) else []
    close = difflib.get_close_matches(path[-1], known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _declared(cls: Any, path: list[str]) -> tuple[Any, str]:
    """The type at the end of a path, and its range as a sentence."""
    hint: Any = cls
    for part in path:
        hint = _field_hint(_unwrap(hint), part)
    return _unwrap(hint), _range(hint)


def _field_hint(owner: Any, part: str) -> Any:
    """The annotation of a field of a record, or of an entry of a list or mapping."""
    if isinstance(owner, type) and is_dataclass(owner):
        hints: dict[str, Any] = _hints(typing.cast("Any", owner))
        return hints.get(part, object)
    return _element(owner)


def _unwrap(hint: Any) -> Any:
    """Strip Annotated and Optional."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _unwrap(typing.get_args(hint)[0])
    if origin in {typing.Union, types.UnionType}:
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _unwrap(rest[0])
    return hint


def _element(hint: Any) -> Any:
    arguments = typing.get_args(hint)
    return arguments[-1] if arguments and arguments[-1] is not Ellipsis else (arguments or (object,))[0]


def _range(hint: Any) -> str:
    """The bound that the annotation declares: "must be 64 to 8192"."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return next((text for arg in typing.get_args(hint) if (text := _range(arg))), "")
    for mark in getattr(hint, "__metadata__", ()):
        bounds = interval_of(mark)
        if bounds is not None:
            return _interval_text(*bounds)
    return ""


def _interval_text(least: Any, most: Any) -> str:
    def say(value: Any) -> str:
        return duration_text(value) if isinstance(value, timedelta) else f"{value}"

    if most is None:
        return f"must be at least {say(least)}"
    return f"must be {say(least)} to {say(most)}"


def _expected(base: Any, detail: ErrorDetails) -> str:
    if isinstance(base, type) and issubclass(base, Enum):
        # In Python a bare value is refused as well, so that a typing mistake is found where it is made.
        for member in base:
            if isinstance(detail["input"], str) and detail["input"] == member.value:
                return f"must be {base.__name__}.{member.name}"
        return "must be one of " + ", ".join(str(member.value) for member in base)
    origin = typing.get_origin(base) or base
    if origin in _NAMES:
        return _NAMES[origin]
    if is_dataclass(base):
        return f"must be of type {base.__name__}"  # type: ignore[union-attr]  # is_dataclass does not tell a class from its object
    return str(detail["msg"]).replace("Input should be", "must be")
