"""Checks every field of what an agent process sends: it runs foreign code.

What is not valid raises `ProtocolError`, and the cell is ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from math import isfinite
from typing import Any
from uuid import UUID

from ostler.agent_process.framing import ProtocolError
from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAsked
from ostler.agents.failures import MAX_MESSAGE
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Exit, Verb
from ostler.isolation.calls import CANCELLED, Outcome
from ostler.model.attempt import AttemptOutcome
from ostler.model.context import MAX_BYTES, MAX_DEPTH, json_faults
from ostler.model.text import clean_text, clipped, name_faults
from ostler.model.types import MAX_COUNT

#: What `agents.failures` writes at most, with room for what it leaves out.
_MAX_TRACE = 20_000
MAX_CALLS = 10_000
_LONGEST_SECONDS = 3650 * 86400.0
#: Characters that some store cannot keep.
_UNKEEPABLE = re.compile("[\0\ud800-\udfff]")


def message_of(said: Mapping[str, Any]) -> Message:
    match said.get("kind"):
        case "progress":
            fraction, message = said.get("fraction"), said.get("message")
            return Progress(
                fraction=None if fraction is None else _number("fraction", fraction, 0, 1),
                message=None if message is None else _text("message", message),
                details=_mapping("details", said.get("details")),
            )
        case "signal":
            return Signal(
                name=_name("name", said.get("name")),
                payload=_mapping("payload", said.get("payload")),
                number=_count(said.get("number", 0)),
            )
        case "tokens":
            model = said.get("model")
            return TokensUsed(
                count=_count(said.get("count")),
                model=None if model is None else _name("model", model),
                number=_count(said.get("number", 0)),
            )
        case "metric":
            return MetricReported(name=_name("name", said.get("name")), value=_number("value", said.get("value")))
        case other:
            raise ProtocolError(f"a message of the unknown kind {other!r:.40}")


def wait_of(asked: Mapping[str, Any], ask_id: UUID) -> WaitAsked:
    reason, seconds, call = asked.get("reason"), asked.get("timeout_seconds"), asked.get("call")
    return WaitAsked(
        kind=_name("kind", asked.get("kind")),
        reason=None if reason is None else _text("reason", reason),
        timeout=None if seconds is None else timedelta(seconds=_number("timeout", seconds, 0, _LONGEST_SECONDS)),
        detail=_mapping("detail", asked.get("detail"), may_be_long=True),
        ask_id=ask_id,
        call_id=None if call is None else read_key(call)[1],
    )


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


def calls_of(welcome: Mapping[str, Any]) -> dict[UUID, Verb]:
    """Running and unacknowledged calls of an adopted agent."""
    keys = welcome.get("calls")
    if not isinstance(keys, list) or len(keys) > MAX_CALLS:
        raise ProtocolError("a welcome without its calls")
    return {call_id: verb for verb, call_id in map(read_key, keys)}


def questions_of(welcome: Mapping[str, Any]) -> list[str | int]:
    keys = welcome.get("questions")
    if not isinstance(keys, list):
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


def _name(field: str, value: Any) -> str:
    text = _str(field, value)
    for fault in name_faults(field, text):
        raise ProtocolError(fault.message)
    return text


def _number(field: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"a {field} that is no number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ProtocolError(f"a {field} that no machine can hold") from error
    if not isfinite(number):
        raise ProtocolError(f"a {field} that is no number")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ProtocolError(f"a {field} out of bounds")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ProtocolError("a count that is none")
    return value


def _mapping(field: str, value: Any, *, may_be_long: bool = False) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{field} that is no mapping")
    if not _is_plain(value) or (may_be_long and len(json.dumps(value)) > MAX_BYTES):
        for fault in json_faults(field, value):
            raise ProtocolError(fault.message)
    return value


def _is_plain(value: Mapping[str, Any]) -> bool:
    """Whether there is nothing to look into: it came as JSON, so that a quick look is enough for nearly all.

    The thorough one knows where a fault stands, and takes so long for that that many values would hold up everybody.
    """
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in layer:
            kind = type(item)
            if kind is str:
                if _UNKEEPABLE.search(item):
                    return False
            elif kind is list:
                below.extend(item)
            elif kind is dict:
                below.extend(item)  # its keys are text like any other
                below.extend(item.values())
            elif kind is float and not isfinite(item):
                return False
        if not below:
            return True
        layer = below
    return False


def ask_key(key: Any) -> str | int:
    """What an agent calls one of its questions."""
    if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, str) and _UNKEEPABLE.search(key)):
        raise ProtocolError(f"the id {key!r:.60}")
    return key
