"""The messages of an agent to its manager, and their checks. Plain data that crosses threads, pipes and networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isfinite
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
    faults = tuple(_faults(message))
    if faults:
        raise ValidationError(faults)
    match message:
        case Progress(fraction=fraction, message=text):
            return replace(message, fraction=None if fraction is None else float(fraction), message=_cut(text))
        case MetricReported(value=value):
            return replace(message, value=float(value))
        case WaitAsked(reason=reason):
            return replace(message, reason=_cut(reason))
        case _:
            return message


def _cut(text: str | None) -> str | None:
    return None if text is None else clipped(text, MAX_TEXT)


def _faults(message: Message | WaitAsked) -> Iterator[Fault]:
    match message:
        case Progress():
            yield from _progress_faults(message)
        case Signal():
            yield from text_faults("name", message.name)
            yield from _mapping_faults("payload", message.payload)
            yield from _count_faults("number", message.number)
        case TokensUsed():
            yield from _count_faults("count", message.count)
            yield from () if message.model is None else text_faults("model", message.model)
            yield from _count_faults("number", message.number)
        case MetricReported():
            yield from text_faults("name", message.name)
            yield from _number_faults("value", message.value)
        case WaitAsked():
            yield from text_faults("kind", message.kind)
            yield from () if message.reason is None else text_faults("reason", message.reason, is_name=False)
            yield from () if message.timeout is None else duration_faults("timeout", message.timeout)
            yield from _mapping_faults("detail", message.detail)


def _progress_faults(progress: Progress) -> Iterator[Fault]:
    fraction, text = progress.fraction, progress.message
    if fraction is None and text is None and not progress.details:
        yield Fault(field="report", bound="must say something: a fraction, a message or details")
    if fraction is not None:
        faults = tuple(_number_faults("fraction", fraction))
        yield from faults
        if not faults and not 0 <= fraction <= 1:
            yield Fault(field="fraction", bound="must be 0 to 1", value=shown(fraction))
    yield from () if text is None else text_faults("message", text, is_name=False)
    yield from _mapping_faults("details", progress.details)


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


def text_faults(field: str, value: Any, *, is_name: bool = True) -> Iterator[Fault]:
    if not isinstance(value, str):
        yield Fault(field=field, bound="must be text", value=shown(value))
    elif is_name:
        yield from name_faults(field, value)


def duration_faults(field: str, value: Any) -> Iterator[Fault]:
    if not (isinstance(value, timedelta) and timedelta(0) < value <= _LONGEST):
        yield Fault(field=field, bound="must be a duration above zero and at most 3650 days", value=shown(value))


def _mapping_faults(field: str, value: Any) -> Iterator[Fault]:
    if value is not None and not isinstance(value, Mapping):
        yield Fault(field=field, bound="must be a mapping", value=shown(value))
    yield from json_faults(field, value)
