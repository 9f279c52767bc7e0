"""What the next program finds: agents that live, agents that died, workdirs that are gone, verbs that were cut off."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from coding_ground import marked
from isolation.ground import until
from machine_ground import kill_keeper_of
from tasks_ground import T, TaskGround, opened, repository, until_async, working_queue
from workdirs_ground import git, tree_of

from ostler import AgentHandle, AgentInstance, StoreFullError, Task, TaskState
from ostler.failpoints import FaultPlan, InjectedCrash
from ostler.store import tasks as rows
from ostler.store.transaction import Transaction
from ostler.tasks.attempt import AttemptRules
from ostler.testing.clock import ManualClock
from ostler.workdirs.records import Workdir

__all__ = ["repository"]

pytestmark = pytest.mark.anyio
GATE = "echo $OSTLER_INSTANCE > begun; while ! test -e go; do sleep 0.01; done; echo done > a.txt"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@asynccontextmanager
async def left(repository: Path, home: Path, script: str = GATE, **more: Any) -> AsyncIterator[TaskGround]:
    """One task under way, whose program ends with the block and whose agent lives on."""
    async with opened(repository, home) as ground:
        task = await ground.add(script, **more)
        running = asyncio.create_task(ground.tasks.run(task.key))
        await until((ground.place(task) / "begun").exists)

        async def is_noted() -> bool:
            return (await ground.get(task.key)).instance_id is not None

        await until_async(is_noted)  # the agent may be quicker than the record of its task
        yield ground
        ground.manager.keep_agents = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def kill_all(instance: object) -> None:
    """Without a word, and with nobody who looks."""

    def are_gone() -> bool:
        for pid in marked(instance):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return marked(instance) == {}

    await until(are_gone)


async def test_an_agent_that_lives_is_adopted_and_its_work_is_done_once(repository: Path, home: Path) -> None:
    async with left(repository, home) as ground:
        instance = (await ground.get("T001")).instance_id
    async with opened(repository, home) as ground:
        assert list(ground.tasks.active_agents) == ["T001"]
        (ground.place("T001") / "go").touch()
        done = await ground.until_state("T001", T.COMPLETED)
        assert (done.attempt, done.instance_id, done.failures) == (1, instance, 0)
        assert done.changed_files == ("a.txt", "begun", "go")


async def test_one_that_died_meanwhile_is_queued_again_with_its_workdir(repository: Path, home: Path) -> None:
    async with left(repository, home) as ground:
        instance = (await ground.get("T001")).instance_id
    await kill_all(instance)
    async with opened(repository, home) as ground:
        found = await ground.until_state("T001", T.QUEUED)
        assert (found.failures, found.attempt) == (1, 1)
        assert "SIGKILL" in (found.error or "")
        assert (ground.place("T001") / "begun").exists()


def _lose(tx: Transaction, instance_id: UUID) -> None:
    """The record of an agent as a recovery leaves it that found no trace of its process."""
    tx.execute("UPDATE attempts SET outcome = 'lost' WHERE instance_id = :id", id=instance_id)


async def test_an_attempt_that_was_under_way_in_a_power_cut_is_begun_again_as_the_next(
    repository: Path, home: Path
) -> None:
    """Daemon and keeper are gone, and with them the agent. Its work used to be done again as the same attempt."""
    async with left(repository, home, "echo x >> begun; while ! test -e go; do sleep 0.01; done") as ground:
        task = await ground.get("T001")
    kill_keeper_of(home)
    await kill_all(task.instance_id)
    async with opened(repository, home) as ground:
        queued = await ground.until_state(task, T.QUEUED)
        assert (queued.attempt, queued.failures, queued.lost) == (1, 0, 1)
        assert await ground.tasks.waits(task.key) == []
        assert (ground.place(task) / "begun").read_text() == "x\n", "it ran once"
        (ground.place(task) / "go").touch()
        done = await ground.tasks.run(task.key)
        assert (done.state, done.attempt, done.lost) == (T.COMPLETED, 2, 0)
        assert (ground.place(task) / "begun").read_text() == "x\nx\n"


async def test_a_lost_attempt_spends_no_failure_and_is_parked_when_it_repeats(repository: Path, home: Path) -> None:
    """Lost with the machine: an attempt of which only that is known. It used to cost a failure."""

    class LostRules(AttemptRules):
        async def judge(self, task: Task, workdir: Workdir, instance: AgentInstance) -> Task:
            await ground.manager.store.run(_lose, instance.instance_id)
            return await super().judge(task, workdir, instance)

    async with opened(repository, home) as ground:
        task = await ground.add("kill -9 $$", max_failures=2)
        for attempt in (1, 2, 3):
            claimed = await ground.manager.store.run(rows.claim_task, await ground.get(task))
            assert claimed is not None, "nothing keeps it from being begun again at once"
            found = await ground.tasks.work(claimed, LostRules(ground.tasks.tasks))
            assert (found.state, found.attempt, found.failures, found.lost) == (T.QUEUED, attempt, 0, attempt)
            assert await ground.tasks.waits(task.key) == []
        claimed = await ground.manager.store.run(rows.claim_task, await ground.get(task))
        assert claimed is not None
        await ground.tasks.work(claimed, LostRules(ground.tasks.tasks))
        (wait,) = await ground.tasks.waits(task.key)
        assert (wait.kind, (wait.detail or {})["cause"]) == ("human", "lost")
        assert (wait.reason or "").startswith("lost 4 times in a row, at last: ")
        await ground.tasks.requeue(task.key)
        failed = await ground.tasks.run(task.key)
        assert (failed.failures, failed.lost) == (1, 0), "an end that was seen is no loss"


async def test_a_check_that_was_lost_is_run_again_on_a_fresh_checkout(
    repository: Path, home: Path, tmp_path: Path
) -> None:
    check = f"test ! -e junk || exit 7; touch junk; test -e {tmp_path}/second || kill -9 $$"
    async with opened(repository, home) as ground:
        task = await ground.add("echo 1 > a.txt", checks=[check])
        ended = AgentHandle.ended

        async def ended_with_the_machine(handle: AgentHandle) -> None:
            await ended(handle)
            record = await ground.manager.require_instance(handle.instance_id)
            if record.name == "T001-1-check-1" and not (tmp_path / "second").exists():
                (tmp_path / "second").touch()
                await ground.manager.store.run(_lose, record.instance_id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AgentHandle, "ended", ended_with_the_machine)
            done = await ground.tasks.run(task.key)
        assert (done.state, done.attempt) == (T.COMPLETED, 1), done.error


async def test_one_whose_workdir_is_gone_is_rejected_with_the_state_before(repository: Path, home: Path) -> None:
    async with left(repository, home) as ground:
        task = await ground.get("T001")
    await kill_all(task.instance_id)
    shutil.rmtree(ground.place(task))
    async with opened(repository, home) as ground:
        found = await ground.get(task)
        assert found.state is T.REJECTED
        assert found.error == f"its workdir {ground.place(task)} is gone; it was running"
        (row,) = await ground.manager.inbox()
        assert (row.kind, row.key, row.sentence) == ("failed", task.key, found.error)
        assert row.next == f"ostler answer {task.key} seen"
        (wait,) = await ground.tasks.waits(task.key)
        await ground.tasks.answer(wait.wait_id, "seen")
        assert await ground.manager.inbox() == []
        assert await ground.moves(task) == [(None, T.QUEUED), (T.QUEUED, T.RUNNING), (T.RUNNING, T.REJECTED)]


@pytest.mark.parametrize("state", [T.REJECTED, T.QUEUED])
async def test_an_agent_whose_task_was_cancelled_or_requeued_by_a_killed_program_is_ended(
    repository: Path, home: Path, state: TaskState
) -> None:
    async with left(repository, home) as ground:
        task = await ground.get("T001")
        await ground.manager.store.run(rows.change_task, task, to=state)
    async with opened(repository, home) as ground:
        assert await ground.manager.get_active_instances() == []
        assert marked(task.instance_id) == {}
        assert (await ground.get(task)).state is state


async def test_one_that_was_claimed_and_no_more_is_worked_on(repository: Path, home: Path) -> None:
    async with opened(repository, home) as ground:
        await ground.manager.store.run(rows.claim_task, await ground.add("echo 1 > a.txt"))
    async with opened(repository, home) as ground:
        done = await ground.until_state("T001", T.COMPLETED)
        assert (done.attempt, done.changed_files) == (1, ("a.txt",))


@pytest.mark.parametrize("is_plain", [False, True], ids=["worktree", "directory"])
async def test_an_agent_whose_spawn_was_not_noted_is_found(repository: Path, home: Path, is_plain: bool) -> None:
    """Killed between the start of the process and the write of its id: its directory is not taken from under it."""
    near = home.parent / "plain" if is_plain else repository
    near.mkdir(exist_ok=True)
    async with left(repository, home, near=near) as ground:
        task = await ground.get("T001")
        ground.tasks.tasks.running["T001"].cancel()
        await asyncio.sleep(0)
        await ground.manager.store.run(rows.change_task, task, {"instance_id": None})
    async with opened(repository, home) as ground:
        (ground.place("T001") / "go").touch()
        done = await ground.until_state("T001", T.COMPLETED)
        assert (done.attempt, done.instance_id, done.failures) == (1, task.instance_id, 0)
        assert (ground.place("T001") / "begun").read_text() == f"{task.instance_id}\n"
        assert await ground.tasks.tasks.workdirs.list_entries() == []


async def test_a_check_that_outlives_its_program_is_waited_for(repository: Path, home: Path, tmp_path: Path) -> None:
    check = f"touch {tmp_path}/checking; while ! test -e {tmp_path}/go; do sleep 0.01; done; grep -q new a.txt; pwd"
    async with opened(repository, home) as ground:
        task = await ground.add("echo new > a.txt", checks=[check])
        running = asyncio.create_task(ground.tasks.run(task.key))
        await until((tmp_path / "checking").exists)
        ground.manager.keep_agents = True
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (tmp_path / "checking").unlink()
    async with opened(repository, home) as ground:
        (tmp_path / "go").touch()
        done = await ground.until_state(task, T.COMPLETED, T.QUEUED)
        assert (done.state, done.attempt, done.error) == (T.COMPLETED, 1, None)
        assert not (tmp_path / "checking").exists(), "it was not run twice"


async def test_recovering_twice_changes_nothing(repository: Path, home: Path) -> None:
    async with left(repository, home):
        pass
    async with opened(repository, home) as ground:
        before = await ground.get("T001")
        assert await ground.tasks.recover_agents() == [], "it is under way already"
        await ground.tasks.initialize()
        assert await ground.get("T001") == before
        (ground.place("T001") / "go").touch()
        await ground.until_state("T001", T.COMPLETED)
        assert await ground.tasks.recover_agents() == []
        assert len(await ground.moves(before)) == 3


async def test_queued_stays_queued_and_completed_can_be_reviewed_by_the_next_program(
    repository: Path, home: Path
) -> None:
    async with opened(repository, home) as ground:
        await ground.add("true")
        await ground.done("echo 2 > b.txt")
    async with opened(repository, home) as ground:
        assert (await ground.get("T001")).state is T.QUEUED
        assert "+2" in await ground.tasks.diff("T002")
        await ground.tasks.accept("T002")
        assert ground.shown("b.txt") == "2\n"


async def test_one_record_that_cannot_be_read_does_not_stop_the_others(repository: Path, home: Path) -> None:
    async with opened(repository, home) as ground:
        for _ in range(2):
            await ground.manager.store.run(rows.claim_task, await ground.add("true"))
        await ground.tasks.tasks.change(await ground.get("T001"), {"workdir": {"kind": "palace"}})
    async with opened(repository, home) as ground:
        await ground.until_state("T002", T.COMPLETED)
        assert (await ground.get("T001")).state is T.RUNNING


async def test_a_store_that_cannot_write_for_a_while_leaves_no_task_behind(
    repository: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with opened(repository, home, clock=clock) as ground:
        work, refused = ground.tasks.work, asyncio.Event()

        async def work_later(task: Task, rules: AttemptRules | None = None) -> Task:
            if not refused.is_set():
                refused.set()
                raise StoreFullError("the disk is full")
            return await work(task, rules)

        monkeypatch.setattr(ground.tasks, "work", work_later)
        task = await ground.add("true")
        async with working_queue(ground):
            await refused.wait()

            async def is_done() -> bool:
                clock.advance(1)
                return (await ground.get(task)).state is T.COMPLETED

            await until_async(is_done)


# --- verbs that were cut off -------------------------------------------------------------------------


async def cut(verb: Any, task: Task) -> None:
    with pytest.raises(InjectedCrash):
        await verb(task.key)


REVIEW = ("commit.after", "objects.after", "ref.before", "ref.after", "files.after", "index.after")


@pytest.mark.parametrize("point", REVIEW)
async def test_an_accept_that_was_cut_off_is_finished_once(repository: Path, home: Path, point: str) -> None:
    async with opened(repository, home, fault=FaultPlan(f"review.{point}")) as ground:
        task = await ground.done("echo 2 > b.txt")
        await cut(ground.tasks.accept, task)
        assert (await ground.get(task)).state is T.COMPLETED
    async with opened(repository, home) as ground:
        assert ground.git("status", "--porcelain") == "", "the checkout is whole before anybody asks"
        done = await ground.tasks.accept(task.key)
        assert (done.state, ground.shown("b.txt")) == (TaskState.ACCEPTED, "2\n")
        assert ground.git("rev-list", "--count", "main").strip() == "2"
        assert ground.git("status", "--porcelain") == ""
        assert not (repository / ".git" / "index.lock").exists()


@pytest.mark.parametrize("point", ["ref.before", "ref.after", "files.after", "index.after"])
async def test_an_undo_that_was_cut_off_is_finished_once(repository: Path, home: Path, point: str) -> None:
    async with opened(repository, home) as ground:
        task = await ground.done("echo 2 > b.txt")
        await ground.tasks.accept(task.key)
    async with opened(repository, home, fault=FaultPlan(f"review.{point}")) as ground:
        await cut(ground.tasks.undo, task)
    async with opened(repository, home) as ground:
        done = await ground.tasks.undo(task.key)
        assert (done.state, ground.shown("b.txt")) == (T.COMPLETED, "b\n")
        assert ground.git("status", "--porcelain") == ""


@pytest.mark.parametrize("point", ["move", "save", "publish", "remove"])
async def test_a_retirement_that_was_cut_off_loses_nothing(repository: Path, home: Path, point: str) -> None:
    async with opened(repository, home, fault=FaultPlan(f"retire.{point}.after")) as ground:
        task = await ground.done("echo 2 > b.txt; echo x > untracked")
        before = tree_of(ground.place(task))
        await cut(ground.tasks.retire, task)
    async with opened(repository, home) as ground:
        assert (await ground.get(task)).workdir is None, "it is finished at the start"
        assert "untracked" in await ground.tasks.diff(task.key)
        back = await ground.tasks.unretire(task.key)
        assert tree_of(ground.place(task)) == before
        assert (back.vault, back.state) == (None, T.COMPLETED)
        await ground.tasks.accept(task.key)
        assert git(repository, "show", "main:untracked") == "x\n"


async def test_a_return_from_the_vault_that_was_cut_off_is_finished(
    repository: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the files were back and before the record said so; also of a task that was purged."""
    for is_purged in (False, True):
        async with opened(repository, home) as ground:
            task = await ground.done("echo 2 > b.txt")
            await ground.tasks.reject(task.key, reason="no")
            await (ground.tasks.delete_lifecycle(task.key) if is_purged else ground.tasks.retire(task.key))

            async def crash(*_: Any, **__: Any) -> None:
                raise InjectedCrash("before the record")

            with monkeypatch.context() as patch:
                patch.setattr(ground.tasks.tasks, "change", crash)
                await cut(ground.tasks.unretire, task)
            assert ground.place(task).is_dir()
        async with opened(repository, home) as ground:
            back = await ground.tasks.unretire(task.key)
            assert (back.state, back.workdir is not None) == (T.REJECTED, True)
            assert (ground.place(task) / "b.txt").read_text() == "2\n"
