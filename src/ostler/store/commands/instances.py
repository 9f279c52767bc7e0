"""Commands about one life: reserve it, move it, say how it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import ClassVar
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.model import (
    AGENT_TRANSITIONS,
    HOME_WORKSPACE_ID,
    INACTIVE_STATES,
    AgentErrorEvent,
    AgentHealthChangedEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentMetricsUpdatedEvent,
    AgentRestartingEvent,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Attempt,
    Enforcement,
    Fault,
    HealthState,
    Record,
    SpawnRequest,
    clean_text,
    fold_tags,
)
from ostler.model.text import name_faults
from ostler.policy import slot_refusal
from ostler.store.actor import Actor
from ostler.store.commands.base import Command, check_attempt, check_version, remember, replayed
from ostler.store.commands.checking import kind_faults, optional_faults
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

#: What a move between two living states changes.
_LIVING = frozenset({"state", "version", "updated_at"})


@dataclass(kw_only=True, eq=False)
class ReserveInstance(Command[AgentInstance]):
    """Intent first: the record, its first attempt and its place in the quota, before anything is started."""

    action: ClassVar[str] = "spawn"
    answer: ClassVar[type[Record] | None] = AgentInstance

    request: SpawnRequest
    workspace_id: UUID = HOME_WORKSPACE_ID
    #: Used when the options name none.
    default_name: str | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("workspace_id", self.workspace_id, UUID)
        yield from name_faults("default_name", self.default_name)
        yield from self.request.validate()

    @property
    def subject(self) -> str:
        return f"definition:{self.request.agent_definition_id}"

    def apply(self, unit: Unit) -> AgentInstance:
        workspace = unit.workspace(self.workspace_id)
        known = replayed(self, unit, self.workspace_id)
        if isinstance(known, AgentInstance):
            return known
        refusal = slot_refusal(workspace.tier, unit.ledger(self.workspace_id).active)
        if refusal is not None:
            raise refusal.to_error()
        record = self._record(unit)
        unit.put(Kind.INSTANCE, record)
        unit.put(Kind.ATTEMPT, Attempt(instance_id=record.instance_id, number=1, intended_at=unit.now))
        unit.emit(
            AgentSpawnedEvent,
            self.by,
            record,
            definition_id=record.definition_id,
            user_id=record.owner_id,
            options=record.spawn_options,
            name=record.name,
        )
        unit.audit(self.by, self.action, f"instance:{record.instance_id}", detail=self.subject)
        remember(self, unit, self.workspace_id, record)
        return record

    def _record(self, unit: Unit) -> AgentInstance:
        options = self.request.options
        return AgentInstance(
            instance_id=unit.ids.new(),
            definition_id=self.request.agent_definition_id,
            state=AgentState.INITIALIZING,
            created_at=unit.now,
            updated_at=unit.now,
            spawn_options=options,
            tags=fold_tags(options.tags if options else None),
            name=(options.name if options else None) or self.default_name,
            owner_id=self.by.principal_id,
            workspace_id=self.workspace_id,
            context=self.request.context,
        )


@dataclass(kw_only=True, eq=False)
class _OnInstance(Command[AgentInstance]):
    """A command about an instance that exists. Version and attempt, where given, must still be the current ones."""

    instance_id: UUID
    expected_version: int | None = None
    attempt: int | None = None

    def faults(self) -> Iterator[Fault]:
        yield from kind_faults("instance_id", self.instance_id, UUID)
        yield from optional_faults("expected_version", self.expected_version, int)
        yield from optional_faults("attempt", self.attempt, int)

    @property
    def subject(self) -> str:
        return f"instance:{self.instance_id}"

    def _current(self, unit: Unit) -> AgentInstance:
        record = unit.instance(self.instance_id)
        check_attempt(self, record.attempt, self.attempt)
        check_version(self, record.version, self.expected_version)
        return record


@dataclass(kw_only=True, eq=False)
class MoveInstance(_OnInstance):
    """The one way from state to state."""

    action: ClassVar[str] = "move"

    to: AgentState
    #: Admits the two moves that only a freeze or a thaw makes.
    freezing: bool = False
    reason: str | None = None
    #: Why it failed; kept on the record while it is failed.
    error: AgentError | None = None
    was_graceful: bool = False
    enforcement: Mapping[str, Enforcement] | None = None

    def faults(self) -> Iterator[Fault]:
        by_id_alone = self.expected_version is None and self.attempt is None
        if by_id_alone and type(self.to) is AgentState and type(self.instance_id) is UUID:
            return iter(())  # by far the most common
        return chain(super().faults(), kind_faults("to", self.to, AgentState))

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        to, now = self.to, unit.now
        if to not in AGENT_TRANSITIONS[old.state]:
            _require_move(old, to, freezing=self.freezing)
        if to is AgentState.INITIALIZING:
            raise InvalidOperationError(
                "a failed instance comes back by a restart, which takes a new attempt", current=old.state, wanted=to
            )
        if to in INACTIVE_STATES or self.error is not None or self.enforcement is not None:
            new = self._ended(old, unit)
            unit.put(Kind.INSTANCE, new)
        else:
            new = old.evolve(state=to, version=old.version + 1, updated_at=now)
            unit.put(Kind.INSTANCE, new, _LIVING)
        self._emit(unit, old, new)
        unit.audit(self.by, self.action, self.subject, detail=f"{old.state.value} to {to.value}")
        return new

    def _ended(self, old: AgentInstance, unit: Unit) -> AgentInstance:
        """More changes than the state: it ended, or erred, or its limits became known."""
        ends, fails = self.to in INACTIVE_STATES, self.to is AgentState.FAILED
        return old.evolve(
            state=self.to,
            version=old.version + 1,
            updated_at=unit.now,
            terminated_at=(old.terminated_at or unit.now) if ends else None,
            failing_since=(old.failing_since or unit.now) if fails else old.failing_since,
            error_message=clean_text(self.error.message) if self.error else old.error_message,
            enforcement=self.enforcement or old.enforcement,
        )

    def _emit(self, unit: Unit, old: AgentInstance, new: AgentInstance) -> None:
        reason = clean_text(self.reason) if self.reason else None
        if self.error is not None:
            self.error.emit(unit, self.by, new)
        unit.emit(AgentStateChangedEvent, self.by, new, previous_state=old.state, new_state=new.state, reason=reason)
        if new.state is AgentState.TERMINATED:
            unit.emit(
                AgentTerminatedEvent,
                self.by,
                new,
                final_state=new.state,
                was_graceful=self.was_graceful,
                reason=reason,
                uptime=new.uptime(unit.now),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentError:
    """What went wrong, as the agent or its keeper tells it."""

    message: str
    exception_type: str | None = None
    stack_trace: str | None = None
    is_recoverable: bool = False

    def emit(self, unit: Unit, by: Actor, record: AgentInstance) -> None:
        unit.emit(
            AgentErrorEvent,
            by,
            record,
            error_message=clean_text(self.message),
            exception_type=clean_text(self.exception_type) if self.exception_type else None,
            stack_trace=clean_text(self.stack_trace) if self.stack_trace else None,
            is_recoverable=self.is_recoverable,
        )


def _require_move(old: AgentInstance, to: AgentState, *, freezing: bool = False) -> None:
    if not old.can_transition_to(to, freezing=freezing):
        raise InvalidOperationError(
            f"instance {old.instance_id} is {old.state} and cannot become {to}", current=old.state, wanted=to
        )


@dataclass(kw_only=True, eq=False)
class RestartInstance(_OnInstance):
    """From failed back to initializing: a new attempt, counted, and with a place in the quota taken anew."""

    action: ClassVar[str] = "restart"

    max_attempts: int
    delay: timedelta | None = None
    reason: str | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from kind_faults("max_attempts", self.max_attempts, int)

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        _require_move(old, AgentState.INITIALIZING)
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
        unit.put(Kind.ATTEMPT, Attempt(instance_id=new.instance_id, number=new.attempt, intended_at=unit.now))
        reason = clean_text(self.reason) if self.reason else None
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
        unit.audit(self.by, self.action, self.subject, detail=f"attempt {new.attempt}")
        return new


@dataclass(kw_only=True, eq=False)
class ReportHealth(_OnInstance):
    """What a probe found. A change of state is an event; becoming healthy ends a series of restarts."""

    action: ClassVar[str] = "health"

    health: AgentHealthStatus

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from self.health.validate()

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if not old.is_active:
            raise InvalidOperationError(
                f"{self.subject} is {old.state}; its health is of no account", current=old.state
            )
        found = self.health
        if found.details is not None:
            found = found.evolve(details=clean_text(found.details))
        if found == old.health:
            return old
        healed = self.health.state is HealthState.HEALTHY
        changed = self.health.state is not old.health.state
        new = old.evolve(
            health=found,
            restart_count=0 if healed else old.restart_count,
            failing_since=None if healed else old.failing_since,
            version=old.version + 1,
            updated_at=unit.now,
        )
        unit.put(Kind.INSTANCE, new)
        if changed:
            unit.emit(
                AgentHealthChangedEvent,
                self.by,
                new,
                previous_health=old.health.state,
                new_health=new.health.state,
                details=new.health.details,
            )
            unit.audit(self.by, self.action, self.subject, detail=f"{old.health.state} to {new.health.state}")
        return new


@dataclass(kw_only=True, eq=False)
class ReportMetrics(_OnInstance):
    """A sample. Not audited: it is an observation, not an act."""

    action: ClassVar[str] = "metrics"

    metrics: AgentMetrics

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from self.metrics.validate()

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        new = old.evolve(metrics=self.metrics, version=old.version + 1, updated_at=unit.now)
        unit.put(Kind.INSTANCE, new)
        unit.emit(AgentMetricsUpdatedEvent, self.by, new, metrics=self.metrics)
        return new
