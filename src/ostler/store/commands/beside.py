"""What a move may bring with it, so that a crash in between leaves neither the one nor the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from ostler.model import (
    AgentInstance,
    AgentRestartingEvent,
    AgentState,
    Attempt,
    Fault,
    Wait,
    clean_text,
)
from ostler.store.actor import Actor
from ostler.store.commands.attempts import AttemptEnd, identify
from ostler.store.commands.checking import (
    count_faults,
    delay_faults,
    kind_faults,
    mapping_faults,
    said_faults,
    word_faults,
)
from ostler.store.commands.records import close_wait, put_wait
from ostler.store.kinds import Kind
from ostler.store.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarting:
    """The announcement of a restart to come: which of how many, and after what delay."""

    attempt_number: int
    max_attempts: int
    delay: timedelta = timedelta(0)
    reason: str | None = None

    def faults(self, prefix: str) -> Iterator[Fault]:
        yield from count_faults(f"{prefix}attempt_number", self.attempt_number)
        yield from count_faults(f"{prefix}max_attempts", self.max_attempts)
        yield from delay_faults(f"{prefix}delay", self.delay)
        yield from said_faults(f"{prefix}reason", self.reason)

    def emit(self, unit: Unit, by: Actor, record: AgentInstance) -> None:
        unit.emit(
            AgentRestartingEvent,
            by,
            record,
            attempt_number=self.attempt_number,
            max_attempts=self.max_attempts,
            delay_before_retry=self.delay,
            reason=clean_text(self.reason) if self.reason else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Written together with a move, or not at all."""

    #: Why it does not run from here on, and when to look again.
    open_wait: Wait | None = None
    #: The wait that this move ends; refused when somebody else was first.
    end_wait: UUID | None = None
    wait_outcome: str = "done"
    #: What was really started, as `RecordIdentity` says it.
    identity: Mapping[str, Any] | None = None
    #: How the current start ended, as `EndAttempt` says it.
    ended: AttemptEnd | None = None
    #: It will come back by itself; only when it fails, and with the wait that will wake it.
    restarting: Restarting | None = None
    #: What it leaves behind; only when it is terminated.
    final_state: Mapping[str, Any] | None = None

    def faults(self, instance_id: UUID, to: AgentState) -> Iterator[Fault]:
        yield from self._wait_faults(instance_id)
        if self.identity is not None:
            yield from mapping_faults("beside.identity", self.identity)
        if isinstance(self.ended, AttemptEnd):
            yield from self.ended.faults("beside.ended.")
        elif self.ended is not None:
            yield from kind_faults("beside.ended", self.ended, AttemptEnd)
        if self.restarting is not None:
            yield from self._restarting_faults(to)
        if self.final_state is not None:
            yield from mapping_faults("beside.final_state", self.final_state)
            if to is not AgentState.TERMINATED:
                yield Fault(field="beside.final_state", bound="is kept only of one that becomes terminated")

    def _wait_faults(self, instance_id: UUID) -> Iterator[Fault]:
        if isinstance(self.open_wait, Wait):
            yield from (fault.under("beside.open_wait") for fault in self.open_wait.validate())
            if self.open_wait.instance_id != instance_id:
                yield Fault(field="beside.open_wait.instance_id", bound="must be the instance that moves")
            if self.open_wait.ended_at is not None:
                yield Fault(field="beside.open_wait.ended_at", bound="must be empty; what has ended is not opened")
        elif self.open_wait is not None:
            yield from kind_faults("beside.open_wait", self.open_wait, Wait)
        if self.end_wait is not None:
            yield from kind_faults("beside.end_wait", self.end_wait, UUID)
        yield from word_faults("beside.wait_outcome", self.wait_outcome)

    def _restarting_faults(self, to: AgentState) -> Iterator[Fault]:
        if not isinstance(self.restarting, Restarting):
            yield from kind_faults("beside.restarting", self.restarting, Restarting)
            return
        yield from self.restarting.faults("beside.restarting.")
        if to is not AgentState.FAILED:
            yield Fault(field="beside.restarting", bound="goes only with a move to failed")
        if self.open_wait is None:
            # Announced and not written down, it would be forgotten with the next crash.
            yield Fault(field="beside.open_wait", bound="is required with a restart to come")

    def write(self, unit: Unit, by: Actor, record: AgentInstance) -> None:
        """The rows. The old wait goes before the new one comes, and a start is known before it ends."""
        if self.end_wait is not None:
            close_wait(unit, by, self.end_wait, self.wait_outcome, of=record.instance_id)
        if self.open_wait is not None:
            put_wait(unit, by, self.open_wait)
        if self.identity is not None:
            identify(unit, record, self.identity)
        if self.ended is not None:
            start: Attempt = unit.get(Kind.ATTEMPT, (record.instance_id, record.attempt))
            self.ended.close(unit, by, start)
