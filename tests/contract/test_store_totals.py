"""Statistics from kept totals: whatever ends, comes back or goes, they are what counting the rows gives."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from store_ground import ALICE, HOME, IDS, brought_to, failed, finished, new_task, new_workspace, ready, restarted
from store_invariants import faults_of, invariant_faults

from ostler.errors import InvalidOperationError
from ostler.model.query import GetInstancesFilter
from ostler.model.states import AgentState, Tier
from ostler.model.task import FINISHED_STATES, TASK_TRANSITIONS, Task, TaskState
from ostler.policy.retention import RetentionPolicy
from ostler.store import queries, retention, tasks
from ostler.store.store import Store
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio
_TERMINATED = GetInstancesFilter(include_terminated=True, limit=1000)


async def test_instances_that_end_come_back_and_are_removed_stay_counted(store: Store, clock: ManualClock) -> None:
    for state in AgentState:
        await brought_to(store, state)
        clock.advance(1.5)
    instance = await failed(store, await ready(store))
    for _ in range(3):
        clock.advance(2)
        instance = await failed(store, await restarted(store, instance))
        assert await invariant_faults(store, clock.wall()) == []
    await finished(store, instance, end=None)
    assert await invariant_faults(store, clock.wall()) == []
    for record in await store.read(queries.list_instances, _TERMINATED, HOME):
        if not record.is_active:
            await store.run(retention.remove_instance, record, by=ALICE)
            assert await invariant_faults(store, clock.wall()) == []
    statistics = await store.read(queries.statistics, HOME, clock.wall())
    assert statistics.by_state[AgentState.FAILED] == statistics.by_state[AgentState.TERMINATED] == 0


async def test_the_gauges_count_every_workspace(store: Store) -> None:
    other = await new_workspace(store, Tier.ENTERPRISE)
    await brought_to(store, AgentState.TERMINATED)
    await brought_to(store, AgentState.TERMINATED, workspace_id=other)
    await brought_to(store, AgentState.READY, workspace_id=other)
    counts = await store.read(queries.state_counts)
    assert {state: count for state, count in counts.items() if count} == {
        AgentState.TERMINATED: 2,
        AgentState.READY: 1,
    }


async def test_a_sweep_takes_what_it_removes_out_of_the_statistics(store: Store, clock: ManualClock) -> None:
    for _ in range(5):
        await brought_to(store, AgentState.TERMINATED)
    clock.advance(timedelta(days=2).total_seconds())
    assert (await store.run(retention.sweep, RetentionPolicy(batch=3))).removed >= 3
    assert await invariant_faults(store, clock.wall()) == []


@pytest.mark.parametrize("seed", range(3))
async def test_tasks_on_any_way_through_their_states_stay_counted(store: Store, clock: ManualClock, seed: int) -> None:
    chance = random.Random(seed)
    known = [await store.run(tasks.add_task, new_task(clock), by=ALICE) for _ in range(5)]
    for _ in range(60):
        clock.advance(chance.random())
        place = chance.randrange(len(known))
        try:
            known[place] = await store.run(_go_on, known[place], chance.random(), chance.random())
        except InvalidOperationError:
            known[place] = await store.run(tasks.add_task, new_task(clock), by=ALICE)
    assert await store.read(faults_of, clock.wall()) == []


def _go_on(tx: Transaction, task: Task, choice: float, cost: float) -> Task:
    ways = sorted(TASK_TRANSITIONS[task.state])
    if task.state in FINISHED_STATES and (choice < 0.3 or not ways):
        tasks.delete_task(tx, task, by=ALICE)
        return tasks.add_task(tx, task.evolve(task_id=IDS.new(), key="", state=TaskState.QUEUED), by=ALICE)
    to = ways[int(choice * len(ways))]
    changes: dict[str, Any] = {"cost_usd": cost}
    if to is TaskState.RUNNING:
        changes |= {"attempt": task.attempt + 1, "started_at": task.started_at or tx.now}
    return tasks.change_task(tx, task, changes, to=to, by=ALICE)


async def test_a_finished_task_that_is_only_changed_is_counted_once(store: Store, clock: ManualClock) -> None:
    task = await store.run(tasks.add_task, new_task(clock), by=ALICE)
    task = await store.run(tasks.change_task, task, {"cost_usd": 0.25}, to=TaskState.REJECTED)
    task = await store.run(tasks.change_task, task, {"cost_usd": 0.75})
    statistics = await store.read(tasks.statistics, HOME)
    assert (statistics.by_state[TaskState.REJECTED], statistics.cost_usd) == (1, 0.75)
