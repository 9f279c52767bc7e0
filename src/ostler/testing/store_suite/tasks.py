"""Pieces of work: every move, what may change, and the questions about them."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import (
    InvalidOperationError,
    StaleWriterError,
    TaskNotFoundError,
    ValidationError,
    VersionConflictError,
)
from ostler.model import (
    TASK_TRANSITIONS,
    AgentPriority,
    Task,
    TaskCreatedEvent,
    TaskFilter,
    TaskState,
    TaskStateChangedEvent,
    TaskUpdatedEvent,
    Tier,
)
from ostler.store import Store
from ostler.store.commands import CreateTask, MoveTask, UpdateTask
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import ALICE, StoreGround, new_workspace, whole_log

ROADS = {
    TaskState.QUEUED: (),
    TaskState.RUNNING: (TaskState.RUNNING,),
    TaskState.COMPLETED: (TaskState.RUNNING, TaskState.COMPLETED),
    TaskState.ACCEPTED: (TaskState.RUNNING, TaskState.COMPLETED, TaskState.ACCEPTED),
    TaskState.REJECTED: (TaskState.RUNNING, TaskState.REJECTED),
}
PAIRS = list(itertools.product(TaskState, TaskState))


async def brought_to(store: Store, state: TaskState, **fields: Any) -> Task:
    task = await store.commit(CreateTask(**{"task": "dig a well"} | fields))
    for step in ROADS[state]:
        task = await store.commit(MoveTask(task_id=task.task_id, to=step))
    return task


class TasksContract(StoreGround):
    async def test_a_task_is_kept_whole_with_its_event_and_audit(self, store: Store) -> None:
        first = await store.commit(CreateTask(task="first"))
        made = await store.commit(
            CreateTask(
                task="dig ✓\nhere",
                definition_id=UUID(int=5),
                priority=AgentPriority.HIGH,
                dependencies=(first.task_id,),
                workspace="/srv/one",
                branch="dig",
                tags=("Deep", "deep", "wet"),
                by=ALICE,
            )
        )
        assert await store.get_task(made.task_id) == made
        assert (made.state, made.tags, made.owner_id) == (TaskState.QUEUED, ("deep", "wet"), ALICE.principal_id)
        told = (await whole_log(store))[-1]
        assert isinstance(told, TaskCreatedEvent)
        assert (told.task_id, told.task) == (made.task_id, made.task)
        assert (await store.read_audit())[-1].subject == f"task:{made.task_id}"

    @pytest.mark.parametrize(("start", "to"), PAIRS)
    async def test_a_task_moves_as_its_table_says_and_no_other_way(
        self, store: Store, start: TaskState, to: TaskState
    ) -> None:
        old = await brought_to(store, start)
        before = await store.head()
        if to not in TASK_TRANSITIONS[start]:
            with pytest.raises(InvalidOperationError, match=f"is {start} and cannot become {to}") as refused:
                await store.commit(MoveTask(task_id=old.task_id, to=to))
            assert (refused.value.current, refused.value.wanted) == (start, to)
            assert await store.get_task(old.task_id) == old
            assert (await store.head()).sequence == before.sequence
            return
        new = await store.commit(MoveTask(task_id=old.task_id, to=to, reason="review"))
        assert (new.state, new.version) == (to, old.version + 1)
        assert new.attempt == new.spawn_count == old.attempt + (to is TaskState.RUNNING)
        assert new.retry_count == old.retry_count + (to is TaskState.QUEUED)
        (told,) = await whole_log(store, before.sequence)
        assert isinstance(told, TaskStateChangedEvent)
        assert (told.previous_state, told.new_state, told.reason) == (start, to, "review")

    async def test_what_a_task_carries_can_change_and_the_rest_cannot(self, store: Store) -> None:
        made = await store.commit(CreateTask(task="dig"))
        changes = {"submission_summary": "dug", "changed_files": ("a.py", "b c.py"), "error": None}
        new = await store.commit(UpdateTask(task_id=made.task_id, changes=changes))
        assert (new.submission_summary, new.changed_files, new.version) == ("dug", ("a.py", "b c.py"), 2)
        assert await store.get_task(made.task_id) == new
        told = (await whole_log(store))[-1]
        assert isinstance(told, TaskUpdatedEvent)
        assert told.changed == ("changed_files", "error", "submission_summary")
        before = await store.head()
        for bad in ({"state": TaskState.ACCEPTED}, {"version": 9}, {"retry_count": -1}, {"retry_count": 2**63}):
            with pytest.raises(ValidationError, match=next(iter(bad))):
                await store.commit(UpdateTask(task_id=made.task_id, changes=bad))
        with pytest.raises(ValidationError, match="NUL"):
            await store.commit(MoveTask(task_id=made.task_id, to=TaskState.RUNNING, changes={"branch": "a\0"}))
        assert await store.head() == before

    async def test_a_task_has_versions_and_attempts_that_fence(self, store: Store) -> None:
        running = await brought_to(store, TaskState.RUNNING)
        again = await store.commit(MoveTask(task_id=running.task_id, to=TaskState.QUEUED))
        rerun = await store.commit(MoveTask(task_id=running.task_id, to=TaskState.RUNNING))
        with pytest.raises(StaleWriterError, match="attempt 2"):
            await store.commit(UpdateTask(task_id=rerun.task_id, attempt=1, changes={"error": "late"}))
        with pytest.raises(VersionConflictError):
            await store.commit(MoveTask(task_id=rerun.task_id, expected_version=again.version, to=TaskState.COMPLETED))
        assert await store.get_task(rerun.task_id) == rerun

    async def test_tasks_and_dependencies_must_exist(self, store: Store) -> None:
        nothing = UUID(int=9)
        before = await store.head()
        with pytest.raises(TaskNotFoundError, match=str(nothing)):
            await store.commit(CreateTask(task="dig", dependencies=(nothing,)))
        with pytest.raises(TaskNotFoundError):
            await store.commit(MoveTask(task_id=nothing, to=TaskState.RUNNING))
        assert await store.get_task(nothing) is None
        assert await store.head() == before

    async def test_tasks_are_found_by_state_time_tag_and_definition(self, store: Store, clock: ManualClock) -> None:
        start = clock.wall()
        everything = []
        for number, state in enumerate(itertools.islice(itertools.cycle(TaskState), 20)):
            clock.advance(60)
            fields: dict[str, Any] = {
                "definition_id": UUID(int=1 + number % 2),
                "tags": (("a",), ("a", "B"), ())[number % 3],
            }
            everything.append(await brought_to(store, state, **fields))
        everything.reverse()
        moments = [None, start + timedelta(minutes=5), start + timedelta(minutes=12, microseconds=1)]
        for state, tag, definition, since, until in itertools.product(
            [None, *TaskState], [None, "A", "b"], [None, UUID(int=1)], moments, moments
        ):
            wanted = TaskFilter(state=state, tag=tag, definition_id=definition, created_from=since, created_until=until)
            assert await store.list_tasks(wanted) == [
                one
                for one in everything
                if (state is None or one.state is state)
                and (tag is None or tag.lower() in one.tags)
                and (definition is None or one.definition_id == definition)
                and (since is None or one.created_at >= since)
                and (until is None or one.created_at < until)
            ], wanted

    async def test_tasks_come_in_pages_and_by_workspace(self, store: Store, clock: ManualClock) -> None:
        other = await new_workspace(store, Tier.CORE)
        for number in range(7):
            clock.advance(1)
            await store.commit(CreateTask(task=f"t{number}", tags=("x",)))
        theirs = await store.commit(CreateTask(task="theirs", workspace_id=other, tags=("x",)))
        for tag in (None, "x"):
            first = await store.list_tasks(TaskFilter(limit=4, tag=tag))
            rest = await store.list_tasks(TaskFilter(limit=4, before=first[-1].task_id, tag=tag))
            assert rest == await store.list_tasks(TaskFilter(limit=4, offset=4, tag=tag))
            assert [one.task for one in first + rest] == [f"t{number}" for number in reversed(range(7))]
            assert await store.list_tasks(TaskFilter(tag=tag), other) == [theirs]
