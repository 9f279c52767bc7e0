"""Numbered facts. The log of them is the history."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Self
from uuid import UUID

from ostler.model.instance import AgentMetrics
from ostler.model.record import Record, adapter, record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState, HealthState
from ostler.model.task import TaskState
from ostler.model.types import Moment
from ostler.model.wait import WaitKind

#: Columns of their own in the log, so they are left out of the body.
_COLUMNS = {"sequence", "occurred_at", "correlation_id", "workspace_id"}


@record
class Event(Record):
    """The transaction that commits an event fills in the number, the time and the correlation id."""

    event_type: ClassVar[str] = ""

    #: Position in the log: rising by one, in commit order. 0: published live, not kept.
    sequence: int = 0
    occurred_at: Moment | None = None
    correlation_id: str | None = None
    workspace_id: UUID | None = None
    #: The version of the record after this event.
    version: int = 0

    def stamp(self, sequence: int, occurred_at: datetime, correlation_id: str | None) -> Self:
        """Fill in what the commit decides. Only for an event that no other code holds yet."""
        object.__setattr__(self, "sequence", sequence)
        object.__setattr__(self, "occurred_at", occurred_at)
        object.__setattr__(self, "correlation_id", correlation_id)
        return self

    def body(self) -> str:
        """The JSON of everything that has no column of its own."""
        return adapter(type(self)).dump_json(self, exclude=_COLUMNS, exclude_defaults=True).decode()


@record
class AgentEvent(Event):
    instance_id: UUID
    attempt: int = 0


@record
class AgentSpawnedEvent(AgentEvent):
    """It became ready for the first time."""

    event_type: ClassVar[str] = "agent_spawned"

    definition_id: UUID
    #: The principal that asked; None for what the system itself starts.
    user_id: UUID | None
    options: AgentSpawnOptions | None = None
    name: str | None = None


@record
class AgentStateChangedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_state_changed"

    previous_state: AgentState
    new_state: AgentState
    reason: str | None = None
    #: Nothing follows unless a person restarts it.
    is_final: bool = False


@record
class AgentHealthChangedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_health_changed"

    previous_health: HealthState
    new_health: HealthState
    details: str | None = None


@record
class AgentErrorEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_error"

    error_message: str
    exception_type: str | None = None
    stack_trace: str | None = None
    is_recoverable: bool = False


@record
class AgentRestartingEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_restarting"

    attempt_number: int
    max_attempts: int
    delay_before_retry: timedelta | None = None
    reason: str | None = None


@record
class AgentMetricsUpdatedEvent(AgentEvent):
    """Published live at every metrics interval; it has no number and is not kept."""

    event_type: ClassVar[str] = "agent_metrics_updated"

    metrics: AgentMetrics


@record
class AgentProgressEvent(AgentEvent):
    """How far the agent says it is: a claim, like everything an agent says."""

    event_type: ClassVar[str] = "agent_progress"

    #: 0 to 1; None when it cannot tell.
    fraction: float | None = None
    message: str | None = None
    details: Mapping[str, Any] | None = None


@record
class AgentSignalEvent(AgentEvent):
    """A named message of the agent to its supervisor."""

    event_type: ClassVar[str] = "agent_signal"

    name: str
    payload: Mapping[str, Any] | None = None


@record
class AgentWaitOpenedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_wait_opened"

    wait_id: UUID
    kind: WaitKind
    reason: str | None = None
    due_at: Moment | None = None
    detail: Mapping[str, Any] | None = None


@record
class AgentWaitEndedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_wait_ended"

    wait_id: UUID
    kind: WaitKind
    outcome: str


@record
class AgentTerminatedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_terminated"

    final_state: AgentState
    was_graceful: bool
    reason: str | None = None
    uptime: timedelta
    #: What it used in its whole life.
    tokens: int = 0
    cost_usd: float | None = None


@record
class TaskEvent(Event):
    task_id: UUID
    key: str


@record
class TaskStateChangedEvent(TaskEvent):
    """The first one of a task, when it is queued, has no previous state."""

    event_type: ClassVar[str] = "task_state_changed"

    previous_state: TaskState | None = None
    new_state: TaskState
    reason: str | None = None
    attempt: int = 0
    agent: str | None = None
    #: Its attempt failed. One that waits, is held back or was lost with the machine has not.
    is_failure: bool = False
    #: Who works on it.
    instance_id: UUID | None = None
    crew: str | None = None
    member: str | None = None


@record
class TaskWaitOpenedEvent(TaskEvent):
    event_type: ClassVar[str] = "task_wait_opened"

    wait_id: UUID
    kind: WaitKind
    reason: str | None = None
    due_at: Moment | None = None
    #: Why Ostler itself asks for a person, such as max_failures; None where an agent does.
    cause: str | None = None


@record
class TaskWaitEndedEvent(TaskEvent):
    event_type: ClassVar[str] = "task_wait_ended"

    wait_id: UUID
    kind: WaitKind
    outcome: str


@record
class TaskIterationEvent(TaskEvent):
    """A fresh start of a loop; once where it begins, and once where it has ended."""

    event_type: ClassVar[str] = "task_iteration"

    number: int
    #: None where it begins.
    ended_by: str | None = None
    summary: str | None = None
    changed_files: int | None = None
    seconds: float | None = None
    tokens: int = 0
    cost_usd: float | None = None
    retries: int = 0


@record
class CrewEvent(Event):
    crew: str


@record
class CrewChangedEvent(CrewEvent):
    """It was brought up, scaled, or stopped; by a person or by its policy."""

    event_type: ClassVar[str] = "crew_changed"

    #: The directory of the project that declares it; empty for the project of the home.
    project: str = ""
    is_up: bool
    #: Its members are being asked to end; another event follows when they have.
    is_stopping: bool = False
    count: int | None = None
    #: Why it is not up, where it stopped by itself.
    reason: str | None = None


#: Every kind of event in this module by its name.
EVENT_CLASSES: Mapping[str, type[Event]] = MappingProxyType(
    {
        cls.event_type: cls
        for cls in tuple(globals().values())
        if isinstance(cls, type) and issubclass(cls, Event) and cls.event_type
    }
)


@record
class EventsMissed(Record):
    """The observer was too slow: `count` events were dropped. Read them again with `after=resume_after`."""

    instance_id: UUID | None
    count: int
    #: The number of the first event that was dropped.
    first_sequence: int

    @property
    def resume_after(self) -> int:
        return self.first_sequence - 1
