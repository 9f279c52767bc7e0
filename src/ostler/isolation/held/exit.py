"""From the record of a unit's end to what the manager is told. Pure; nothing is guessed."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import UTC, datetime

from ostler.agents.command import Ending
from ostler.isolation.base import Exit
from ostler.isolation.holder import UnitExit
from ostler.model.attempt import AttemptOutcome

LOST = Exit(
    outcome=AttemptOutcome.LOST,
    detail="the keeper of this home was killed, and with it all its agents; how this one ended is not known",
)
_BY_US = {"stop": "it was stopped", "lease": "it was stopped because no manager came back for it in time"}


def exit_of(record: UnitExit, memory_mb: int, crash: Exit | None = None) -> Exit:
    """`crash` is what the agent itself said of its end: it knows the error and the trace."""
    return with_record(_exit_of(record, memory_mb, crash), record)


def with_record(how: Exit, record: UnitExit) -> Exit:
    return replace(how, code=record.code, signal=record.signal, ended_at=ended_at(record) if record.ended else None)


def with_crash(how: Exit, crash: Exit | None) -> Exit:
    """An agent that crashed while no manager was there said why before it exited."""
    if crash is None or how.outcome not in {AttemptOutcome.EXIT_CODE, AttemptOutcome.CLEAN}:
        return how
    return replace(crash, code=how.code, signal=how.signal, ended_at=how.ended_at)


def ended_at(record: UnitExit) -> datetime:
    return datetime.now(UTC) if record.ended is None else datetime.fromtimestamp(record.ended, UTC)


def _exit_of(record: UnitExit, memory_mb: int, crash: Exit | None) -> Exit:
    if _is_out_of_memory(record):
        return Exit(outcome=AttemptOutcome.OOM, detail=f"it used more memory than its limit of {memory_mb} MB")
    if crash is not None:
        return crash
    if record.by == "lost":
        return LOST
    if record.by in _BY_US:
        code = f"; exit code {record.code}" if record.code else ""
        return Exit(outcome=AttemptOutcome.STOPPED, detail=f"{_BY_US[record.by]}{code}")
    if record.by == "pids":
        return Exit(outcome=AttemptOutcome.SIGNAL, detail=record.why or "it had more processes than its limit")
    if record.signal is not None:
        return Exit(outcome=AttemptOutcome.SIGNAL, detail=f"killed by {signal_name(record.signal)}")
    if record.code is None:
        return Exit(outcome=AttemptOutcome.UNKNOWN, detail="it ended, and how is not known")
    if record.code == 0:
        return Exit(outcome=AttemptOutcome.CLEAN, detail="its process ended by itself")
    return Exit(outcome=AttemptOutcome.EXIT_CODE, detail=f"exit code {record.code}")


def ending_of(record: UnitExit, memory_mb: int) -> Ending:
    """The same for one run of a command."""
    limit = memory_mb if _is_out_of_memory(record) else None
    if record.signal is not None:
        return Ending(signal_name=signal_name(record.signal), memory_limit_mb=limit)
    return Ending(code=record.code, memory_limit_mb=limit)


def _is_out_of_memory(record: UnitExit) -> bool:
    return bool(record.oom) or record.by == "memory"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
