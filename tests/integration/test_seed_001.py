"""The source document 001 row by row: the number in a test's name is its row in the checklist.

Its acceptance criteria (AC) and its two sample tests are among them. Rows that other files hold in full are shown here
once, shortly: `test_tasks_queue.py`, `test_tasks_work.py`, `test_tasks_review.py`, `test_tasks_recover.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from isolation.ground import until
from tasks_ground import ECHO, SHELL, T, TaskGround, ground, list_keys, opened, repository, until_async
from workdirs_ground import tree_of

import ostler
from ostler import (
    AgentLifecycle,
    ConflictError,
    InvalidOperationError,
    MergeConflictError,
    TaskOrchestrator,
    TaskState,
    TaskStateChangedEvent,
    ValidationError,
    VersionConflictError,
)
from ostler.model.task import TASK_TRANSITIONS
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio


async def running_by_hand(ground: TaskGround, agent_id: str) -> AgentLifecycle:
    record = await ground.tasks.create_lifecycle(agent_id, "task")
    record.state = TaskState.RUNNING
    await ground.tasks.update_lifecycle(record)
    return record


async def test_001_001_one_canonical_record_per_agent(ground: TaskGround) -> None:
    """AC 1: one row of one table answers where the state of an agent is."""
    await running_by_hand(ground, "one")
    await ground.tasks.submit_result("one", "done", ["a.txt"])
    await ground.tasks.accept_agentlet("one")
    with closing(sqlite3.connect(ground.home / "ostler.db")) as database:
        assert database.execute("SELECT key, state FROM tasks").fetchall() == [("one", "accepted")]
    with pytest.raises(ConflictError, match="one"):
        await ground.tasks.create_lifecycle("one", "another")


def test_001_002_the_fields_of_the_record() -> None:
    fields = [field.name for field in dataclasses.fields(AgentLifecycle)]
    required = ["agent_id", "state", "task", "created_at", "updated_at"]
    assert fields == [*required, "generated_code", "submission_summary", "changed_files", "error"]
    made = AgentLifecycle("a", TaskState.QUEUED, "task", 1.0, 2.0)
    assert (made.generated_code, made.submission_summary, made.changed_files, made.error) == (None,) * 4
    made.state = TaskState.RUNNING  # it can be changed


async def test_001_003_timestamps_are_seconds(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        record = await ground.tasks.create_lifecycle("one", "task")
        assert record.created_at == record.updated_at == clock.wall().timestamp()
        clock.advance(7)
        record.state = TaskState.RUNNING
        await ground.tasks.update_lifecycle(record)
        assert (record.updated_at - record.created_at) == 7


async def test_001_004_json_there_and_back(ground: TaskGround) -> None:
    await running_by_hand(ground, "one")
    record = await ground.tasks.submit_result("one", "✓ done", ["a.txt"], generated_code="x = 1")
    text = record.to_json()
    assert json.loads(text)["state"] == "completed"
    assert AgentLifecycle.from_json(text) == record


def test_001_005_the_states() -> None:
    assert [str(state) for state in TaskState] == ["queued", "running", "completed", "accepted", "rejected"]
    assert isinstance(TaskState.QUEUED, str)


async def test_001_006_transitions_are_explicit_and_trackable(ground: TaskGround) -> None:
    """AC 5: each move is an event with both states, the reason and the attempt."""
    task = await ground.add("exit 3", max_failures=1)
    await ground.tasks.run(task.key)
    events = [one for one in await ground.manager.list_events(after=0) if isinstance(one, TaskStateChangedEvent)]
    assert [(one.previous_state, one.new_state, one.attempt) for one in events] == [
        (None, T.QUEUED, 0),
        (T.QUEUED, T.RUNNING, 1),
        (T.RUNNING, T.QUEUED, 1),
    ]
    parked = "parked: failed once, at last: sh failed with exit code 3 and said nothing"
    assert events[-1].reason == f"{parked}; go on: ostler task requeue {task.key}"


async def test_001_007_create_lifecycle(ground: TaskGround) -> None:
    record = await ground.tasks.create_lifecycle("test-001", "do it")
    assert (record.agent_id, record.state, record.task) == ("test-001", TaskState.QUEUED, "do it")
    assert await ground.tasks.get_lifecycle("test-001") == record
    with pytest.raises(ConflictError):
        await ground.tasks.create_lifecycle("test-001", "do it")
    with pytest.raises(ValidationError, match="task"):
        await ground.tasks.create_lifecycle("test-002", "")


async def test_001_008_update_lifecycle(ground: TaskGround) -> None:
    record = await ground.tasks.create_lifecycle("one", "task")
    stale = await ground.tasks.get_lifecycle("one")
    assert stale is not None
    record.state, record.generated_code = TaskState.RUNNING, "x = 1"
    version = (await ground.get("one")).version
    await ground.tasks.update_lifecycle(record)
    assert (await ground.get("one")).version == version + 1, "one write"
    assert await ground.tasks.get_lifecycle("one") == record
    with pytest.raises(VersionConflictError, match="changed meanwhile"):
        await ground.tasks.update_lifecycle(stale)
    record.state = TaskState.ACCEPTED
    with pytest.raises(InvalidOperationError, match="is running and cannot become accepted"):
        await ground.tasks.update_lifecycle(record)
    record.state, record.created_at = TaskState.RUNNING, 0.0
    with pytest.raises(ValidationError, match="created_at"):
        await ground.tasks.update_lifecycle(record)


async def test_001_008_by_hand_no_check_merge_or_agent_is_passed_over(ground: TaskGround) -> None:
    await ground.tasks.submit("task", key="checked", checks=["false"])
    for key in ("checked", "plain"):
        record = await ground.tasks.get_lifecycle(key) or await ground.tasks.create_lifecycle(key, "task")
        record.state = TaskState.RUNNING
        await ground.tasks.update_lifecycle(record)
        record.state = TaskState.COMPLETED
        if key == "checked":
            with pytest.raises(InvalidOperationError, match="submit_result"):
                await ground.tasks.update_lifecycle(record)
        else:
            await ground.tasks.update_lifecycle(record)
            record.state = TaskState.ACCEPTED
            await ground.tasks.update_lifecycle(record)
    task = await ground.done("echo 1 > a.txt")
    merged = await ground.tasks.get_lifecycle(task.key)
    assert merged is not None
    merged.state = TaskState.ACCEPTED
    with pytest.raises(InvalidOperationError, match="accept_agentlet"):
        await ground.tasks.update_lifecycle(merged)


async def test_001_009_get_lifecycle_of_an_unknown_id_is_none(ground: TaskGround) -> None:
    assert await ground.tasks.get_lifecycle("nobody") is None


async def test_001_010_delete_lifecycle(ground: TaskGround) -> None:
    task = await ground.done("echo 1 > a.txt")
    with pytest.raises(InvalidOperationError, match="only an accepted or a rejected one"):
        await ground.tasks.delete_lifecycle(task.key)
    await ground.tasks.reject_agentlet(task.key, "no")
    await ground.tasks.delete_lifecycle(task.key)
    assert await ground.tasks.get_lifecycle(task.key) is None
    entry = await ground.tasks.tasks.workdirs.find(task.key)
    assert entry is not None
    assert (entry.key, entry.record["error"]) == (task.key, "no")
    await ground.tasks.delete_lifecycle(task.key)
    await ground.tasks.delete_lifecycle("nobody")


async def test_001_011_records_are_listed_from_one_store(ground: TaskGround) -> None:
    for name in ("a", "b"):
        await ground.tasks.create_lifecycle(name, "task")
    assert await list_keys(ground, state="queued") == ["b", "a"]


async def test_001_012_spawn_agentlet_writes_the_record_first(ground: TaskGround) -> None:
    idle = await ground.tasks.spawn_agentlet("task")
    record = await ground.tasks.get_lifecycle(idle)
    assert record is not None
    assert (record.agent_id, record.state) == (idle, TaskState.QUEUED)
    first = (await ground.manager.list_events(after=0))[0]
    assert isinstance(first, TaskStateChangedEvent)
    busy = await ground.tasks.spawn_agentlet("echo 1 > a.txt", agent=SHELL, near=ground.repository)
    assert (await ground.until_state(busy, T.COMPLETED)).changed_files == ("a.txt",)


async def test_001_013_run_agentlet(ground: TaskGround) -> None:
    task = await ground.add("echo did it; echo 1 > a.txt", checks=["true"])
    record = await ground.tasks.run_agentlet(task.key)
    assert (record.state, record.submission_summary, record.changed_files) == (T.COMPLETED, "did it", ["a.txt"])
    assert await ground.moves(task) == [(None, T.QUEUED), (T.QUEUED, T.RUNNING), (T.RUNNING, T.COMPLETED)]


async def test_001_014_a_run_that_fails_has_its_reason_in_the_record(ground: TaskGround) -> None:
    task = await ground.add("exit 9", max_failures=2)
    first = await ground.tasks.run_agentlet(task.key)
    assert (first.state, first.error) == (T.QUEUED, "sh failed with exit code 9 and said nothing")
    assert (await ground.tasks.run_agentlet(task.key)).state is T.QUEUED
    assert [wait.kind for wait in await ground.tasks.waits(task.key)] == ["human"], "parked for a person"


async def test_001_015_generated_code_is_kept(ground: TaskGround) -> None:
    await running_by_hand(ground, "one")
    record = await ground.tasks.submit_result("one", "wrote it", generated_code="print('hi')")
    assert record.generated_code == "print('hi')"
    assert (await ground.tasks.get_lifecycle("one")) == record


async def test_001_016_submit_result_is_a_claim(ground: TaskGround) -> None:
    agent_id = await ground.tasks.spawn_agentlet("task", near=ground.repository, checks=["grep -q new a.txt"])
    record = await ground.tasks.get_lifecycle(agent_id)
    assert record is not None
    with pytest.raises(InvalidOperationError, match="only a running task"):
        await ground.tasks.submit_result(agent_id, "done")
    record.state = TaskState.RUNNING
    await ground.tasks.update_lifecycle(record)
    (Path(ground.tasks.active_agents[agent_id].path) / "a.txt").write_text("new\n")
    done = await ground.tasks.submit_result(agent_id, "did both", ["a.txt", "b.txt"])
    assert (done.state, done.submission_summary, done.changed_files) == (T.COMPLETED, "did both", ["a.txt", "b.txt"])
    task = await ground.get(agent_id)
    assert (task.claimed_files, task.changed_files) == (("a.txt", "b.txt"), ("a.txt",))
    assert [receipt.exit_code for receipt in task.receipts] == [0]


async def test_001_017_accept_agentlet(ground: TaskGround) -> None:
    """What fails to merge is not accepted, unlike in the program that the document came from."""
    clean, torn = await ground.done("echo 1 > made.txt"), await ground.done("echo 2 > a.txt")
    assert (await ground.tasks.accept_agentlet(clean.key)).state is T.ACCEPTED
    assert (await ground.tasks.accept_agentlet(clean.key)).state is T.ACCEPTED
    ground.commit(a_txt="other\n")
    with pytest.raises(MergeConflictError, match=r"a\.txt"):
        await ground.tasks.accept_agentlet(torn.key)
    record = await ground.tasks.get_lifecycle(torn.key)
    assert record is not None
    assert record.state is T.COMPLETED


async def test_001_018_reject_agentlet(ground: TaskGround) -> None:
    task = await ground.done("true")
    record = await ground.tasks.reject_agentlet(task.key, "not good")
    assert (record.state, record.error) == (T.REJECTED, "not good")
    with pytest.raises(InvalidOperationError):
        await ground.tasks.accept_agentlet(task.key)


async def test_001_019_020_021_cleanup_is_linear_and_idempotent(ground: TaskGround) -> None:
    """AC 3: the process is gone, the handle forgotten, the workdir in the vault, the record kept; again is harmless."""
    task = await ground.add("echo half > begun; exec tail -f /dev/null")
    running = asyncio.create_task(ground.tasks.run(task.key))
    await until((ground.place(task) / "begun").exists)
    before = tree_of(ground.place(task))
    await ground.tasks.cleanup_agent(task.key)
    await running
    assert await ground.manager.get_active_instances() == []
    assert task.key not in ground.tasks.active_agents
    assert not ground.place(task).exists()
    record = await ground.get(task)
    assert (record.state, record.is_held) == (T.QUEUED, True)
    await ground.tasks.cleanup_agent(task.key)
    await ground.tasks.cleanup_agent("nobody")
    assert await ground.get(task) == record
    await ground.tasks.unretire(task.key)
    after = tree_of(ground.place(task))
    assert {name for name in before if not name.startswith(".ostler-prompt")} <= set(after)
    assert after["begun"][2] == b"half\n"


async def test_001_022_to_025_recovery_rebuilds_the_runtime_from_the_store(repository: Path, tmp_path: Path) -> None:
    """AC 2. `test_tasks_recover.py` holds what becomes of running ones."""
    async with opened(repository, tmp_path / "home") as ground:
        queued = await ground.tasks.spawn_agentlet("task")
        done = (await ground.done("echo 1 > a.txt")).key
        active = dict(ground.tasks.active_agents)
        assert sorted(active) == sorted([queued, done])
    async with opened(repository, tmp_path / "home") as ground:
        assert ground.tasks.active_agents == active
        await ground.tasks.recover_agents()
        assert ground.tasks.active_agents == active
        assert (await ground.get(queued)).state is T.QUEUED
        assert (await ground.tasks.accept_agentlet(done)).state is T.ACCEPTED


async def test_001_026_a_workdir_without_record_is_kept(ground: TaskGround) -> None:
    orphan = ground.home / "tasks" / "old-agent"
    orphan.mkdir(parents=True)
    (orphan / "file").write_text("x\n")
    await ground.tasks.recover_agents()
    assert (orphan / "file").exists()
    collecting = asyncio.create_task(ground.tasks.gc_loop())

    async def is_kept() -> bool:
        return await ground.tasks.tasks.workdirs.find("old-agent") is not None

    await until_async(is_kept)
    collecting.cancel()


async def test_001_027_028_old_records_are_purged_by_gc_loop(repository: Path, tmp_path: Path) -> None:
    """AC 6: accepted and rejected after 24 hours; nothing else, and nothing before."""
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        for name, end in (("a", "accept"), ("r", "reject"), ("c", None)):
            await running_by_hand(ground, name)
            await ground.tasks.submit_result(name, "done")
            if end == "accept":
                await ground.tasks.accept_agentlet(name)
            elif end == "reject":
                await ground.tasks.reject_agentlet(name)
        await ground.tasks.create_lifecycle("q", "task")
        collecting = asyncio.create_task(ground.tasks.gc_loop())
        clock.advance(timedelta(hours=24, seconds=-1).total_seconds())
        assert len(await list_keys(ground, include_finished=True)) == 4

        async def are_purged() -> bool:
            clock.advance(600)
            return await list_keys(ground, include_finished=True) == ["q", "c"]

        await until_async(are_purged)
        collecting.cancel()


async def test_001_029_the_cache_decides_nothing(ground: TaskGround) -> None:
    task = await ground.done("echo 1 > a.txt")
    ground.tasks.active_agents.clear()
    assert "a.txt" in await ground.tasks.diff(task.key)
    await ground.tasks.accept(task.key)


async def test_001_030_a_workdir_holds_no_lifecycle_data(ground: TaskGround) -> None:
    task = await ground.done("true", agent=ECHO)
    names = {name for name in tree_of(ground.place(task)) if not name.startswith(".git")}
    assert names == {"a.txt", "b.txt", "sub", "sub/c.txt", "said.txt"}


async def test_001_031_one_write_per_change(ground: TaskGround) -> None:
    """AC 4: state, event and audit entry are one commit."""
    task = await ground.done("true")
    before = await ground.manager.list_events(after=0, limit=1000)
    await ground.tasks.reject(task.key, reason="no")
    (event,) = (await ground.manager.list_events(after=0, limit=1000))[len(before) :]
    (entry,) = await ground.audited("task.reject")
    assert entry.sequence == event.sequence
    assert (await ground.get(task)).version == task.version + 1


async def test_001_033_one_store_is_all_that_a_test_needs() -> None:
    async with Store(":memory:") as store:
        assert await store.read(lambda reader: reader.fetch("SELECT count(*) FROM tasks")) == [(0,)]


async def test_001_034_sample_transitions(ground: TaskGround) -> None:
    lifecycle = await ground.tasks.create_lifecycle("test-001", "task")
    assert lifecycle.state == TaskState.QUEUED
    lifecycle.state = TaskState.RUNNING
    await ground.tasks.update_lifecycle(lifecycle)
    retrieved = await ground.tasks.get_lifecycle("test-001")
    assert retrieved is not None
    assert retrieved.state == TaskState.RUNNING


async def test_001_035_sample_recovery(tmp_path: Path) -> None:
    async with ostler.open(tmp_path / "home") as manager:
        agent_id = await TaskOrchestrator(manager).spawn_agentlet("task")
    async with ostler.open(tmp_path / "home") as manager:
        second = TaskOrchestrator(manager)
        await second.initialize()
        assert agent_id in second.active_agents
        await second.close()


async def test_001_037_illegal_moves_are_refused_by_the_store(ground: TaskGround) -> None:
    assert {state: sorted(moves) for state, moves in TASK_TRANSITIONS.items()} == {
        T.QUEUED: [T.REJECTED, T.RUNNING],
        T.RUNNING: [T.COMPLETED, T.QUEUED, T.REJECTED],
        T.COMPLETED: [T.ACCEPTED, T.QUEUED, T.REJECTED],
        T.ACCEPTED: [T.COMPLETED],
        T.REJECTED: [],
    }
    record = await ground.tasks.create_lifecycle("one", "task")
    record.state = TaskState.COMPLETED
    with pytest.raises(InvalidOperationError, match="queued and cannot become completed"):
        await ground.tasks.update_lifecycle(record)


async def test_001_038_statistics(ground: TaskGround) -> None:
    for end in ("accept", "reject"):
        task = await ground.done("true")
        await (ground.tasks.accept(task.key) if end == "accept" else ground.tasks.reject(task.key, reason="no"))
    found = await ground.tasks.statistics()
    assert found.success_rate == 0.5
    assert found.average_duration is not None
    assert found.average_duration > timedelta(0)


async def test_001_040_hooks_follow_each_transition(ground: TaskGround) -> None:
    heard: list[str] = []
    ground.tasks.on_change(lambda event: heard.append(event.new_state))
    await running_by_hand(ground, "one")
    await until(lambda: heard == ["queued", "running"])


def test_the_operations_have_the_names_of_the_document() -> None:
    wanted = (
        "create_lifecycle update_lifecycle get_lifecycle delete_lifecycle spawn_agentlet run_agentlet submit_result "
        "accept_agentlet reject_agentlet cleanup_agent recover_agents gc_loop initialize"
    )
    assert all(inspect.iscoroutinefunction(getattr(TaskOrchestrator, name)) for name in wanted.split())
