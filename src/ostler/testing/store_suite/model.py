"""The store as a few dictionaries: what the state machine beside it holds the real ones against.

It knows nothing of commits, batches or rows. It answers each command with what must come out, or with the
error that must be raised, and changes itself only in the first case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from ostler.errors import IdempotencyConflictError, InvalidOperationError, LicenseError, OstlerError
from ostler.model import (
    ACTIVE_STATES,
    AgentState,
    AgentStateTransitions,
    HealthState,
    TaskState,
    TaskStateTransitions,
)

DAY = timedelta(days=1)


@dataclass
class ModelInstance:
    state: AgentState = AgentState.INITIALIZING
    health: HealthState = HealthState.UNKNOWN
    version: int = 1
    attempt: int = 1
    restarts: int = 0
    ended: datetime | None = None
    #: Of the current attempt: whether it is known what was started, and whether that has ended.
    started: bool = False
    over: bool = False

    @property
    def may_live(self) -> bool:
        return self.started and not self.over

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES

    def seen(self) -> tuple[object, ...]:
        return self.state, self.health, self.version, self.attempt, self.restarts, self.ended


@dataclass
class ModelTask:
    state: TaskState = TaskState.QUEUED
    version: int = 1
    updated: datetime | None = None


@dataclass
class Model:
    cap: int
    instances: dict[UUID, ModelInstance] = field(default_factory=dict)
    tasks: dict[UUID, ModelTask] = field(default_factory=dict)
    #: Wait to the instance it holds; gone when it has ended.
    waits: dict[UUID, UUID] = field(default_factory=dict)
    ended_waits: set[UUID] = field(default_factory=set)
    #: Key to body, answer and time.
    answers: dict[str, tuple[str, UUID, datetime]] = field(default_factory=dict)
    spawned: int = 0
    epoch: int = 0

    @property
    def active(self) -> int:
        return sum(one.active for one in self.instances.values())

    def room(self) -> type[OstlerError] | None:
        return LicenseError if self.active >= self.cap else None

    def answered(self, key: str, body: str, now: datetime) -> UUID | type[OstlerError] | None:
        """The answer that a repeated key must get, or the conflict, or None for a fresh one."""
        if key not in self.answers or now - self.answers[key][2] >= DAY:
            return None
        known, answer, _ = self.answers[key]
        return answer if known == body else IdempotencyConflictError

    def move_error(self, instance_id: UUID, to: AgentState, *, freezing: bool) -> type[OstlerError] | None:
        legal = AgentStateTransitions.is_valid(self.instances[instance_id].state, to, freezing=freezing)
        return None if legal and to is not AgentState.INITIALIZING else InvalidOperationError

    def move(self, instance_id: UUID, to: AgentState, now: datetime) -> None:
        one = self.instances[instance_id]
        one.state, one.version = to, one.version + 1
        one.ended = None if one.active else one.ended or now

    def restart_error(self, instance_id: UUID) -> type[OstlerError] | None:
        one = self.instances[instance_id]
        if one.state is not AgentState.FAILED:
            return InvalidOperationError
        return self.room() or (InvalidOperationError if one.may_live else None)

    def restart(self, instance_id: UUID) -> None:
        one = self.instances[instance_id]
        one.state, one.health, one.ended = AgentState.INITIALIZING, HealthState.UNKNOWN, None
        one.restarts += 1
        self.start(instance_id)

    def start(self, instance_id: UUID) -> None:
        """A new attempt, of which nothing is known yet."""
        one = self.instances[instance_id]
        one.version, one.attempt, one.started, one.over = one.version + 1, one.attempt + 1, False, False

    def start_error(self, instance_id: UUID) -> type[OstlerError] | None:
        one = self.instances[instance_id]
        return None if one.state is AgentState.SUSPENDED and one.over else InvalidOperationError

    def park(self, instance_id: UUID) -> None:
        one = self.instances[instance_id]
        one.health = HealthState.UNKNOWN
        self.start(instance_id)

    def end_wait_error(self, wait_id: UUID, instance_id: UUID) -> type[OstlerError] | None:
        """None where the wait is open and holds this instance."""
        return None if self.waits.get(wait_id) == instance_id else InvalidOperationError

    def end_wait(self, wait_id: UUID) -> None:
        self.waits.pop(wait_id, None)
        self.ended_waits.add(wait_id)

    def report(self, instance_id: UUID, health: HealthState) -> None:
        one = self.instances[instance_id]
        if one.health is not health:
            one.health, one.version = health, one.version + 1
            one.restarts = 0 if health is HealthState.HEALTHY else one.restarts

    def task_error(self, task_id: UUID, to: TaskState) -> type[OstlerError] | None:
        return None if TaskStateTransitions.is_valid(self.tasks[task_id].state, to) else InvalidOperationError

    def sweep(self, now: datetime) -> None:
        held = set(self.waits.values())
        for instance_id, one in list(self.instances.items()):
            if one.ended is not None and one.ended <= now - DAY and instance_id not in held and not one.may_live:
                del self.instances[instance_id]
        for task_id, task in list(self.tasks.items()):
            over = task.state in {TaskState.ACCEPTED, TaskState.REJECTED}
            if over and task.updated is not None and task.updated <= now - DAY:
                del self.tasks[task_id]
