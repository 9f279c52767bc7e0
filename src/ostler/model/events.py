"""Numbered facts. The log of them is the history; records can be folded from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import ValidationError
from ostler.model.health import AgentMetrics
from ostler.model.moments import Moment
from ostler.model.record import Record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState, HealthState, TaskState
from ostler.model.validation import Fault


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """What every event carries. The store gives the number, the id and the workspace when it commits."""

    event_type: ClassVar[str] = ""

    occurred_at: Moment
    correlation_id: str | None = None
    #: Position in the log: rising by one, in commit order. 0 until committed.
    sequence: int = 0
    event_id: UUID | None = None
    workspace_id: UUID | None = None
    #: The version of the record after this event.
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class AgentEvent(Event):
    instance_id: UUID
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class AgentSpawnedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_spawned"

    definition_id: UUID
    #: Whose it is: the principal that asked. None when nobody is known, as for what the system itself starts.
    user_id: UUID | None
    options: AgentSpawnOptions | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentStateChangedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_state_changed"

    previous_state: AgentState
    new_state: AgentState
    reason: str | None = None
    #: Nothing follows but a restart by hand, or nothing at all.
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentAttemptStartedEvent(AgentEvent):
    """A parked instance comes back; `attempt` is the new one."""

    event_type: ClassVar[str] = "agent_attempt_started"


@dataclass(frozen=True, kw_only=True)
class AgentHealthChangedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_health_changed"

    previous_health: HealthState
    new_health: HealthState
    details: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentErrorEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_error"

    error_message: str
    exception_type: str | None = None
    stack_trace: str | None = None
    is_recoverable: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentRestartingEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_restarting"

    attempt_number: int
    max_attempts: int
    delay_before_retry: timedelta | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentMetricsUpdatedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_metrics_updated"

    metrics: AgentMetrics


@dataclass(frozen=True, kw_only=True)
class AgentProgressEvent(AgentEvent):
    """How far the agent says it is: a claim, like all that an agent says."""

    event_type: ClassVar[str] = "agent_progress"

    #: 0 to 1; None when it cannot tell.
    fraction: float | None = None
    message: str | None = None
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AgentSignalEvent(AgentEvent):
    """A named word of the agent to whoever listens."""

    event_type: ClassVar[str] = "agent_signal"

    name: str
    payload: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AgentTerminatedEvent(AgentEvent):
    event_type: ClassVar[str] = "agent_terminated"

    final_state: AgentState
    was_graceful: bool
    reason: str | None = None
    uptime: timedelta


@dataclass(frozen=True, kw_only=True)
class TaskEvent(Event):
    task_id: UUID


@dataclass(frozen=True, kw_only=True)
class TaskCreatedEvent(TaskEvent):
    event_type: ClassVar[str] = "task_created"

    task: str


@dataclass(frozen=True, kw_only=True)
class TaskStateChangedEvent(TaskEvent):
    event_type: ClassVar[str] = "task_state_changed"

    previous_state: TaskState
    new_state: TaskState
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskUpdatedEvent(TaskEvent):
    """Something other than the state changed: a summary, the changed files, a count."""

    event_type: ClassVar[str] = "task_updated"

    changed: tuple[str, ...]


EVENT_CLASSES: Mapping[str, type[Event]] = MappingProxyType(
    {
        cls.event_type: cls
        for cls in (
            AgentSpawnedEvent,
            AgentStateChangedEvent,
            AgentAttemptStartedEvent,
            AgentHealthChangedEvent,
            AgentErrorEvent,
            AgentRestartingEvent,
            AgentMetricsUpdatedEvent,
            AgentProgressEvent,
            AgentSignalEvent,
            AgentTerminatedEvent,
            TaskCreatedEvent,
            TaskStateChangedEvent,
            TaskUpdatedEvent,
        )
    }
)


def event_class(event_type: str) -> type[Event]:
    cls = EVENT_CLASSES.get(event_type)
    if cls is None:
        known = ", ".join(sorted(EVENT_CLASSES))
        raise ValidationError([Fault(field="event_type", bound=f"must be one of {known}", value=repr(event_type))])
    return cls


def event_from_json(event_type: str, text: str | bytes) -> Event:
    return event_class(event_type).from_json(text)
