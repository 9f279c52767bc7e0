"""From a keeper's record of an end to what the manager is told. Pure; nothing is guessed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from ostler.agents.command import Ending
from ostler.isolation.base import Exit
from ostler.model.attempt import AttemptOutcome

LOST = Exit(
    outcome=AttemptOutcome.LOST,
    detail="the keeper of this home was killed, and with it all its agents; how this one ended is not known",
)
#: What ended by our own hand, by the keeper's word for it.
_OURS: Mapping[str, str] = MappingProxyType(
    {"stop": "it was stopped", "lease": "it was stopped because no manager came back for it in time"}
)
#: What was ended for breaking a limit that the machine does not hold by itself.
_PIDS = "it had more processes and threads than its limit"


def exit_of(record: Mapping[str, Any], memory_mb: int, crash: Exit | None = None) -> Exit:
    """`crash` is what the agent itself said of its end, if it could: it knows the error and the trace."""
    return with_record(_exit_of(record, memory_mb, crash), record)


def with_record(how: Exit, record: Mapping[str, Any]) -> Exit:
    """The same with what the keeper saw of the process: code, signal and time."""
    return replace(
        how,
        code=_whole(record.get("code")),
        signal=_whole(record.get("signal")),
        ended_at=ended_at(record) if isinstance(record.get("ended"), int | float) else None,
    )


def ended_at(record: Mapping[str, Any]) -> datetime:
    """When the keeper saw it end; now, where that is not known."""
    ended = record.get("ended")
    return datetime.fromtimestamp(ended, UTC) if isinstance(ended, int | float) else datetime.now(UTC)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _exit_of(record: Mapping[str, Any], memory_mb: int, crash: Exit | None) -> Exit:
    by = str(record.get("by"))
    if _is_out_of_memory(record):
        return Exit(outcome=AttemptOutcome.OOM, detail=f"it used more memory than its limit of {memory_mb} MB")
    if crash is not None:
        return crash
    if was_lost(record):
        return LOST
    if by in _OURS:
        return Exit(outcome=AttemptOutcome.STOPPED, detail=f"{_OURS[by]}{_last_word(record)}")
    if by == "pids":
        return Exit(outcome=AttemptOutcome.SIGNAL, detail=str(record.get("why") or _PIDS))
    code, number = record.get("code"), record.get("signal")
    if isinstance(number, int):
        return Exit(outcome=AttemptOutcome.SIGNAL, detail=f"killed by {signal_name(number)}")
    if not isinstance(code, int):
        return Exit(outcome=AttemptOutcome.UNKNOWN, detail="it ended, and how is not known")
    if code == 0:
        return Exit(outcome=AttemptOutcome.CLEAN, detail="its process ended by itself")
    return Exit(outcome=AttemptOutcome.EXIT_CODE, detail=f"exit code {code}")


def was_ended_by_us(record: Mapping[str, Any]) -> bool:
    return str(record.get("by")) in _OURS


def was_lost(record: Mapping[str, Any]) -> bool:
    """Whether a later keeper wrote it, which found only what outlived it."""
    return record.get("by") == "lost"


def _last_word(record: Mapping[str, Any]) -> str:
    """What a program said by its code when it was asked to end. What we killed says nothing by that."""
    code = record.get("code")
    return f"; exit code {code}" if isinstance(code, int) and code else ""


def ending_of(record: Mapping[str, Any], memory_mb: int) -> Ending:
    """The same for one run of a command, in the terms of the command."""
    limit = memory_mb if _is_out_of_memory(record) else None
    number = record.get("signal")
    if isinstance(number, int):
        return Ending(signal_name=signal_name(number), memory_limit_mb=limit)
    return Ending(code=record.get("code"), memory_limit_mb=limit)


def _is_out_of_memory(record: Mapping[str, Any]) -> bool:
    return bool(record.get("oom")) or record.get("by") == "memory"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
