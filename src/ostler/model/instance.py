"""One spawned agent: its record, its health, its metrics, and the result of ending it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import ACTIVE_STATES, AgentState, AgentStateTransitions, Enforcement, HealthState
from ostler.model.types import Interval, Moment

_NO_TIME = timedelta(0)


@record
class AgentHealthStatus(Record):
    state: HealthState = HealthState.UNKNOWN
    checked_at: Moment | None = None
    consecutive_failures: Annotated[int, Interval(ge=0)] = 0
    consecutive_successes: Annotated[int, Interval(ge=0)] = 0
    details: str | None = None


@record
class AgentMetrics(Record):
    """One sample of what an instance uses and has done."""

    sampled_at: Moment
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    thread_count: int = 0
    open_tasks: int = 0
    completed_tasks: int = 0
    failed_tasks: int = 0
    tokens_used: int = 0
    #: Numbers that the agent itself reports, by name.
    custom: Mapping[str, float] | None = None
    #: The memory is that of a program which other agents share.
    memory_is_shared: bool = False


@record
class AgentInstance(Record):
    instance_id: UUID
    definition_id: UUID
    state: AgentState
    health: AgentHealthStatus = field(default_factory=AgentHealthStatus)
    metrics: AgentMetrics | None = None
    created_at: Moment
    updated_at: Moment
    #: Set while the state is terminated or failed.
    terminated_at: Moment | None = None
    #: Restarts by the policy since it was last healthy.
    restart_count: int = 0
    error_message: str | None = None
    spawn_options: AgentSpawnOptions | None = None
    tags: tuple[str, ...] = ()
    name: str | None = None
    owner_id: UUID | None = None
    workspace_id: UUID

    #: The directory of the project that it was spawned in; None for the project of the home.
    project: str | None = None
    task_id: UUID | None = None
    crew: str | None = None
    #: The id of a crew member, stable over its generations.
    agent_id: str | None = None
    generation: int = 0
    #: The number of the present start. Messages of earlier attempts are dropped.
    attempt: int = 1
    #: Rises with every change of the record.
    version: int = 1
    #: Restarts by the policy in its whole life.
    lifetime_restarts: int = 0
    #: The first failure since it was last healthy; the circuit breaker counts from it.
    failing_since: Moment | None = None
    #: Time that it has spent failed, which is no uptime.
    downtime: timedelta = _NO_TIME
    context: Mapping[str, Any] | None = None
    #: The request that it works on when it is ready; its answer ends the instance.
    job: Mapping[str, Any] | None = None
    #: How well each of its limits is held; written when it first becomes ready.
    enforcement: Mapping[str, Enforcement] | None = None
    #: What it gave when it was terminated with `persist_final_state`.
    final_state: Mapping[str, Any] | None = None

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES

    def can_transition_to(self, target: AgentState, *, freezing: bool = False) -> bool:
        return AgentStateTransitions.is_valid(self.state, target, freezing=freezing)

    def uptime(self, now: datetime) -> timedelta:
        """Time since creation without the time spent failed; not negative when the clock was set back."""
        return max((self.terminated_at or now) - self.created_at - self.downtime, _NO_TIME)


@record
class TerminationResult(Record):
    success: bool
    #: No force was needed.
    was_graceful: bool
    error_message: str | None = None
    final_instance: AgentInstance | None = None
    duration: timedelta = _NO_TIME

    @classmethod
    def successful(cls, instance: AgentInstance, was_graceful: bool, duration: timedelta) -> TerminationResult:
        return cls(success=True, was_graceful=was_graceful, final_instance=instance, duration=duration)

    @classmethod
    def failed(cls, error: str) -> TerminationResult:
        return cls(success=False, was_graceful=False, error_message=error)


@record
class Why(Record):
    """What an instance is doing, the evidence for it, and what would change it; sentences for people."""

    instance_id: UUID
    state: AgentState
    verdict: str
    evidence: tuple[str, ...] = ()
    what_would_change_it: tuple[str, ...] = ()


@record
class InstanceDetails(Record):
    """What a list shows beside the record of an instance."""

    #: The name of its definition.
    definition: str
    #: What it does now, in a few words.
    doing: str | None = None
    metrics_now: AgentMetrics | None = None
    #: Of an ended one; 128 and the number of the signal.
    exit_code: int | None = None
