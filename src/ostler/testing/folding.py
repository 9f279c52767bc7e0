"""What must hold of any store at any time, checked from outside through its own contract.

The log is folded into the state of every instance, and the store's tables, totals and chains are held against
it. Each check returns what is wrong as sentences, so that a test shows all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID

from ostler.model import (
    ACTIVE_STATES,
    AgentAttemptStartedEvent,
    AgentEvent,
    AgentHealthChangedEvent,
    AgentInstance,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentStateTransitions,
    Event,
    GetInstancesFilter,
    HealthState,
    Task,
    TaskCreatedEvent,
    TaskEvent,
    TaskFilter,
    TaskState,
    TaskStateChangedEvent,
    TaskStateTransitions,
)
from ostler.policy import plan
from ostler.store import Store

_PAGE = 1000
#: Sums are kept in whole milliseconds.
_SLACK = timedelta(milliseconds=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedInstance:
    """What the log alone tells about one instance."""

    instance_id: UUID
    workspace_id: UUID | None
    state: AgentState
    health_state: HealthState
    version: int
    attempt: int
    restart_count: int

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedTask:
    """What the log alone tells about one task."""

    task_id: UUID
    state: TaskState
    version: int
    attempt: int


def fold(events: Iterable[Event]) -> dict[UUID, FoldedInstance]:
    """Play the log from its beginning; whose first events are no longer kept is left out."""
    known: dict[UUID, FoldedInstance] = {}
    for event in events:
        if isinstance(event, AgentSpawnedEvent):
            known[event.instance_id] = FoldedInstance(
                instance_id=event.instance_id,
                workspace_id=event.workspace_id,
                state=AgentState.INITIALIZING,
                health_state=HealthState.UNKNOWN,
                version=event.version,
                attempt=event.attempt,
                restart_count=0,
            )
        elif isinstance(event, AgentEvent) and event.instance_id in known:
            known[event.instance_id] = _next(known[event.instance_id], event)
    return known


def _next(old: FoldedInstance, event: AgentEvent) -> FoldedInstance:
    new = replace(old, version=event.version, attempt=event.attempt)
    match event:
        case AgentStateChangedEvent(previous_state=AgentState.FAILED, new_state=AgentState.INITIALIZING):
            # A restart. Its announcement does not count: it may never come to pass.
            again = replace(new, state=event.new_state, health_state=HealthState.UNKNOWN)
            return replace(again, restart_count=new.restart_count + 1)
        case AgentStateChangedEvent():
            return replace(new, state=event.new_state)
        case AgentAttemptStartedEvent():
            return replace(new, health_state=HealthState.UNKNOWN)
        case AgentHealthChangedEvent():
            healed = event.new_health is HealthState.HEALTHY
            return replace(new, health_state=event.new_health, restart_count=0 if healed else new.restart_count)
        case _:
            return new


def fold_tasks(events: Iterable[Event]) -> dict[UUID, FoldedTask]:
    """The same for tasks. Each move to running is a new attempt."""
    known: dict[UUID, FoldedTask] = {}
    for event in events:
        if isinstance(event, TaskCreatedEvent):
            known[event.task_id] = FoldedTask(
                task_id=event.task_id, state=TaskState.QUEUED, version=event.version, attempt=0
            )
        elif isinstance(event, TaskEvent) and event.task_id in known:
            new = replace(known[event.task_id], version=event.version)
            if isinstance(event, TaskStateChangedEvent):
                starts = event.new_state is TaskState.RUNNING
                new = replace(new, state=event.new_state, attempt=new.attempt + starts)
            known[event.task_id] = new
    return known


def sequence_faults(events: Iterable[Event], after: int = 0) -> list[str]:
    """The log has no gap, and the version of no instance ever falls."""
    faults = []
    expected = after
    versions: dict[UUID, int] = {}
    for event in events:
        expected += 1
        if event.sequence != expected:
            faults.append(f"event {expected} should come next, {event.sequence} does")
            expected = event.sequence
        if isinstance(event, AgentEvent):
            if event.version < versions.get(event.instance_id, 0):
                faults.append(f"event {event.sequence} takes instance {event.instance_id} back to {event.version}")
            versions[event.instance_id] = event.version
    return faults


def move_faults(events: Iterable[Event]) -> list[str]:
    """Every change of state in the log is a legal move, and begins where the one before it ended."""
    faults = []
    agents: dict[UUID, AgentState] = {}
    tasks: dict[UUID, TaskState] = {}
    for event in events:
        match event:
            case AgentSpawnedEvent():
                agents[event.instance_id] = AgentState.INITIALIZING
            case TaskCreatedEvent():
                tasks[event.task_id] = TaskState.QUEUED
            case AgentStateChangedEvent(previous_state=old, new_state=new):
                # The log does not say which moves a freeze or a thaw made, so theirs are admitted everywhere.
                legal = AgentStateTransitions.is_valid(old, new, freezing=True)
                faults += _move_fault(event, legal=legal, known=agents.get(event.instance_id, old))
                agents[event.instance_id] = new
            case TaskStateChangedEvent(previous_state=old_task, new_state=new_task):
                legal = TaskStateTransitions.is_valid(old_task, new_task)
                faults += _move_fault(event, legal=legal, known=tasks.get(event.task_id, old_task))
                tasks[event.task_id] = new_task
    return faults


def _move_fault(
    event: AgentStateChangedEvent | TaskStateChangedEvent, *, legal: bool, known: AgentState | TaskState
) -> list[str]:
    who = f"instance {event.instance_id}" if isinstance(event, AgentStateChangedEvent) else f"task {event.task_id}"
    told = f"event {event.sequence} moves {who} from {event.previous_state} to {event.new_state}"
    if event.previous_state != known:
        return [f"{told}, but it was {known}"]
    return [] if legal else [f"{told}, which is no legal move"]


def quota_faults(events: Iterable[Event], workspace_id: UUID, cap: int) -> list[str]:
    """At no event of the log did the workspace have more active instances than its plan admits."""
    faults = []
    active: set[UUID] = set()
    for event in events:
        if event.workspace_id != workspace_id or not isinstance(event, AgentEvent):
            continue
        if isinstance(event, AgentSpawnedEvent):
            active.add(event.instance_id)
        elif isinstance(event, AgentStateChangedEvent):
            (active.add if event.new_state in ACTIVE_STATES else active.discard)(event.instance_id)
        if len(active) > cap:
            faults.append(f"at event {event.sequence} there were {len(active)} active, the plan admits {cap}")
    return faults


def instance_faults(folded: dict[UUID, FoldedInstance], records: Iterable[AgentInstance]) -> list[str]:
    """The table says of each instance what the log says; an instance without a beginning in the log is passed over."""
    faults = []
    for record in records:
        seen = folded.get(record.instance_id)
        if seen is None:
            continue
        pairs: dict[str, tuple[object, object]] = {
            name: (getattr(seen, name), getattr(record, name))
            for name in ("state", "version", "attempt", "restart_count")
        }
        pairs["health_state"] = (seen.health_state, record.health.state)
        faults += [
            f"instance {record.instance_id}: the log gives {name} {told}, the table has {held}"
            for name, (told, held) in pairs.items()
            if told != held
        ]
    return faults


def task_faults(folded: dict[UUID, FoldedTask], records: Iterable[Task]) -> list[str]:
    """The table says of each task what the log says; a task without a beginning in the log is passed over."""
    return [
        f"task {record.task_id}: the log gives {name} {getattr(seen, name)}, the table has {getattr(record, name)}"
        for record in records
        if (seen := folded.get(record.task_id)) is not None
        for name in ("state", "version", "attempt")
        if getattr(seen, name) != getattr(record, name)
    ]


async def all_instances(store: Store, workspace_id: UUID) -> list[AgentInstance]:
    """Every instance of a workspace, page by page."""
    found: list[AgentInstance] = []
    before: UUID | None = None
    while True:
        wanted = GetInstancesFilter(include_terminated=True, limit=_PAGE, before=before)
        page = await store.list_instances(wanted, workspace_id)
        found += page
        if len(page) < _PAGE:
            return found
        before = page[-1].instance_id


async def all_tasks(store: Store, workspace_id: UUID) -> list[Task]:
    """Every task of a workspace, page by page."""
    found: list[Task] = []
    before: UUID | None = None
    while True:
        page = await store.list_tasks(TaskFilter(limit=_PAGE, before=before), workspace_id)
        found += page
        if len(page) < _PAGE:
            return found
        before = page[-1].task_id


async def statistics_faults(store: Store, workspace_id: UUID, now: datetime) -> list[str]:
    """The running totals are what counting the rows gives. Average uptime only while no row was removed."""
    records = await all_instances(store, workspace_id)
    told = await store.statistics(workspace_id)
    counted = {
        "active_instances": (told.active_instances, sum(one.is_active for one in records)),
        "by_state": (dict(told.by_state), _count(AgentState, (one.state for one in records))),
        "by_health": (dict(told.by_health), _count(HealthState, (one.health.state for one in records))),
    }
    if told.total_spawned == len(records):
        restarts = sum(one.lifetime_restarts for one in records)
        ended = sum(one.state is AgentState.TERMINATED for one in records)
        counted["total_restarts"] = (told.total_restarts, restarts)
        counted["total_terminated"] = (told.total_terminated, ended)
        lived = sum((one.uptime(now) for one in records), timedelta(0))
        average = lived / len(records) if records else timedelta(0)
        if abs(told.average_uptime - average) > _SLACK:
            counted["average_uptime"] = (told.average_uptime, average)
    elif told.total_spawned < len(records):
        counted["total_spawned"] = (told.total_spawned, len(records))
    return [f"{name}: the totals say {say}, the rows {count}" for name, (say, count) in counted.items() if say != count]


def _count(kinds: type[AgentState | HealthState], found: Iterable[object]) -> dict[object, int]:
    counts: dict[object, int] = dict.fromkeys(kinds, 0)
    for one in found:
        counts[one] += 1
    return counts


async def invariant_faults(store: Store, now: datetime) -> list[str]:
    """Everything above, for the whole store. An empty list is what a test wants to see."""
    head = await store.head()
    events = [event async for event in store.replay(head.horizon)]
    faults = sequence_faults(events, head.horizon)
    if events and events[-1].sequence != (last := (await store.head()).sequence):
        faults.append(f"the log ends at {events[-1].sequence}, the head says {last}")
    faults += move_faults(events)
    folded, folded_tasks = fold(events), fold_tasks(events)
    for workspace in await store.list_workspaces(limit=_PAGE):
        space = workspace.workspace_id
        faults += instance_faults(folded, await all_instances(store, space))
        faults += task_faults(folded_tasks, await all_tasks(store, space))
        faults += await statistics_faults(store, space, now)
        cap = plan(workspace.tier).max_concurrent
        if cap is not None and head.horizon == 0:
            faults += quota_faults(events, space, cap)
        report = await store.verify_audit(space)
        faults += [f"audit of {workspace.name}: {fault}" for fault in report.faults]
    return faults
