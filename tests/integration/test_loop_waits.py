"""Waits and limits of a loop: durable, without a process, without spending retries; caps; restarts; cycles."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from loop_ground import LoopGround, lives, until

from ostler import AgentSignalEvent
from ostler.loop import LoopResultType
from ostler.loop.service import Loops
from ostler.model.loop import TaskLoop
from ostler.model.task import Task, TaskSettings, TaskState
from ostler.model.wait import WaitKind
from ostler.store.events import last_events
from ostler.store.tasks import claim_task
from ostler.tasks.attempt import DAEMON_STOPPED, AttemptWaitsError
from ostler.tasks.queue import TaskQueue
from ostler.workdirs.records import Snapshot, Workdir

pytestmark = pytest.mark.anyio
R = LoopResultType


async def loop_of(ground: LoopGround, key: str = "T001") -> TaskLoop:
    found = (await ground.task(key)).loop
    assert found is not None
    return found


# --- retries and their interval ----------------------------------------------------------------------


async def test_004_039_the_interval_is_kept_after_a_retry_and_not_after_a_breakpoint(timed_ground: LoopGround) -> None:
    await timed_ground.add(loop={"retry_interval": 30})
    timed_ground.steps("exit 1", "blocked ci", "complete")
    async with timed_ground.running() as running:
        wait = await timed_ground.wait()
        assert (wait.kind, wait.due_at) == (WaitKind.BACKOFF, timed_ground.clock.wall() + timedelta(seconds=30))
        timed_ground.advance(29)
        await timed_ground.settled()
        assert timed_ground.starts() == 1
        timed_ground.advance(1)
        assert (await running).result_type is R.TASK_COMPLETE, "the third start came at once"
    assert timed_ground.starts() == 3


async def test_blocked_for_longer_than_the_error_budget(timed_ground: LoopGround) -> None:
    await timed_ground.add(loop={"max_retries": 1, "retry_interval": 30})
    await timed_ground.add("another")
    timed_ground.steps("blocked T002", "complete")
    async with timed_ground.running() as running:
        await timed_ground.wait()
        for _ in range(20):  # an hour and forty minutes, where 30 s would have been spent
            timed_ground.advance(300)
            await timed_ground.settled()
        assert (running.done(), timed_ground.starts()) == (False, 1)
        await timed_ground.orchestrator.cancel("T002", reason="not needed")
        assert (await running).result_type is R.TASK_COMPLETE
    assert (await loop_of(timed_ground)).retries == 0


async def test_004_012_a_block_that_lasts_too_long_is_blocked(timed_ground: LoopGround) -> None:
    await timed_ground.add(loop={"blocked_timeout": "1h"})
    timed_ground.steps("blocked 'human: Which one?'", "complete")
    async with timed_ground.running() as running:
        await timed_ground.wait()
        timed_ground.advance(3599)
        await timed_ground.settled()
        assert not running.done()
        timed_ground.advance(1)
        result = await running
    assert (result.result_type, result.blocked_on, result.summary) == (R.BLOCKED, ("human",), "Which one?")
    wait = await timed_ground.wait()
    await timed_ground.orchestrator.answer(wait.wait_id, "the first")
    assert (await timed_ground.run()).result_type is R.TASK_COMPLETE, "it stayed open, and can be answered later"


async def test_004_038_breakpoints_spend_no_retries(loop_ground: LoopGround) -> None:
    await loop_ground.add(loop={"max_retries": 0, "ci": ("cat a.txt; false",)})
    loop_ground.steps(*(f"echo {number} >> a.txt; blocked ci" for number in range(4)), "complete")
    assert (await loop_ground.run()).result_type is R.TASK_COMPLETE
    assert (await loop_of(loop_ground)).retries == 0


# --- blockers that are not there ---------------------------------------------------------------------


async def test_004_029_an_unknown_blocker_is_an_error_to_the_agent(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps("blocked T404", "complete")
    assert (await loop_ground.run()).iterations == 2
    assert await loop_ground.ends() == ["error", "breakpoint"]
    assert "blocked on T404, but there is no such task" in loop_ground.prompt(2)
    assert (await loop_of(loop_ground)).retries == 1


async def test_cycles_are_found_and_parked(loop_ground: LoopGround) -> None:
    for key, other in (("T001", "T002"), ("T002", "T003"), ("T003", "T001")):
        await loop_ground.add()
        loop_ground.steps(f"blocked {other}", "complete", key=key)
    assert (await loop_ground.run("T001", wait=False)).blocked_on == ("T002",)
    assert (await loop_ground.run("T002", wait=False)).blocked_on == ("T003",)
    assert (await loop_ground.loops.graph()) == {"waits": {"T001": ["T002"], "T002": ["T003"]}, "cycles": []}
    found = await loop_ground.run("T003", wait=False)
    assert (found.result_type, found.blocked_on) == (R.BLOCKED, ("human",))
    assert found.summary == "T003 waits for T001 waits for T002 waits for T003: they wait for one another"
    wait = await loop_ground.wait("T003")
    await loop_ground.orchestrator.answer(wait.wait_id, "go on without it")
    assert (await loop_ground.run("T003")).result_type is R.TASK_COMPLETE
    await loop_ground.orchestrator.accept("T003")
    assert (await loop_ground.run("T002")).result_type is R.TASK_COMPLETE


async def test_a_cycle_that_comes_about_by_dependencies_is_shown(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    await loop_ground.add(depends_on=("T001",))
    loop_ground.steps("blocked T002")
    found = await loop_ground.run(wait=False)
    assert found.summary == "T001 waits for T002 waits for T001: they wait for one another"
    blocked_on_itself = await loop_ground.add()
    loop_ground.steps(f"blocked {blocked_on_itself.key}", key=blocked_on_itself.key)
    assert "T003 waits for T003" in str((await loop_ground.run("T003", wait=False)).summary)


# --- what is answered, and what came early -----------------------------------------------------------


class LaterCi:
    """One that tells its result afterwards, or before it was asked."""

    def __init__(self, loops: Loops | None = None) -> None:
        self.asked: list[str] = []
        self.early = loops

    async def check(self, task: Task, workdir: Workdir, snapshot: Snapshot) -> None:  # noqa: ARG002 - of the protocol
        self.asked.append(snapshot.commit)
        if self.early is not None:
            await self.early.report_ci(snapshot.commit, passed=True)


async def test_004_020_a_ci_event_that_comes_early_is_not_lost(loop_ground: LoopGround) -> None:
    ci = LaterCi()
    await loop_ground.add()
    loop_ground.steps("touch made; blocked ci; hang", "complete")
    async with loop_ground.running(ci_provider=ci) as running:
        await loop_ground.wait()
        (commit,) = ci.asked
        assert (await loop_ground.wait()).wake_key == f"ci:{commit}"
        running.cancel()
    await loop_ground.loops.report_ci(commit.upper(), passed=False, output="line 3")
    assert await loop_ground.waits() == [], "ended while no loop ran"
    assert (await loop_ground.run(ci_provider=ci)).result_type is R.TASK_COMPLETE
    assert "CI failed" in loop_ground.prompt(2)
    assert "> output: line 3" in loop_ground.prompt(2)
    await loop_ground.add()
    loop_ground.steps("blocked ci", "complete", key="T002")
    early = LaterCi(loop_ground.loops)
    result = await loop_ground.run("T002", ci_provider=early)
    assert result.result_type is R.TASK_COMPLETE, "it was told before there was a wait"
    assert "CI passed" in loop_ground.prompt(2, "T002")


async def test_004_044_ci_that_is_told_later_refuses_a_pull_request(loop_ground: LoopGround) -> None:
    ci = LaterCi()
    await loop_ground.add()
    loop_ground.steps("touch one; pr", "touch two; pr")
    async with loop_ground.running(ci_provider=ci) as running:
        await loop_ground.wait()
        assert (await loop_ground.loops.pull_request(1)).ci == "pending"
        assert await loop_ground.manager.inbox() == [], "nobody need look before CI has"
        await loop_ground.loops.report_ci(ci.asked[0], passed=False, output="two is missing")
        await until(lambda: len(ci.asked) == 2)
        await loop_ground.loops.report_ci(ci.asked[1], passed=True)

        async def passed() -> bool:
            await loop_ground.loops.settle()
            return (await loop_ground.loops.pull_request(1)).ci == "passed"

        await until(passed)
        await loop_ground.loops.merge(1)
        assert (await running).result_type is R.TASK_COMPLETE
    assert "> CI failed on #1: two is missing" in loop_ground.prompt(2)


# --- caps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "told", "starts"),
    [
        ({"max_iterations": 2}, "2 iterations", 2),
        ({"max_tokens": 250}, "300 tokens are used", 3),
        ({"max_cost_usd": 0.75}, "$1.00 are spent", 2),
    ],
)
async def test_004_004_caps_park_and_an_answer_gives_as_much_again(
    loop_ground: LoopGround, loop: dict[str, float], told: str, starts: int
) -> None:
    await loop_ground.add(loop={**loop, "max_retries": 50})
    async with asyncio.timeout(60):
        found = await loop_ground.loop().run_agent_loop(Spender, "T001")
        assert (found.result_type, found.iterations) == (R.MAX_RETRIES, starts)
        assert told in str(found.summary)
        await loop_ground.orchestrator.answer((await loop_ground.wait()).wait_id, "yes")
        assert (await loop_ground.loop().run_agent_loop(Spender, "T001")).iterations == 2 * starts
    await loop_ground.orchestrator.answer((await loop_ground.wait()).wait_id, "no")
    task = await loop_ground.task()
    assert (task.is_held, task.state) == (True, TaskState.QUEUED), "no means no"


def Spender(request: object) -> dict[str, object]:  # noqa: N802, ARG001 - an agent
    """Uses 100 tokens and half a dollar, and says nothing of use."""
    return {"message": "hm", "tokens": {"input": 90, "output": 10}, "cost_usd": 0.5}


async def test_004_004_until_is_what_it_prints_when_it_is_done(loop_ground: LoopGround) -> None:
    await loop_ground.add(loop={"until": "ALL_TESTS_PASS", "retry_interval": "1h"}, checks=("test -f made",))
    loop_ground.steps("echo not yet", "echo ALL_TESTS_PASS", "touch made; echo so: ALL_TESTS_PASS.; echo bye")
    result = await loop_ground.run(retry_interval=0)
    assert (result.result_type, result.summary) == (R.TASK_COMPLETE, "it said ALL_TESTS_PASS")
    assert await loop_ground.ends() == ["exit", "check", "until"]
    assert "print ALL_TESTS_PASS when all is done" in loop_ground.prompt(1)


async def test_a_usage_limit_is_a_wait_until_its_reset(timed_ground: LoopGround) -> None:
    resets = timed_ground.clock.wall() + timedelta(hours=3)
    await timed_ground.add()
    timed_ground.steps("exit 0")
    task = await timed_ground.loops.put_in_loop(await timed_ground.task(), "fixer")
    rules = timed_ground.loops.rules(task)
    claimed = await timed_ground.manager.store.run(claim_task, task)
    assert rules is not None
    assert claimed is not None

    async def judge(*_: object) -> Task:
        """As a driver reports it; that Claude Code and Codex do is held by test_drivers_real.py."""
        raise AttemptWaitsError(WaitKind.QUOTA, "usage limit until 15:00", resets)

    rules.judge = judge  # type: ignore[method-assign, assignment]  # of this test
    await timed_ground.orchestrator.work(claimed, rules)
    wait = await timed_ground.wait()
    assert (wait.kind, wait.due_at) == (WaitKind.QUOTA, resets)
    assert await timed_ground.ends() == ["limit"]
    timed_ground.steps("exit 0", "complete")
    async with timed_ground.running() as running:
        timed_ground.advance(3 * 3600 - 1)
        await timed_ground.settled()
        assert timed_ground.starts() == 1
        timed_ground.advance(1)
        assert (await running).result_type is R.TASK_COMPLETE
    assert (await loop_of(timed_ground)).retries == 0


# --- agents that hang --------------------------------------------------------------------------------


async def test_an_agent_that_goes_on_after_its_breakpoint_is_ended_within_the_grace(timed_ground: LoopGround) -> None:
    await timed_ground.add(loop={"grace": 10})
    timed_ground.steps("trap '' TERM; complete; touch $stage/hangs; while true; do sleep 0.05; done")
    async with timed_ground.running() as running:
        await timed_ground.hangs()

        async def signalled() -> bool:
            task = await timed_ground.task()
            events = await timed_ground.manager.store.read(last_events, 100, workspace_id=task.workspace_id)
            return any(isinstance(event, AgentSignalEvent) for event in events)

        await until(signalled)
        (pid,) = timed_ground.pids()
        timed_ground.advance(9)
        await timed_ground.settled()
        assert lives(pid), "it has its grace"
        timed_ground.advance(1)
        while not running.done():
            timed_ground.advance(1)  # the ladder: asked, terminated, killed
            await asyncio.wait((running,), timeout=0.02)
        assert (await running).result_type is R.TASK_COMPLETE
    assert not lives(pid)


async def test_an_agent_that_hangs_is_ended_by_its_time(loop_ground: LoopGround) -> None:
    await loop_ground.add(timeout="1s")
    loop_ground.steps("hang", "complete")
    assert (await loop_ground.run()).iterations == 2
    assert await loop_ground.ends() == ["error", "breakpoint"]
    assert "start 1 failed" in loop_ground.prompt(2)
    assert loop_ground.nothing_lived_on()


# --- programs that end -------------------------------------------------------------------------------


async def test_waits_survive_a_restart(timed_ground: LoopGround) -> None:
    await timed_ground.add()
    timed_ground.steps("blocked 'human: Which?'", "pr", "complete")
    await timed_ground.run(wait=False, pr_merge_timeout=50)
    before = await timed_ground.wait()
    await timed_ground.reopen()
    assert await timed_ground.wait() == before
    await timed_ground.orchestrator.answer(before.wait_id, "this")
    assert (await timed_ground.run(wait=False)).result_type is R.PR_CREATED
    pull = await timed_ground.wait()
    timed_ground.advance(40)
    await timed_ground.reopen()
    assert await timed_ground.wait() == pull, "its time goes on from when it began"
    async with timed_ground.running() as running:
        await timed_ground.settled()
        timed_ground.advance(10)
        assert (await running).result_type is R.PR_CREATED


async def test_a_loop_goes_on_with_the_agent_that_it_left(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps("touch $stage/hangs; while [ ! -e $stage/go ]; do sleep 0.02; done; complete; hang")
    async with loop_ground.running():
        await loop_ground.hangs()
        await loop_ground.close(keep=True)
    (loop_ground.stage / "T001" / "go").touch()
    (pid,) = loop_ground.pids()
    assert lives(pid), "an agent lives without its manager"
    await loop_ground.open()
    assert (await loop_ground.run()).result_type is R.TASK_COMPLETE
    assert (loop_ground.starts(), await loop_ground.ends()) == (1, ["breakpoint"])
    assert not lives(pid)


async def test_an_orchestrator_that_recovers_leaves_loops_to_their_loop(loop_ground: LoopGround) -> None:
    await loop_ground.add(agent="fixer")
    loop_ground.steps("hang", "complete")
    async with loop_ground.running():
        await loop_ground.hangs()
        await loop_ground.close(keep=True)
    await loop_ground.open()
    await loop_ground.orchestrator.initialize()
    await loop_ground.settled()
    assert loop_ground.orchestrator.tasks.running == {}
    (pid,) = loop_ground.pids()
    task = await loop_ground.task()
    assert task.instance_id is not None
    async with loop_ground.running() as running:
        await until(lambda: "T001" in loop_ground.orchestrator.tasks.running)
        await loop_ground.manager.handle(task.instance_id).stop(reason=DAEMON_STOPPED)
        assert (await running).result_type is R.TASK_COMPLETE
    assert not lives(pid)


async def test_the_queue_of_the_daemon_drives_loops(loop_ground: LoopGround) -> None:
    await loop_ground.add(agent="fixer", checks=("test -f made",))
    await loop_ground.add(agent="fixer", depends_on=("T001",))
    loop_ground.steps("exit 1", "touch made; complete")
    loop_ground.steps("complete", key="T002")
    loop_ground.orchestrator.tasks.settings = TaskSettings(at_once=2)
    queue = TaskQueue(loop_ground.orchestrator, rules=loop_ground.loops.rules, settle=loop_ground.loops.settle)
    await queue.open()

    async def completed(key: str) -> bool:
        return (await loop_ground.task(key)).state is TaskState.COMPLETED

    await until(lambda: completed("T001"))
    assert loop_ground.starts("T002") == 0
    await loop_ground.orchestrator.accept("T001")
    await until(lambda: completed("T002"))
    await queue.close()
    assert await loop_ground.ends() == ["error", "breakpoint"]


async def test_a_check_that_is_ended_with_the_daemon_is_no_failed_check(loop_ground: LoopGround) -> None:
    await loop_ground.add(agent="fixer", checks=(f"touch {loop_ground.stage}/checks; exec tail -f /dev/null",))
    loop_ground.steps("complete")
    async with loop_ground.running() as running:
        await until((loop_ground.stage / "checks").exists)
        live = await loop_ground.manager.get_active_instances()
        (check,) = [one for one in live if str(one.name).endswith("check-1")]
        await loop_ground.manager.handle(check.instance_id).stop(reason=DAEMON_STOPPED)
        await until(lambda: loop_ground.starts() == 2)
        running.cancel()
    assert (await loop_of(loop_ground)).retries == 0


async def test_a_loop_that_is_told_to_stop_ends_its_check_too(loop_ground: LoopGround) -> None:
    await loop_ground.add(checks=(f"touch {loop_ground.stage}/checks; exec tail -f /dev/null",))
    loop_ground.steps("complete")
    loop = loop_ground.loop()
    running = asyncio.ensure_future(loop.run_agent_loop("fixer", "T001"))
    await until((loop_ground.stage / "checks").exists)
    loop.shutdown()
    async with asyncio.timeout(60):
        assert (await running).result_type is R.SHUTDOWN
    assert (await loop_of(loop_ground)).retries == 0


async def test_a_loop_goes_on_after_its_manager_was_closed(loop_ground: LoopGround) -> None:
    await loop_ground.add()
    loop_ground.steps("hang", "complete")
    async with loop_ground.running():
        await loop_ground.hangs()
        await loop_ground.reopen(keep=False)
    assert (await loop_ground.run()).result_type is R.TASK_COMPLETE
    assert (await loop_of(loop_ground)).retries == 0
