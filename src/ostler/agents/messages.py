"""The messages of an agent to its manager, and their checks. Plain data that crosses threads, pipes and networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import isfinite
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from uuid import UUID

from ostler.errors import ValidationError
from ostler.model.context import json_faults
from ostler.model.text import clipped, name_faults
from ostler.model.types import MAX_COUNT
from ostler.model.validation import Fault, shown

#: Of a text; the rest is cut off.
MAX_TEXT = 2000
_LONGEST = timedelta(days=3650)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far it is: a fraction from 0 to 1, words, or both."""

    fraction: float | None = None
    message: str | None = None
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """A named message to the supervisor of the agent."""

    name: str
    payload: Mapping[str, Any] | None = None
    #: At level process 1, 2, 3 ... per attempt, counted together with `TokensUsed`; elsewhere 0.
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensUsed:
    count: int
    model: str | None = None
    #: As in `Signal`.
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricReported:
    """A number that the agent itself counts, by its own name."""

    name: str
    value: float


Message = Progress | Signal | TokensUsed | MetricReported


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitAsked:
    """It cannot go on without something from outside."""

    kind: str
    reason: str | None = None
    timeout: timedelta | None = None
    detail: Mapping[str, Any] | None = None
    #: Set by the isolation level: the id of the question, which stays when it is sent again, and its call.
    ask_id: UUID | None = None
    call_id: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitAnswer:
    """How a wait ended: `outcome` is the word that was answered, or "timeout"."""

    outcome: str
    answer: Mapping[str, Any] | None = None

    @property
    def timed_out(self) -> bool:
        return self.outcome == "timeout"


class Voice(Protocol):
    """The way from an agent to its manager. An isolation level gives it to the context."""

    def say(self, message: Message) -> None:
        """Returns at once, from any thread; the manager hears it in order."""
        ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        """Awaited on the agent's own loop."""
        ...


# --- checks, the same where a message leaves the agent and where it arrives --------------------------

M = TypeVar("M", bound=Message | WaitAsked)


def checked_message(message: M) -> M:
    """The message with numbers as floats and texts cut to their length, or `ValidationError` with every fault."""
    faults: list[Fault] = []
    checked: dict[str, Any] = {}
    if isinstance(message, Progress) and message.fraction is None and message.message is None and not message.details:
        faults.append(Fault(field="report", bound="must say something: a fraction, a message or details"))
    for field in fields(message):
        value = getattr(message, field.name)
        if field.name in _CHECKS and (value is not None or field.default is not None):
            faults.extend(_CHECKS[field.name](field.name, value))
            checked[field.name] = value
    if faults:
        raise ValidationError(faults)
    for name in checked.keys() & {"fraction", "value"}:
        checked[name] = float(checked[name])
    for name in checked.keys() & {"message", "reason"}:
        checked[name] = clipped(checked[name], MAX_TEXT)
    return replace(message, **checked)


def _number_faults(field: str, value: Any) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield Fault(field=field, bound="must be a number", value=shown(value))
        return
    try:
        finite = isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        yield Fault(field=field, bound="must be a finite number", value=shown(value))


def _count_faults(field: str, value: Any) -> Iterator[Fault]:
    if isinstance(value, bool) or not isinstance(value, int):
        yield Fault(field=field, bound="must be a whole number", value=shown(value))
    elif not 0 <= value <= MAX_COUNT:
        yield Fault(field=field, bound=f"must be 0 to {MAX_COUNT}", value=shown(value))


def _fraction_faults(field: str, value: Any) -> Iterator[Fault]:
    faults = tuple(_number_faults(field, value))
    yield from faults
    if not faults and not 0 <= value <= 1:
        yield Fault(field=field, bound="must be 0 to 1", value=shown(value))


def _text_faults(field: str, value: Any) -> Iterator[Fault]:
    if not isinstance(value, str):
        yield Fault(field=field, bound="must be text", value=shown(value))


def word_faults(field: str, value: Any) -> Iterator[Fault]:
    yield from _text_faults(field, value)
    yield from name_faults(field, value)


def duration_faults(field: str, value: Any) -> Iterator[Fault]:
    if not (isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST):
        yield Fault(field=field, bound="must be a duration above zero and at most 3650 days", value=shown(value))


def _mapping_faults(field: str, value: Any) -> Iterator[Fault]:
    if not isinstance(value, Mapping):
        yield Fault(field=field, bound="must be a mapping", value=shown(value))
    yield from json_faults(field, value)


#: By field, which means the same in every message.
_CHECKS: Mapping[str, Callable[[str, Any], Iterator[Fault]]] = MappingProxyType(
    {
        **dict.fromkeys(("name", "kind", "model"), word_faults),
        **dict.fromkeys(("message", "reason"), _text_faults),
        **dict.fromkeys(("details", "payload", "detail"), _mapping_faults),
        **dict.fromkeys(("count", "number"), _count_faults),
        "fraction": _fraction_faults,
        "value": _number_faults,
        "timeout": duration_faults,
    }
)
