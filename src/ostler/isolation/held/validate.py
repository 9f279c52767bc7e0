"""Checks every field of what an agent process sends: it runs foreign code.

What is not valid raises `ProtocolError`, and the cell is ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.agent_process.framing import ProtocolError
from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAsked
from ostler.agents.failures import MAX_MESSAGE
from ostler.agents.messages import M, checked_message
from ostler.errors import AgentExecutionError, AgentGoneError, ValidationError
from ostler.isolation.base import Exit, Verb
from ostler.isolation.calls import CANCELLED, Outcome
from ostler.model.attempt import AttemptOutcome
from ostler.model.text import clean_text, clipped

#: What `agents.failures` writes at most, with room for what it leaves out.
_MAX_TRACE = 20_000
MAX_CALLS = 10_000
MAX_QUESTIONS = 1000
#: Characters that some store cannot keep.
_UNKEEPABLE = re.compile("[\0\ud800-\udfff]")


def message_of(fields: Mapping[str, Any]) -> Message:
    match fields.get("kind"):
        case "progress":
            progress = {name: fields.get(name) for name in ("fraction", "message", "details")}
            return _checked(Progress(**progress))
        case "signal":
            number = fields.get("number", 0)
            return _checked(Signal(name=fields.get("name", ""), payload=fields.get("payload"), number=number))
        case "tokens":
            number = fields.get("number", 0)
            return _checked(TokensUsed(count=fields.get("count", -1), model=fields.get("model"), number=number))
        case "metric":
            return _checked(MetricReported(name=fields.get("name", ""), value=fields.get("value", None)))
        case other:
            raise ProtocolError(f"a message of the unknown kind {other!r:.40}")


def wait_of(fields: Mapping[str, Any], ask_id: UUID) -> WaitAsked:
    seconds, call = fields.get("timeout_seconds"), fields.get("call")
    try:
        timeout = None if seconds is None else timedelta(seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError("a timeout that is no number of seconds") from error
    return _checked(
        WaitAsked(
            kind=fields.get("kind", ""),
            reason=fields.get("reason"),
            timeout=timeout,
            detail=fields.get("detail"),
            ask_id=ask_id,
            call_id=None if call is None else read_key(call)[1],
        )
    )


def _checked(message: M) -> M:
    try:
        return checked_message(message)
    except ValidationError as error:
        raise ProtocolError(error.faults[0].message) from error


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
        raise ProtocolError("an answer that says nothing")
    return Outcome(answer=answer["ok"])


def error_of(value: Any) -> AgentExecutionError:
    fields = value if isinstance(value, Mapping) else {}
    kind, trace = fields.get("exception_type"), fields.get("stack_trace")
    return AgentExecutionError(
        _text("message", fields.get("message")),
        exception_type=None if kind is None else _text("exception_type", kind),
        stack_trace=None if trace is None else clipped(clean_text(_str("stack_trace", trace)), _MAX_TRACE),
    )


def crash_of(value: Any) -> Exit:
    error = error_of(value)
    return Exit(
        outcome=AttemptOutcome.ERROR,
        detail=str(error),
        exception_type=error.exception_type,
        stack_trace=error.stack_trace,
    )


def calls_of(welcome: Mapping[str, Any]) -> dict[UUID, Verb]:
    """Running and unacknowledged calls of an adopted agent."""
    keys = welcome.get("calls")
    if not isinstance(keys, list) or len(keys) > MAX_CALLS:
        raise ProtocolError("a welcome without its calls")
    return {call_id: verb for verb, call_id in map(read_key, keys)}


def questions_of(welcome: Mapping[str, Any]) -> list[str | int]:
    keys = welcome.get("questions")
    if not isinstance(keys, list) or len(keys) > MAX_QUESTIONS:
        raise ProtocolError("a welcome without its questions")
    return [ask_key(key) for key in keys]


def key_of(verb: Verb, call_id: UUID) -> str:
    """What a call goes by on the channel. The verb is in it, so that an answer alone tells what was asked."""
    return f"{verb.value}:{call_id}"


def read_key(key: Any) -> tuple[Verb, UUID]:
    verb, _, call_id = _str("id", key).partition(":")
    try:
        return Verb(verb), UUID(call_id)
    except ValueError as error:
        raise ProtocolError(f"the id {key!r:.60}") from error


def _str(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"a {field} that is no text")
    return value


def _text(field: str, value: Any) -> str:
    return clipped(clean_text(_str(field, value)), MAX_MESSAGE)


def ask_key(key: Any) -> str | int:
    """What an agent calls one of its questions."""
    if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, str) and _UNKEEPABLE.search(key)):
        raise ProtocolError(f"the id {key!r:.60}")
    return key
