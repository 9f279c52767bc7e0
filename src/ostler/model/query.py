"""What may be asked of the record: filters, observation, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.states import AgentState, HealthState
from ostler.model.text import plain_text_faults, tag_faults
from ostler.model.types import Interval, Moment
from ostler.model.validation import Fault

MAX_PAGE = 1000
MAX_OFFSET = 1_000_000
MAX_PATTERN = 200


@record
class GetInstancesFilter(Record):
    """Newest first. Failed instances count as inactive: listed with `include_terminated` or by their state."""

    state: AgentState | None = None
    health_state: HealthState | None = None
    tag: str | None = None
    definition_id: UUID | None = None
    #: Another owner than oneself needs the permission `agents.read_all`.
    owner_id: UUID | None = None
    #: `*` stands for any text, every other character for itself; case does not matter.
    name_pattern: str | None = None
    include_terminated: bool = False
    #: Failed instances that wait for their restart are listed beside the active ones.
    include_restarting: bool = False
    limit: Annotated[int, Interval(ge=1, le=MAX_PAGE)] = 100
    offset: Annotated[int, Interval(ge=0, le=MAX_OFFSET)] = 0
    #: The last id of the previous page: every page costs the same, unlike with `offset`.
    before: UUID | None = None
    #: Another workspace than one's own needs `workspaces.cross` and the enterprise tier.
    workspace_id: UUID | None = None
    task_id: UUID | None = None
    crew: str | None = None

    @classmethod
    def all(cls) -> GetInstancesFilter:
        return cls()

    def rules(self) -> Iterator[Fault]:
        if self.tag is not None:
            yield from (Fault(field="tag", bound=f.bound, value=f.value) for f in tag_faults("tag", (self.tag,)))
        yield from plain_text_faults("name_pattern", self.name_pattern, MAX_PATTERN)


@record
class ObservationOptions(Record):
    include_state_changes: bool = True
    include_health_checks: bool = True
    include_metrics: bool = False
    include_errors: bool = True
    include_restarts: bool = True
    #: What the agent itself says: progress, signals, waits.
    include_reports: bool = True
    buffer_capacity: Annotated[int, Interval(ge=1, le=10_000)] = 100

    @classmethod
    def default(cls) -> ObservationOptions:
        return cls()


@record
class LifecycleStatistics(Record):
    active_instances: int
    by_state: Mapping[AgentState, int]
    by_health: Mapping[HealthState, int]
    #: None means unlimited.
    max_concurrent: int | None
    total_spawned: int
    total_terminated: int
    #: Of the instances that are still kept.
    average_uptime: timedelta
    total_restarts: int


class InboxKind(StrEnum):
    QUESTION = "question"  #: an agent or a task waits for an answer of a person
    REVIEW = "review"  #: work is done and waits for a person to accept or merge it
    FAILED = "failed"  #: nothing will try again
    PARKED = "parked"  #: a task that goes on only when a person lets it
    SETTINGS = "settings"  #: a broken file of settings
    DISK = "disk"  #: the home takes nearly all that it may, or more
    HOOK = "hook"  #: a command that the settings name for an event failed when it was last run


@record
class InboxRow(Record):
    """One thing that needs a person. It is in the inbox as long as its cause lasts."""

    kind: InboxKind
    #: What is named in a command: the name of an agent, the key of a task, a file.
    key: str
    since: Moment
    sentence: str
    #: The command to type next.
    next: str


@record
class Report(Record):
    """What happened in a span of time, from the log. Tasks are named by their keys, agents by their names."""

    since: Moment
    until: Moment
    #: Tasks that were completed, accepted and rejected.
    done: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    #: Tasks of which an attempt failed, and other agents that failed for good.
    failed: tuple[str, ...] = ()
    #: Tasks that were left to a person.
    parked: tuple[str, ...] = ()
    #: Of agents, by their policies.
    restarts: int = 0
    #: How long agents lived in it, in sum.
    time: timedelta = timedelta(0)
    #: Of the agents that ended in it, and of those that live now.
    tokens: int = 0
    cost_usd: float = 0.0
    #: False where retention has removed a part of the log.
    is_whole: bool = True
