"""What happened in a span of time: to tasks, and with what time, tokens and cost of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from ostler.lifecycle.instance import Runtime
from ostler.model.events import (
    AgentRestartingEvent,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Event,
    TaskStateChangedEvent,
    TaskWaitOpenedEvent,
)
from ostler.model.instance import AgentInstance
from ostler.model.query import Report
from ostler.model.task import TaskState
from ostler.model.wait import WaitKind
from ostler.store import events, moves, queries

_NO_TIME = timedelta(0)


async def read_report(runtime: Runtime, workspace_id: UUID, since: datetime) -> Report:
    store, now = runtime.store, runtime.clock.wall()
    totals = _Totals(since)
    first = await store.read(events.first_event_at, since)
    cursor = first - 1
    while page := await store.read(events.read_outcomes, cursor, workspace_id):
        for event in page:
            totals.add(event)
        cursor = page[-1].sequence
    for record in await store.read(queries.living_since, workspace_id, since):
        live = runtime.instances.get(record.instance_id)
        metrics = None if live is None else live.metrics_now()
        totals.add_living(record if metrics is None else record.evolve(metrics=metrics), now)
    await totals.name_failures(runtime)
    pruned = await store.read(events.pruned_until)
    return totals.report(now, is_whole=not pruned or first > pruned + 1)


@dataclass
class _Totals:
    since: datetime
    #: Ordered sets of keys.
    done: dict[str, None] = field(default_factory=dict)
    accepted: dict[str, None] = field(default_factory=dict)
    rejected: dict[str, None] = field(default_factory=dict)
    parked: dict[str, None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    #: Agents that failed for good, and those that worked on tasks.
    failed_agents: dict[UUID, None] = field(default_factory=dict)
    task_agents: set[UUID] = field(default_factory=set)
    restarts: int = 0
    time: timedelta = _NO_TIME
    tokens: int = 0
    cost: float = 0.0

    def add(self, event: Event) -> None:
        match event:
            case TaskStateChangedEvent():
                self._add_task(event)
            case TaskWaitOpenedEvent(kind=WaitKind.HUMAN) if event.cause is not None:
                self.parked[event.key] = None
            case AgentRestartingEvent():
                self.restarts += 1
            case AgentStateChangedEvent(is_final=True):
                self.failed_agents[event.instance_id] = None
            case AgentTerminatedEvent() if event.occurred_at is not None:
                self._add_time(event.uptime, event.occurred_at)
                self.tokens += event.tokens
                self.cost += event.cost_usd or 0.0
            case _:
                pass

    def _add_task(self, event: TaskStateChangedEvent) -> None:
        if event.is_failure:
            self.failed[event.key] = None
        if event.instance_id is not None:
            self.task_agents.add(event.instance_id)
        match (event.previous_state, event.new_state):
            case (TaskState.ACCEPTED, TaskState.COMPLETED):  # an undo
                self.accepted.pop(event.key, None)
            case (_, TaskState.COMPLETED):
                self.done[event.key] = None
            case (_, TaskState.ACCEPTED):
                self.accepted[event.key] = None
            case (_, TaskState.REJECTED):
                self.rejected[event.key] = None
            case _:
                pass

    def add_living(self, record: AgentInstance, now: datetime) -> None:
        """An instance that lives or has failed; no event tells what it has used."""
        self._add_time(record.uptime(now), record.terminated_at or now)
        if record.metrics is not None:
            self.tokens += record.metrics.tokens_used
            self.cost += (record.metrics.custom or {}).get("cost_usd", 0.0)

    def _add_time(self, lived: timedelta, ended: datetime) -> None:
        self.time += max(min(lived, ended - self.since), _NO_TIME)

    async def name_failures(self, runtime: Runtime) -> None:
        """Agents of tasks are told by their tasks."""
        for instance_id in self.failed_agents.keys() - self.task_agents:
            record = await runtime.store.read(moves.get_instance, instance_id)
            if record is None or record.task_id is None:
                name = None if record is None else record.name
                self.failed[name or str(instance_id)] = None

    def report(self, now: datetime, *, is_whole: bool) -> Report:
        return Report(
            since=self.since,
            until=now,
            done=tuple(self.done),
            accepted=tuple(self.accepted),
            rejected=tuple(self.rejected),
            failed=tuple(self.failed),
            parked=tuple(self.parked),
            restarts=self.restarts,
            time=self.time,
            tokens=self.tokens,
            cost_usd=self.cost,
            is_whole=is_whole,
        )
