"""What a caller asks for when a new agent is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

from ostler.model.bounds import Interval
from ostler.model.context import ContextData, context_faults
from ostler.model.health import HealthCheckConfig
from ostler.model.limits import Enforcement, ResourceLimits
from ostler.model.record import Record, settle
from ostler.model.restart import RestartPolicy
from ostler.model.states import AgentPriority, IsolationLevel
from ostler.model.text import name_faults, tag_faults
from ostler.model.validation import Fault

NIL = UUID(int=0)


@dataclass(frozen=True, kw_only=True)
class AgentSpawnOptions(Record):
    #: One that does not heed its cancelling has 5 s more before it is ended.
    initialization_timeout: Annotated[timedelta, Interval(ge=timedelta(milliseconds=100), le=timedelta(hours=1))] = (
        timedelta(seconds=30)
    )
    #: None takes the defaults of the definition.
    resource_limits: ResourceLimits | None = None
    isolation_level: IsolationLevel = IsolationLevel.THREAD
    #: None means no automatic restart.
    restart_policy: RestartPolicy | None = None
    #: None means a heartbeat.
    health_check: HealthCheckConfig | None = None
    #: None makes one from the definition's name and a short id.
    name: str | None = None
    tags: tuple[str, ...] | None = None
    priority: AgentPriority = AgentPriority.NORMAL
    #: The weakest hold on a limit that the caller accepts.
    min_enforcement: Enforcement = Enforcement.ADVISORY

    def __post_init__(self) -> None:
        settle(self, "tags")

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from tag_faults("tags", self.tags)


@dataclass(frozen=True, kw_only=True)
class SpawnRequest(Record):
    agent_definition_id: UUID
    options: AgentSpawnOptions | None = None
    #: Keys in any case; JSON values.
    context: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        settle(self, "context")

    @property
    def context_data(self) -> ContextData:
        return ContextData(self.context)

    def is_valid(self) -> bool:
        return self.validate().is_valid

    def rules(self) -> Iterator[Fault]:
        if self.agent_definition_id == NIL:
            yield Fault(field="agent_definition_id", bound="must not be the empty UUID")
        yield from context_faults("context", self.context)
