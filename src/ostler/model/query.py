"""What may be asked of the record: filters, observation, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated
from uuid import UUID

from ostler.model.bounds import Interval
from ostler.model.moments import Moment
from ostler.model.record import Record
from ostler.model.states import AgentState, HealthState, TaskState
from ostler.model.text import plain_text_faults, tag_faults
from ostler.model.validation import Fault

MAX_PAGE = 1000
#: OFFSET walks over what it skips; past this, page with `before`.
MAX_OFFSET = 1_000_000
MAX_PATTERN = 200


@dataclass(frozen=True, kw_only=True)
class GetInstancesFilter(Record):
    """Newest first. Failed instances count as inactive: shown with `include_terminated` or by state."""

    state: AgentState | None = None
    health_state: HealthState | None = None
    tag: str | None = None
    definition_id: UUID | None = None
    owner_id: UUID | None = None
    #: `*` stands for any text, every other character for itself; case does not matter.
    name_pattern: str | None = None
    include_terminated: bool = False
    limit: Annotated[int, Interval(ge=1, le=MAX_PAGE)] = 100
    offset: Annotated[int, Interval(ge=0, le=MAX_OFFSET)] = 0
    #: The last id of the previous page: the same cost for every page.
    before: UUID | None = None

    @classmethod
    def all(cls) -> GetInstancesFilter:
        return cls()

    def rules(self) -> Iterator[Fault]:
        if isinstance(self.tag, str):
            yield from (Fault(field="tag", bound=f.bound, value=f.value) for f in tag_faults("tag", (self.tag,)))
        yield from plain_text_faults("name_pattern", self.name_pattern, MAX_PATTERN)


@dataclass(frozen=True, kw_only=True)
class TaskFilter(Record):
    """Newest first."""

    state: TaskState | None = None
    tag: str | None = None
    definition_id: UUID | None = None
    created_from: Moment | None = None
    created_until: Moment | None = None
    limit: Annotated[int, Interval(ge=1, le=MAX_PAGE)] = 100
    offset: Annotated[int, Interval(ge=0, le=MAX_OFFSET)] = 0
    before: UUID | None = None

    def rules(self) -> Iterator[Fault]:
        if isinstance(self.tag, str):
            yield from (Fault(field="tag", bound=f.bound, value=f.value) for f in tag_faults("tag", (self.tag,)))


@dataclass(frozen=True, kw_only=True)
class ObservationOptions(Record):
    include_state_changes: bool = True
    include_health_checks: bool = True
    include_metrics: bool = False
    include_errors: bool = True
    include_restarts: bool = True
    #: What the agent itself says: progress and signals.
    include_reports: bool = True
    buffer_capacity: Annotated[int, Interval(ge=1, le=10_000)] = 100

    @classmethod
    def default(cls) -> ObservationOptions:
        return cls()


@dataclass(frozen=True, kw_only=True)
class LifecycleStatistics(Record):
    active_instances: int
    by_state: Mapping[AgentState, int]
    by_health: Mapping[HealthState, int]
    #: None means unlimited.
    max_concurrent: int | None
    total_spawned: int
    total_terminated: int
    average_uptime: timedelta
    total_restarts: int
