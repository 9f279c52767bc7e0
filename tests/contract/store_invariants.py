"""What must hold of any store at any time. Each check returns what is wrong as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from ostler.model.events import AgentEvent, AgentHealthChangedEvent, AgentStateChangedEvent, Event
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.states import ACTIVE_STATES, AgentState, AgentStateTransitions, HealthState
from ostler.model.task import TaskState
from ostler.policy.quota import plan
from ostler.store import audit, events, queries, tasks, workspaces
from ostler.store.store import Store
from ostler.store.transaction import Reader

_PAGE = 1000
_SLACK = timedelta(milliseconds=1)

#: Rows that contradict each other, by what is wrong with them.
_CONTRADICTIONS = {
    "rows that count as active in a state that is not, or the other way round": """SELECT count(*)
        FROM agent_instances WHERE active <> CASE WHEN state IN ('failed', 'terminated') THEN 0 ELSE 1 END""",
    "rows that have ended without a time, or have a time without an end": """SELECT count(*) FROM agent_instances
        WHERE (terminated_at IS NULL) <> (state NOT IN ('failed', 'terminated'))""",
    "tags that are not as active as their instance": """SELECT count(*) FROM agent_instance_tags AS t
        JOIN agent_instances AS i ON i.id = t.instance_id WHERE t.active <> i.active""",
    "workspaces whose count of places is not that of their active instances": """SELECT count(*) FROM workspaces AS w
        WHERE w.active <> (SELECT count(*) FROM agent_instances AS i WHERE i.workspace_id = w.id AND i.active = 1)""",
    "instances without the row of their present attempt": """SELECT count(*) FROM agent_instances AS i WHERE NOT EXISTS
        (SELECT 1 FROM attempts AS a WHERE a.instance_id = i.id AND a.number = i.attempt)""",
    "attempts that are open beside a later one": """SELECT count(*) FROM attempts AS a WHERE a.ended_at IS NULL
        AND EXISTS (SELECT 1 FROM attempts AS b WHERE b.instance_id = a.instance_id AND b.number > a.number)""",
    "open waits or requests of a terminated instance": """SELECT count(*) FROM agent_instances AS i
        WHERE i.state = 'terminated' AND (
        EXISTS (SELECT 1 FROM waits AS w WHERE w.instance_id = i.id AND w.ended_at IS NULL) OR
        EXISTS (SELECT 1 FROM requests AS r WHERE r.instance_id = i.id AND r.state = 'running'))""",
    "events that are missing between the horizon and the head": """SELECT h.sequence - h.horizon - count(e.sequence)
        FROM head AS h LEFT JOIN agent_instance_events AS e ON e.sequence > h.horizon
        GROUP BY h.sequence, h.horizon""",
}


def contradictions(reader: Reader) -> list[str]:
    found = {what: reader.fetch(sql)[0][0] for what, sql in _CONTRADICTIONS.items()}
    return [f"{number} {what}" for what, number in found.items() if number]


# --- the log -----------------------------------------------------------------------------------------


@dataclass
class Folded:
    """What the log alone tells about one instance."""

    state: AgentState = AgentState.INITIALIZING
    health: HealthState = HealthState.UNKNOWN
    attempt: int = 1
    version: int = 1


def fold(log: Iterable[Event], after: int = 0) -> tuple[dict[UUID, Folded], list[str]]:
    """Play the log from its beginning, and say where it contradicts itself."""
    known: dict[UUID, Folded] = {}
    faults: list[str] = []
    expected = after
    for event in log:
        expected += 1
        if event.sequence != expected:
            faults.append(f"event {expected} should come next, {event.sequence} does")
            expected = event.sequence
        if isinstance(event, AgentEvent):
            one = known.setdefault(event.instance_id, Folded())
            faults += [f"event {event.sequence}: {fault}" for fault in _step(one, event)]
    return known, faults


def _step(one: Folded, event: AgentEvent) -> list[str]:
    faults: list[str] = []
    if event.version and event.version < one.version:
        faults.append(f"the version falls from {one.version} to {event.version}")
    one.version = max(one.version, event.version)
    if event.attempt and event.attempt < one.attempt:
        faults.append(f"attempt {event.attempt} speaks after attempt {one.attempt}")
    if event.attempt > one.attempt:
        one.attempt, one.health = event.attempt, HealthState.UNKNOWN
    match event:
        case AgentStateChangedEvent(previous_state=old, new_state=new):
            if old is not one.state:
                faults.append(f"it moves from {old}, but it was {one.state}")
            # The log does not say which moves a freeze or a thaw made, so theirs are admitted everywhere.
            elif not AgentStateTransitions.is_valid(old, new, freezing=True):
                faults.append(f"{old} to {new} is no legal move")
            one.state = new
        case AgentHealthChangedEvent():
            if event.previous_health is not one.health:
                faults.append(f"its health was {one.health}, not {event.previous_health}")
            one.health = event.new_health
        case _:
            pass
    return faults


def record_faults(folded: dict[UUID, Folded], records: Iterable[AgentInstance]) -> list[str]:
    """The table says of each instance what the log says. A parked one may have begun an attempt without an event."""
    faults = []
    for record in records:
        one = folded.get(record.instance_id, Folded())
        if one.attempt < record.attempt and record.state is AgentState.SUSPENDED:
            one.attempt, one.health = record.attempt, HealthState.UNKNOWN
        told = (one.state, one.health, one.attempt)
        held = (record.state, record.health.state, record.attempt)
        if told != held:
            faults.append(f"instance {record.instance_id}: the log gives {told}, the table has {held}")
        if record.version < one.version:
            faults.append(f"instance {record.instance_id}: version {record.version}, the log knows {one.version}")
    return faults


def quota_faults(log: Iterable[Event], workspace_id: UUID, cap: int) -> list[str]:
    """At no event did the workspace have more active instances than its plan admits."""
    faults = []
    active: set[UUID] = set()
    for event in log:
        if event.workspace_id == workspace_id and isinstance(event, AgentStateChangedEvent):
            (active.add if event.new_state in ACTIVE_STATES else active.discard)(event.instance_id)
            if len(active) > cap:
                faults.append(f"at event {event.sequence} there were {len(active)} active, the plan admits {cap}")
    return faults


# --- everything --------------------------------------------------------------------------------------


def all_instances(reader: Reader, workspace_id: UUID) -> list[AgentInstance]:
    found: list[AgentInstance] = []
    while True:
        before = found[-1].instance_id if found else None
        wanted = GetInstancesFilter(include_terminated=True, limit=_PAGE, before=before)
        page = queries.list_instances(reader, wanted, workspace_id)
        found += page
        if len(page) < _PAGE:
            return found


def whole_log(reader: Reader) -> list[Event]:
    found: list[Event] = []
    cursor = events.pruned_until(reader)
    while (page := events.read_events(reader, cursor)).events:
        found += page.events
        cursor = page.cursor
    return found


def statistics_faults(reader: Reader, workspace_id: UUID, now: datetime) -> list[str]:
    """The statistics are what counting the rows gives."""
    records = all_instances(reader, workspace_id)
    told = queries.statistics(reader, workspace_id, now)
    by_state, by_health = dict.fromkeys(AgentState, 0), dict.fromkeys(HealthState, 0)
    for one in records:
        by_state[one.state] += 1
        by_health[one.health.state] += 1
    counted: dict[str, tuple[object, object]] = {
        "active_instances": (told.active_instances, sum(one.is_active for one in records)),
        "by_state": (dict(told.by_state), by_state),
        "by_health": (dict(told.by_health), by_health),
    }
    lived = sum((one.uptime(now) for one in records), timedelta(0))
    average = lived / len(records) if records else timedelta(0)
    if abs(told.average_uptime - average) > _SLACK:
        counted["average_uptime"] = (told.average_uptime, average)
    return [f"{name}: the statistics say {say}, the rows {n}" for name, (say, n) in counted.items() if say != n]


def task_statistics_faults(reader: Reader, workspace_id: UUID) -> list[str]:
    """The statistics of tasks, which add kept totals, are what counting the rows gives."""
    rows = [task for task in tasks.tasks_in(reader, frozenset(TaskState)) if task.workspace_id == workspace_id]
    states = Counter(task.state for task in rows)
    took = [task.completed_at - task.started_at for task in rows if task.completed_at and task.started_at]
    turned_down = sum(task.state is TaskState.REJECTED and task.completed_at is not None for task in rows)
    reviewed = states[TaskState.ACCEPTED] + turned_down
    statistics = tasks.statistics(reader, workspace_id)
    counted: dict[str, tuple[object, object]] = {
        "by_state": (dict(statistics.by_state), {state: states[state] for state in TaskState}),
        "success_rate": (statistics.success_rate, states[TaskState.ACCEPTED] / reviewed if reviewed else None),
        "average": (statistics.average_duration, sum(took, timedelta(0)) // len(took) if took else None),
        "cost": (round(statistics.cost_usd, 6), round(sum(task.cost_usd or 0.0 for task in rows), 6)),
    }
    return [f"{name}: the statistics say {say}, the rows {n}" for name, (say, n) in counted.items() if say != n]


def faults_of(reader: Reader, now: datetime) -> list[str]:
    faults = contradictions(reader)
    log, horizon = whole_log(reader), events.pruned_until(reader)
    folded, contradicting = fold(log, horizon)
    for workspace in workspaces.list_workspaces(reader):
        space = workspace.workspace_id
        faults += statistics_faults(reader, space, now)
        faults += task_statistics_faults(reader, space)
        faults += [f"audit of {workspace.name}: {fault}" for fault in audit.verify(reader, space).faults]
        if horizon == 0:
            faults += record_faults(folded, all_instances(reader, space))
            cap = plan(workspace.tier).max_concurrent
            faults += quota_faults(log, space, cap) if cap is not None else []
    return faults + (contradicting if horizon == 0 else [])


async def invariant_faults(store: Store, now: datetime) -> list[str]:
    """Everything above, for the whole store. An empty list is what a test wants to see."""
    return await store.read(faults_of, now)
