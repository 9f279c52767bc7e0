"""One question to an agent inside our own program, and how it went."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.failures import execution_error
from ostler.aio import wake
from ostler.clock import Clock
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Exit, Verb
from ostler.model.attempt import AttemptOutcome

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one call went, as it is seen where the agent lives."""

    answer: Any = None
    error: Exception | None = None
    crash: Exit | None = None
    cancelled: bool = False


CANCELLED = Outcome(cancelled=True)


def answer_of(outcome: Outcome | None, *, closing: bool) -> Any:
    """What the caller gets of a call that is done; None: the agent is gone."""
    outcome = outcome or CANCELLED
    if outcome.error is not None:
        raise outcome.error
    if outcome.crash is not None:
        raise AgentGoneError(f"the agent ended before it answered: {outcome.crash.detail}")
    if not outcome.cancelled:
        return outcome.answer
    if closing:
        raise AgentGoneError
    raise AgentExecutionError(
        "CancelledError: the agent cancelled its own work", exception_type="asyncio.CancelledError"
    )


@dataclass(eq=False, slots=True)
class Call:
    """One question to the agent, from asking until its work has stopped."""

    verb: Verb
    payload: Any
    waiter: asyncio.Future[None]
    call_id: UUID
    task: asyncio.Task[Outcome] | None = None
    outcome: Outcome | None = None
    #: The caller was cancelled.
    withdrawn: bool = False
    #: It was told to stop and did not.
    given_up: bool = False

    def release(self, outcome: Outcome) -> None:
        """On the manager's loop: the caller need not wait any longer. The first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
        wake(self.waiter)

    def cancel(self) -> None:
        """On the loop on which the agent lives."""
        if self.task is not None:
            self.task.cancel()


def close_code(task: asyncio.Task[Any] | None) -> None:
    """End a task that does not heed its cancellation: its code is closed where it waits."""
    coroutine = task.get_coro() if task is not None and not task.done() else None
    if isinstance(coroutine, Coroutine):
        with contextlib.suppress(Exception):
            coroutine.close()


def exit_by(error: BaseException) -> Exit:
    told = execution_error(error, ours=__file__)
    return Exit(
        outcome=AttemptOutcome.ERROR,
        detail=str(told),
        exception_type=told.exception_type,
        stack_trace=told.stack_trace,
    )


def program_memory() -> int:
    """Bytes of real memory that the whole program holds; 0 where the machine does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class MemoryGauge:
    """The memory of the whole program, for all cells that share it: read once in a while, not once for each."""

    KEPT_SECONDS = 0.5

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read_at = float("-inf")
        self._bytes = 0

    def read(self) -> int:
        now = self._clock.mono()
        if now - self._read_at >= self.KEPT_SECONDS:
            self._read_at, self._bytes = now, program_memory()
        return self._bytes
