"""Named values, and the table of legal moves beside the states that it joins."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class _Ranked(StrEnum):
    """Values with the seed's numbers, comparable by rank."""

    @property
    def rank(self) -> int:
        return list(type(self)).index(self)


class AgentState(StrEnum):
    INITIALIZING = "initializing"  #: reserved; being started
    READY = "ready"  #: alive, may be asked
    PROCESSING = "processing"  #: working on at least one request
    WAITING = "waiting"  #: has worked; waits for the next request or for an answer from outside
    SUSPENDED = "suspended"  #: held, frozen or parked
    TERMINATING = "terminating"
    TERMINATED = "terminated"  #: ended on purpose
    FAILED = "failed"  #: ended otherwise; may be restarted


class HealthState(StrEnum):
    UNKNOWN = "unknown"  #: not probed yet, or the probe itself could not run
    HEALTHY = "healthy"
    DEGRADED = "degraded"  #: some probes failed, fewer than the threshold
    UNHEALTHY = "unhealthy"


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


class SuspendDepth(StrEnum):
    HOLD = "hold"  #: finishes what it does, takes no more
    FREEZE = "freeze"  #: every process stops where it is, and goes on there
    PARK = "park"  #: the process ends; workdir and record stay, and resuming starts it fresh


class Enforcement(StrEnum):
    """How well an isolation level holds a limit; recorded per limit on every instance."""

    ENFORCED = "enforced"  #: the kernel or the manager holds it
    APPROXIMATED = "approximated"  #: watched and acted upon, with some slack
    ADVISORY = "advisory"  #: told to the agent, not held


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
#: Moves that only a freeze and a thaw may make: the process tree stops in mid-work and goes on where it was.
FREEZE_TRANSITIONS = frozenset({(_A.PROCESSING, _A.SUSPENDED), (_A.SUSPENDED, _A.PROCESSING)})

INACTIVE_STATES = frozenset({_A.TERMINATED, _A.FAILED})
ACTIVE_STATES = frozenset(_A) - INACTIVE_STATES


class AgentStateTransitions:
    """The legal moves of an instance."""

    @staticmethod
    def is_valid(current: AgentState, target: AgentState, *, freezing: bool = False) -> bool:
        """Whether the move is legal; `freezing` admits the two moves of a freeze and a thaw."""
        if freezing and (current, target) in FREEZE_TRANSITIONS:
            return True
        return target in AGENT_TRANSITIONS.get(current, frozenset())


def moves_between(before: AgentState, after: AgentState) -> tuple[AgentState, ...]:
    """The moves of one commit. A restart on request passes through failed; a row that fell behind catches up."""
    if before is after:
        return ()
    if after is _A.INITIALIZING and before is not _A.FAILED:
        return (_A.FAILED, after)
    if AgentStateTransitions.is_valid(before, after, freezing=True):
        return (after,)
    return legal_path(before, after) or (after,)


def legal_path(current: AgentState, target: AgentState) -> tuple[AgentState, ...]:
    """The shortest way of legal moves, for a record that fell behind while the store could not write.

    Never through failed or suspended, which are facts of their own. Empty where there is no way.
    """
    ways: deque[tuple[AgentState, ...]] = deque([(current,)])
    while ways:
        way = ways.popleft()
        if way[-1] is target:
            return way[1:]
        ways.extend(
            (*way, step)
            for step in sorted(AGENT_TRANSITIONS[way[-1]])
            if step not in way and (step is target or step not in {_A.FAILED, _A.SUSPENDED})
        )
    return ()
