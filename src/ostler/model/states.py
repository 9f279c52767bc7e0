"""The named values: states, levels, priorities. The transition tables stand beside the states they join."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class _Ranked(StrEnum):
    """Named values with the seed's numbers, so that they can be compared by weight."""

    @property
    def rank(self) -> int:
        return list(type(self)).index(self)


class AgentState(StrEnum):
    INITIALIZING = "initializing"  #: reserved; being started
    READY = "ready"  #: alive, may be asked
    PROCESSING = "processing"  #: working on at least one request
    WAITING = "waiting"  #: has worked; waits for the next request or for something outside
    SUSPENDED = "suspended"  #: held, frozen or parked
    TERMINATING = "terminating"  #: on the way out
    TERMINATED = "terminated"  #: gone on purpose
    FAILED = "failed"  #: gone otherwise; may be restarted


class HealthState(StrEnum):
    UNKNOWN = "unknown"  #: not looked at yet, or the probe itself failed to run
    HEALTHY = "healthy"
    DEGRADED = "degraded"  #: some probes failed, fewer than the threshold
    UNHEALTHY = "unhealthy"


class TaskState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"  #: submitted, waits for review
    ACCEPTED = "accepted"
    REJECTED = "rejected"


class IsolationLevel(_Ranked):
    NONE = "none"
    THREAD = "thread"
    PROCESS = "process"
    CONTAINER = "container"


class AgentPriority(_Ranked):
    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = "critical"


class RestartPolicyType(_Ranked):
    NONE = "none"
    IMMEDIATE = "immediate"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


class ProbeType(StrEnum):
    HEARTBEAT = "heartbeat"
    CUSTOM = "custom"
    HTTP = "http"
    TCP = "tcp"
    COMMAND = "command"


class Tier(_Ranked):
    """The plan of a workspace. A home of one's own is `enterprise`."""

    CORE = "core"
    WRITER_PRO = "writer_pro"
    TEAMS = "teams"
    ENTERPRISE = "enterprise"


_A = AgentState
AGENT_TRANSITIONS: Mapping[AgentState, frozenset[AgentState]] = MappingProxyType(
    {
        _A.INITIALIZING: frozenset({_A.READY, _A.FAILED, _A.TERMINATING}),
        _A.READY: frozenset({_A.PROCESSING, _A.SUSPENDED, _A.TERMINATING, _A.FAILED}),
        _A.PROCESSING: frozenset({_A.WAITING, _A.FAILED, _A.TERMINATING}),
        _A.WAITING: frozenset({_A.PROCESSING, _A.SUSPENDED, _A.TERMINATING, _A.FAILED}),
        _A.SUSPENDED: frozenset({_A.READY, _A.TERMINATING, _A.FAILED}),
        _A.TERMINATING: frozenset({_A.TERMINATED}),
        _A.FAILED: frozenset({_A.INITIALIZING, _A.TERMINATED}),
        _A.TERMINATED: frozenset(),
    }
)
#: Moves that only freezing and thawing may make: the tree stops in mid-work and goes on where it was.
FREEZE_TRANSITIONS = frozenset({(_A.PROCESSING, _A.SUSPENDED), (_A.SUSPENDED, _A.PROCESSING)})

INACTIVE_STATES = frozenset({_A.TERMINATED, _A.FAILED})
ACTIVE_STATES = frozenset(_A) - INACTIVE_STATES

_T = TaskState
TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = MappingProxyType(
    {
        _T.QUEUED: frozenset({_T.RUNNING}),
        _T.RUNNING: frozenset({_T.COMPLETED, _T.QUEUED, _T.REJECTED}),
        _T.COMPLETED: frozenset({_T.ACCEPTED, _T.REJECTED, _T.QUEUED}),
        _T.ACCEPTED: frozenset(),
        _T.REJECTED: frozenset(),
    }
)
FINISHED_TASK_STATES = frozenset({_T.ACCEPTED, _T.REJECTED})


class AgentStateTransitions:
    """The legal moves of an instance."""

    @staticmethod
    def is_valid(current: AgentState, target: AgentState, *, freezing: bool = False) -> bool:
        """Whether the move is legal; `freezing` admits the two that only a freeze or a thaw makes."""
        if freezing and (current, target) in FREEZE_TRANSITIONS:
            return True
        return target in AGENT_TRANSITIONS.get(current, frozenset())


class TaskStateTransitions:
    """The legal moves of a task."""

    @staticmethod
    def is_valid(current: TaskState, target: TaskState) -> bool:
        return target in TASK_TRANSITIONS.get(current, frozenset())
