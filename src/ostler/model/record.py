"""The base of every record: frozen, keyword-only, to JSON and back, checked on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self
from uuid import UUID

from ostler.model import codec
from ostler.model.states import AgentState
from ostler.model.validation import Fault, ValidationResult

#: Types that `__post_init__` leaves as they are.
_SETTLED = frozenset({str, int, bool, type(None), datetime, UUID, tuple, dict, AgentState})

#: What a count may reach; far beyond any use, and every database can hold it.
MAX_COUNT = 2**31 - 1


class Record:
    """Constructing one never raises; `validate()` lists what is wrong with it, all at once."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "revalidate_instances": "always",
        "extra": "forbid",
        # JSON has no word for them: they would come back as null.
        "allow_inf_nan": False,
    }

    def evolve(self, **changes: Any) -> Self:
        """A copy with some fields changed: what `dataclasses.replace` does, at a small part of its price.

        Every change of every agent makes one. Writing past the guard that keeps records frozen is right for a
        copy that nobody has seen yet.
        """
        cls: Any = type(self)
        values = self.__dict__ | changes
        if len(values) != len(self.__dict__):
            unknown = ", ".join(sorted(changes.keys() - cls.__dataclass_fields__.keys()))
            raise TypeError(f"{cls.__name__} has no field {unknown}")
        copy: Self = object.__new__(cls)
        object.__setattr__(copy, "__dict__", values)
        for value in changes.values():
            if type(value) not in _SETTLED and hasattr(cls, "__post_init__"):
                cls.__post_init__(copy)
                break
        return copy

    def to_json(self) -> str:
        return codec.dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode; raises one `ValidationError` with every fault."""
        return codec.load(cls, text)

    def validate(self) -> ValidationResult:
        typed = tuple(codec.check(self))
        wrong = {fault.field for fault in typed}
        ruled = tuple(fault for fault in _all_rules(self, "") if fault.field not in wrong)
        return ValidationResult(faults=typed + ruled)

    def rules(self) -> Iterator[Fault]:
        """What annotations cannot say; must bear fields of a wrong type, which are reported already."""
        return iter(())


def settle(record: Record, *names: str) -> None:
    """For `__post_init__`: a list becomes a tuple, as frozen records hold, a foreign mapping a plain one."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, list):
            object.__setattr__(record, name, tuple(value))
        elif isinstance(value, Mapping) and not isinstance(value, dict):
            object.__setattr__(record, name, dict(value))


def _all_rules(record: Record, prefix: str) -> Iterator[Fault]:
    for fault in record.rules():
        yield fault.under(prefix) if prefix else fault
    for field in dataclasses.fields(record):  # type: ignore[arg-type]  # every record is a dataclass, this base is not
        value = getattr(record, field.name)
        if isinstance(value, Record):
            yield from _all_rules(value, f"{prefix}.{field.name}" if prefix else field.name)
