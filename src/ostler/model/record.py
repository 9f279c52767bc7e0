"""The base of every record: frozen, keyword-only, to JSON and back, validated on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform

from ostler.model.validation import Fault, ValidationResult, fault, faults_of, named

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a subclass of `Record` a frozen dataclass whose fields are given by name."""
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


def adapter(cls: Any) -> TypeAdapter[Any]:
    """Pydantic's validator and serialiser of a type. The first call imports pydantic (60 ms)."""
    return _new_adapter(cls)  # a type checker takes no class for hashable


@cache
def _new_adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - a program that only names a state does not pay for it

    return TypeAdapter(cls)


class Record:
    """Constructing a record never raises; `validate()` lists every fault and `checked()` raises with all of them.

    A record that came from outside may hold "30s" where a duration is meant. Only the copy from `checked()` is safe
    to use, so every public entry point calls it.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "revalidate_instances": "always",
        "extra": "forbid",
        "allow_inf_nan": False,  # JSON has no word for them: they would come back as null
        "ser_json_timedelta": "float",
    }

    @classmethod
    def spelled(cls, field: str) -> str:
        """The key of a field where the record is read from a mapping."""
        return field

    def evolve(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # every subclass is a dataclass

    def rules(self) -> Iterator[Fault]:
        """Relations between fields that annotations cannot express; asked when each field has its type and range."""
        return iter(())

    def validate(self) -> ValidationResult[Self]:
        return _validated(type(self), self)

    def checked(self) -> Self:
        """The coerced copy, or `ValidationError` with every fault."""
        return self.validate().require()

    @classmethod
    def coerced(cls, source: Any) -> Self:
        """The checked copy of a record of this class or of a subclass; the defaults for None."""
        return _validated(cls, cls() if source is None else source).require()

    def to_json(self) -> str:
        return adapter(type(self)).dump_json(self).decode()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values: dict[str, Any] = adapter(type(self)).dump_python(self, mode="json")
        return values

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return _validated(cls, _parsed(cls, text)).require()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From values as a file or a caller gives them; unknown names are faults."""
        return _validated(cls, dict(values)).require()


class PartialRecord(Record):
    """A record that remembers which fields were named when it was made, so that it can be laid over another one."""

    __slots__ = ("fields_set",)
    fields_set: frozenset[str]

    def __new__(cls, *_: Any, **named: Any) -> Self:
        self = object.__new__(cls)
        object.__setattr__(self, "fields_set", frozenset(named))
        return self

    def evolve(self, **changes: Any) -> Self:
        copy = dataclasses.replace(self, **changes)  # type: ignore[type-var]  # every subclass is a dataclass
        object.__setattr__(copy, "fields_set", self.fields_set | changes.keys())
        return copy

    def over(self, base: Self) -> Self:
        """`base` with the fields that were named here; a partial record inside is laid over its counterpart."""
        changes: dict[str, Any] = {}
        for name in self.fields_set:
            mine, theirs = getattr(self, name), getattr(base, name)
            both = isinstance(mine, PartialRecord) and isinstance(theirs, PartialRecord)
            changes[name] = mine.over(theirs) if both else mine
        return base.evolve(**changes)


def _validated(cls: type[T], source: Any) -> ValidationResult[T]:
    from pydantic import ValidationError as PydanticError  # noqa: PLC0415 - see `adapter`

    try:
        value = _read(cls, source)
    except PydanticError as error:
        faults = tuple(faults_of(cls, error.errors()))
    else:
        faults = tuple(_rule_faults(value))
        return ValidationResult(faults=faults, value=None if faults else value)
    rest = source
    for known in faults:
        rest = _without(rest, known.field.split("."))
    try:
        broken = tuple(_rule_faults(_read(cls, rest)))
    except PydanticError:  # a required field is wrong: what the rules say of the others comes later
        broken = ()
    # A rule about all of a record may be broken only because a field of it was left out.
    others = (each for each in broken if not any(f"{known.field}.".startswith(f"{each.field}.") for known in faults))
    return ValidationResult(faults=(*faults, *others))


def _read(cls: type[T], source: Any) -> T:
    value: T = adapter(cls).validate_python(source)
    _carry_fields_set(source, value)
    return value


def _without(source: Any, path: list[str]) -> Any:
    """The values of a mapping, a list or a record without the field at the end of the path; None for anything else."""
    if isinstance(source, Record):
        source = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}  # type: ignore[arg-type]
    if isinstance(source, list | tuple) and path[1:]:
        return [_without(entry, path[1:]) if str(place) == path[0] else entry for place, entry in enumerate(source)]
    if not isinstance(source, Mapping):
        return None
    inner = _without(source.get(path[0]), path[1:]) if path[1:] else None
    rest = {key: value for key, value in source.items() if key != path[0]}
    return rest if inner is None else {**rest, path[0]: inner}


def _parsed(cls: type[Any], text: str | bytes) -> Any:
    from pydantic_core import from_json  # noqa: PLC0415 - see `adapter`

    try:
        return from_json(text if isinstance(text, bytes) else text.encode(), allow_inf_nan=False)
    except ValueError as error:
        raise fault(cls.__name__, f"must be valid JSON ({error})") from None


def _rule_faults(value: Any, prefix: str = "") -> Iterator[Fault]:
    """What the rules of a record and of those inside it say."""
    if isinstance(value, Record):
        yield from (broken.under(prefix) if prefix else broken for broken in value.rules())
    for key, inner in _inside(value):
        yield from _rule_faults(inner, f"{prefix}.{named(key)}".lstrip("."))


def _inside(value: Record | dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The records and mappings in a record, or the records in a mapping, each by its key."""
    if isinstance(value, Record):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]  # every subclass is a dataclass
            inner = getattr(value, field.name)
            if isinstance(inner, (Record, dict)):
                yield value.spelled(field.name), inner
    else:
        yield from ((key, inner) for key, inner in value.items() if isinstance(inner, Record))


def _carry_fields_set(source: Any, value: Any) -> None:
    """Pydantic makes its copies without naming fields, so the names are taken from the source."""
    is_mapping = isinstance(source, Mapping)
    for key, inner in _inside(value):
        _carry_fields_set(source.get(key) if is_mapping else getattr(source, key, None), inner)
    if isinstance(value, PartialRecord):
        fields_set = getattr(source, "fields_set", None)
        if is_mapping:
            every = dataclasses.fields(value)  # type: ignore[arg-type]  # every subclass is a dataclass
            fields_set = frozenset(field.name for field in every if value.spelled(field.name) in source)
        if fields_set is not None:
            object.__setattr__(value, "fields_set", fields_set)
