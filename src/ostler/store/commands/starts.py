"""Commands that start an instance anew: after it failed, and after it was parked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentAttemptStartedEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentRestartingEvent,
    AgentState,
    AgentStateChangedEvent,
    Attempt,
    AttemptOutcome,
    Fault,
    clean_text,
)
from ostler.policy import slot_refusal
from ostler.store.commands.checking import count_faults, delay_faults, optional_faults, said_faults
from ostler.store.commands.instances import OnInstance, require_move
from ostler.store.commands.records import close_wait
from ostler.store.kinds import Kind
from ostler.store.unit import Unit


@dataclass(kw_only=True, eq=False)
class RestartInstance(OnInstance):
    """From failed back to initializing: a new attempt, counted, and with a place in the quota taken anew."""

    action: ClassVar[str] = "restart"

    max_attempts: int
    delay: timedelta | None = None
    reason: str | None = None
    #: The task that this start is a try at.
    task_id: UUID | None = None
    #: The claim on this restart: the wait that announced it. Exactly one caller gets it; None is by hand.
    end_wait: UUID | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from count_faults("max_attempts", self.max_attempts)
        if self.delay is not None:
            yield from delay_faults("delay", self.delay)
        yield from optional_faults("task_id", self.task_id, UUID)
        yield from optional_faults("end_wait", self.end_wait, UUID)
        yield from said_faults("reason", self.reason)

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        require_move(old, AgentState.INITIALIZING)
        workspace = unit.workspace(old.workspace_id or HOME_WORKSPACE_ID)
        refusal = slot_refusal(workspace.tier, unit.ledger(workspace.workspace_id).active)
        if refusal is not None:
            raise refusal.to_error()
        new = old.evolve(
            state=AgentState.INITIALIZING,
            version=old.version + 1,
            attempt=old.attempt + 1,
            restart_count=old.restart_count + 1,
            lifetime_restarts=old.lifetime_restarts + 1,
            updated_at=unit.now,
            terminated_at=None,
            error_message=None,
            health=AgentHealthStatus(),
        )
        unit.put(Kind.INSTANCE, new)
        _close_start(unit, old)
        if self.task_id is not None:
            unit.task(self.task_id)
        start = Attempt(instance_id=new.instance_id, number=new.attempt, intended_at=unit.now, task_id=self.task_id)
        unit.put(Kind.ATTEMPT, start)
        self._emit(unit, old, new)
        unit.audit(self.by, self.action, self.subject, detail=f"attempt {new.attempt}")
        if self.end_wait is not None:
            close_wait(unit, self.by, self.end_wait, "restarted", of=new.instance_id)
        return new

    def _emit(self, unit: Unit, old: AgentInstance, new: AgentInstance) -> None:
        reason = clean_text(self.reason) if self.reason else None
        if self.end_wait is None:  # one that was claimed was announced when it failed
            unit.emit(
                AgentRestartingEvent,
                self.by,
                new,
                attempt_number=new.restart_count,
                max_attempts=self.max_attempts,
                delay_before_retry=self.delay,
                reason=reason,
            )
        unit.emit(AgentStateChangedEvent, self.by, new, previous_state=old.state, new_state=new.state, reason=reason)


def _close_start(unit: Unit, record: AgentInstance) -> None:
    """At most one live attempt: one that was really started must be known to have ended before the next."""
    last: Attempt | None = unit.get(Kind.ATTEMPT, (record.instance_id, record.attempt))
    if last is None or not last.is_open:
        return
    if last.identity is not None:
        raise InvalidOperationError(
            f"attempt {last.number} of instance {record.instance_id} was started and has not ended; "
            "end it first, or its process may live on beside the new one"
        )
    unit.put(
        Kind.ATTEMPT,
        last.evolve(ended_at=unit.now, outcome=AttemptOutcome.UNKNOWN, detail="nothing was seen to start"),
    )


@dataclass(kw_only=True, eq=False)
class NewAttempt(OnInstance):
    """A parked instance comes back: it was suspended, what ran has ended, and a new start goes on with its task."""

    action: ClassVar[str] = "attempt.new"

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if old.state is not AgentState.SUSPENDED:
            raise InvalidOperationError(
                f"{self.subject} is {old.state}; only a suspended one comes back by a new attempt", current=old.state
            )
        last: Attempt = unit.get(Kind.ATTEMPT, (old.instance_id, old.attempt))
        if last.is_open:
            raise InvalidOperationError(
                f"attempt {last.number} of {self.subject} has not ended; it goes on where it is, or is ended first",
                current=old.state,
            )
        new = old.evolve(
            version=old.version + 1, attempt=old.attempt + 1, updated_at=unit.now, health=AgentHealthStatus()
        )
        unit.put(Kind.INSTANCE, new)
        start = Attempt(instance_id=new.instance_id, number=new.attempt, intended_at=unit.now, task_id=last.task_id)
        unit.put(Kind.ATTEMPT, start)
        unit.emit(AgentAttemptStartedEvent, self.by, new)
        unit.audit(self.by, self.action, self.subject, detail=f"attempt {new.attempt}")
        return new
