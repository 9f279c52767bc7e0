"""A call to an agent as its caller sees it, and how it went: the same at all levels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.agents.failures import execution_error
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Exit, Verb
from ostler.model.attempt import AttemptOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one call went, as it is seen where the agent lives."""

    answer: Any = None
    error: Exception | None = None
    crash: Exit | None = None
    cancelled: bool = False

    def result(self, *, is_closing: bool) -> Any:
        """What the caller gets: the answer, or an error. `is_closing`: the cell was told to end, or has ended."""
        if self.error is not None:
            raise self.error
        if self.crash is not None:
            raise AgentGoneError(f"the agent ended before it answered: {self.crash.detail}")
        if not self.cancelled:
            return self.answer
        if is_closing:
            raise AgentGoneError
        raise AgentExecutionError(
            "CancelledError: the agent cancelled its own work", exception_type="asyncio.CancelledError"
        )


CANCELLED = Outcome(cancelled=True)


@dataclass(eq=False, slots=True)
class Call:
    """One question to the agent, from asking until its work has stopped."""

    call_id: UUID
    verb: Verb
    #: Its caller waits for this.
    done: asyncio.Future[None]
    outcome: Outcome | None = None
    #: It was told to stop and did not.
    given_up: bool = False

    def finish(self, outcome: Outcome) -> None:
        """The caller need not wait any longer. The first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
        wake(self.done)

    def result(self, *, is_closing: bool) -> Any:
        return (self.outcome or CANCELLED).result(is_closing=is_closing)


def wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def exit_by(error: BaseException) -> Exit:
    failure = execution_error(error, ours=__file__)
    return Exit(
        outcome=AttemptOutcome.ERROR,
        detail=str(failure),
        exception_type=failure.exception_type,
        stack_trace=failure.stack_trace,
    )
