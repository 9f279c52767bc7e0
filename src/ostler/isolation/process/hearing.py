"""What an agent in a process of its own says, checked word by word: it may be broken, or worse.

Whatever is not as agreed raises `WireError`, and the cell that hears it is ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAsked
from ostler.agents.failures import MAX_MESSAGE
from ostler.agents.messages import M, checked_message
from ostler.errors import AgentExecutionError, AgentGoneError, ValidationError
from ostler.isolation.base import Exit, Verb
from ostler.isolation.calls import CANCELLED, Outcome
from ostler.isolation.wire import WireError
from ostler.model.attempt import AttemptOutcome
from ostler.model.text import clean_text, clipped

#: What `agents.failures` writes at most, with room for what it leaves out.
_MAX_TRACE = 20_000
#: Characters that some store cannot keep.
_UNKEEPABLE = re.compile("[\0\ud800-\udfff]")


def message_of(said: Mapping[str, Any]) -> Message:
    match said.get("kind"):
        case "progress":
            return _checked(
                Progress(fraction=said.get("fraction"), message=said.get("message"), details=said.get("details"))
            )
        case "signal":
            return _checked(
                Signal(name=said.get("name", ""), payload=said.get("payload"), number=said.get("number", 0))
            )
        case "tokens":
            return _checked(
                TokensUsed(count=said.get("count", -1), model=said.get("model"), number=said.get("number", 0))
            )
        case "metric":
            return _checked(MetricReported(name=said.get("name", ""), value=said.get("value", None)))
        case other:
            raise WireError(f"a message of the unknown kind {other!r:.40}")


def wait_of(asked: Mapping[str, Any], ask_id: UUID) -> WaitAsked:
    seconds, call = asked.get("timeout_seconds"), asked.get("call")
    try:
        timeout = None if seconds is None else timedelta(seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError("a timeout that is no number of seconds") from error
    return _checked(
        WaitAsked(
            kind=asked.get("kind", ""),
            reason=asked.get("reason"),
            timeout=timeout,
            detail=asked.get("detail"),
            ask_id=ask_id,
            call_id=None if call is None else read_key(call)[1],
        )
    )


def _checked(message: M) -> M:
    try:
        return checked_message(message)
    except ValidationError as error:
        raise WireError(error.faults[0].message) from error


def outcome_of(answer: Mapping[str, Any]) -> Outcome:
    """How a call went."""
    if "gone" in answer:
        return Outcome(error=AgentGoneError(_text("message", answer["gone"])))
    if "error" in answer:
        return Outcome(error=error_of(answer["error"]))
    if "crash" in answer:
        return Outcome(crash=crash_of(answer["crash"]))
    if answer.get("cancelled"):
        return CANCELLED
    if "ok" not in answer:
        raise WireError("an answer that says nothing")
    return Outcome(answer=answer["ok"])


def error_of(said: Any) -> AgentExecutionError:
    told = said if isinstance(said, Mapping) else {}
    kind, trace = told.get("exception_type"), told.get("stack_trace")
    return AgentExecutionError(
        _text("message", told.get("message")),
        exception_type=None if kind is None else _text("exception_type", kind),
        stack_trace=None if trace is None else clipped(clean_text(_str("stack_trace", trace)), _MAX_TRACE),
    )


def crash_of(said: Any) -> Exit:
    error = error_of(said)
    return Exit(
        outcome=AttemptOutcome.ERROR,
        detail=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
    )


def calls_of(state: Mapping[str, Any]) -> dict[UUID, Verb]:
    """The calls that it works on."""
    calls = state.get("calls")
    if not isinstance(calls, list):
        raise WireError("a state without its calls")
    keys = (read_key(one.get("id")) if isinstance(one, Mapping) else read_key(None) for one in calls)
    return {call_id: verb for verb, call_id in keys}


def key_of(verb: Verb, call_id: UUID) -> str:
    """What a call goes by on the channel. The verb is in it, so that an answer alone tells what was asked."""
    return f"{verb.value}:{call_id}"


def read_key(key: Any) -> tuple[Verb, UUID]:
    verb, _, call_id = _str("id", key).partition(":")
    try:
        return Verb(verb), UUID(call_id)
    except ValueError as error:
        raise WireError(f"the id {key!r:.60}") from error


def _str(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise WireError(f"a {field} that is no text")
    return value


def _text(field: str, value: Any) -> str:
    return clipped(clean_text(_str(field, value)), MAX_MESSAGE)


def ask_key(key: Any) -> str | int:
    """What an agent calls one of its questions."""
    if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, str) and _UNKEEPABLE.search(key)):
        raise WireError(f"the id {key!r:.60}")
    return key
