"""One life of a definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from ostler.model.context import json_faults
from ostler.model.health import AgentHealthStatus, AgentMetrics
from ostler.model.limits import Enforcement
from ostler.model.moments import Moment
from ostler.model.record import Record, settle
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import ACTIVE_STATES, AgentState, AgentStateTransitions
from ostler.model.validation import Fault


@dataclass(frozen=True, kw_only=True)
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
    #: Restarts since it was last healthy.
    restart_count: int = 0
    error_message: str | None = None
    spawn_options: AgentSpawnOptions | None = None
    tags: tuple[str, ...] = ()
    name: str | None = None
    owner_id: UUID | None = None
    workspace_id: UUID | None = None

    #: When it first failed since it was last healthy; what the circuit breaker counts from.
    failing_since: Moment | None = None
    #: Restarts in its whole life; nothing resets it.
    lifetime_restarts: int = 0
    #: The start that speaks now; what an earlier one says is refused.
    attempt: int = 1
    #: Rises by one with every event about it; a writer names the one it has read.
    version: int = 1
    context: Mapping[str, Any] | None = None
    #: How well each limit of this instance is held.
    enforcement: Mapping[str, Enforcement] | None = None
    #: What it left behind when it was terminated.
    final_state: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        settle(self, "tags", "context", "final_state")

    def rules(self) -> Iterator[Fault]:
        yield from json_faults("final_state", self.final_state)

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES

    def can_transition_to(self, target: AgentState, *, freezing: bool = False) -> bool:
        return AgentStateTransitions.is_valid(self.state, target, freezing=freezing)

    def uptime(self, now: datetime) -> timedelta:
        """Time since creation, up to its end if it has ended; not negative when the clock was set back."""
        return max((self.terminated_at or now) - self.created_at, timedelta(0))
