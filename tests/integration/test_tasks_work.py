"""Attempts at tasks: what an agent finds, what it hands in, how it fails, how it is stopped, and the proof."""

from __future__ import annotations

import asyncio
import hashlib
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from isolation.ground import until
from tasks_ground import ECHO, T, TaskGround, ground, opened, repository, until_async, working_queue
from workdirs_ground import git

from ostler import (
    AgentState,
    CommandSpec,
    InvalidOperationError,
    PromptBy,
    StoreFullError,
    Task,
    TaskSettings,
    register_file,
)
from ostler.model.task import TaskState
from ostler.store.tasks import claim_task
from ostler.tasks import proof
from ostler.tasks.attempt import AttemptRules
from ostler.tasks.retry import retry_delay
from ostler.testing.clock import ManualClock
from ostler.workdirs.records import Snapshot, Workdir

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio
LONG = "echo begun > begun; exec tail -f /dev/null"


async def begun(ground: TaskGround, task: Task) -> asyncio.Task[Task]:
    """An attempt that is under way: its agent has written the file `begun`."""
    running = asyncio.create_task(ground.tasks.run(task.key))
    await until((ground.place(task) / "begun").exists)
    return running


async def living(ground: TaskGround) -> list[str | None]:
    return [one.name for one in await ground.manager.get_active_instances()]


class ChangedMeanwhile(AttemptRules):
    """Its task is changed by another while the attempt takes the work in, and while it fails."""

    changes = 0

    async def snapshot(self, task: Task, workdir: Workdir) -> Snapshot:
        await self._change(task, 1)
        return await super().snapshot(task, workdir)

    async def failed(self, task: Task, error: str, cause: str = "error") -> Task:
        await self._change(task, 2)
        return await super().failed(task, error, cause)

    async def _change(self, task: Task, limit: int) -> None:
        if self.changes < limit:
            self.changes += 1
            await self.tasks.change(await self.tasks.reload(task), {"tags": (f"change-{self.changes}",)})


@pytest.mark.parametrize(("script", "state"), [("echo done > made", T.COMPLETED), ("exit 3", T.QUEUED)])
async def test_a_task_that_is_changed_while_its_attempt_ends_does_not_stay_running(
    ground: TaskGround, script: str, state: TaskState
) -> None:
    task = await ground.add(script)
    claimed = await ground.manager.store.run(claim_task, task)
    assert claimed is not None
    rules = ChangedMeanwhile(ground.tasks.tasks)
    done = await ground.tasks.work(claimed, rules)
    assert rules.changes > 0
    assert (done.state, done.attempt) == (state, 1)
    assert done.tags == (f"change-{rules.changes}",)


async def test_prune_keeps_the_agents_of_a_task_until_it_is_finished(ground: TaskGround) -> None:
    task = await ground.done("echo done > made")
    assert await ground.manager.prune() == []
    await ground.tasks.accept(task.key)
    assert [row["name"] for row in await ground.manager.prune()] == ["T001-1"]


# --- what an agent finds -----------------------------------------------------------------------------


async def test_an_agent_finds_its_task_its_instance_its_attempt_and_its_workdir(ground: TaskGround) -> None:
    script = 'echo "$OSTLER_TASK $OSTLER_INSTANCE $OSTLER_ATTEMPT $OSTLER_WORKDIR $(pwd)"'
    task = await ground.done(script)
    assert task.summary == f"T001 {task.instance_id} 1 {ground.place(task)} {ground.place(task)}"
    record = await ground.manager.require_instance(task.instance_id or "")
    assert (record.task_id, record.name, record.state) == (task.task_id, "T001-1", AgentState.TERMINATED)


@pytest.mark.parametrize(
    ("words", "by"),
    [
        (("sh", "-c", 'printf %s "$1"', "sh", "{prompt}"), PromptBy.ARGUMENT),
        (("sh", "-c", 'printf %s "$1"', "sh"), PromptBy.ARGUMENT),
        (("cat", "{prompt_file}"), PromptBy.FILE),
        (("sh", "-c", 'cat "$OSTLER_PROMPT_FILE"'), PromptBy.FILE),
        (("cat",), PromptBy.STDIN),
    ],
)
async def test_an_agent_gets_its_prompt_as_argument_as_file_or_on_standard_input(
    ground: TaskGround, words: tuple[str, ...], by: PromptBy
) -> None:
    ground.manager.registry.register(CommandSpec(argv=words, prompt_by=by, env=("PATH",)), name="reader")
    text = "Mend it:\n{braces} $HOME `x` 'quotes' ✓"
    task = await ground.done(text, agent="reader")
    assert task.summary == text
    assert task.changed_files == (), "the file of its prompt is no part of its work"
    assert [path.name for path in ground.place(task).iterdir() if "prompt" in path.name] == []


async def test_a_worktree_begins_with_the_recorded_base_on_a_branch_of_its_own(ground: TaskGround) -> None:
    task = await ground.add("git rev-parse HEAD; git branch --show-current; git status --porcelain")
    base = ground.tip()
    (ground.repository / "a.txt").write_text("not committed\n")
    done = await ground.tasks.run(task.key)
    assert done.summary == f"{base}\nostler/T001"
    assert done.workdir is not None
    assert (done.workdir["base"], done.workdir["target"]) == (base, "main")
    assert git(ground.repository, "branch", "--list", "ostler/*") == "", "the user's branches are the user's"


async def test_outside_of_a_repository_the_workdir_is_a_fresh_directory(ground: TaskGround, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    task = await ground.done("made them", agent=ECHO, near=plain)
    assert task.workdir is not None
    assert (task.workdir["kind"], task.changed_files) == ("directory", ("said.txt",))
    await ground.tasks.send_back(task.key, "once more")
    again = await ground.tasks.run(task.key)
    assert (ground.place(task) / "said.txt").read_text().count("made them") == 1
    assert again.attempt == 2
    assert again.comments == ("once more",)
    entries = await ground.tasks.tasks.workdirs.list_entries()
    assert [entry.key for entry in entries] == ["T001"], "what the first attempt made is in the vault"
    accepted = await ground.tasks.accept(task.key)
    assert (accepted.state, accepted.accepted) == (T.ACCEPTED, None)


# --- what it hands in --------------------------------------------------------------------------------


async def test_claimed_and_actual_files_are_both_kept(ground: TaskGround) -> None:
    async def boaster(request: Any, context: Any) -> Any:
        (Path(context.workdir) / "a.txt").write_text("changed\n")
        return {"summary": f"did {request['prompt']}", "changed_files": ["b.txt"], "generated_code": "x = 1"}

    ground.manager.registry.register(boaster, name="boaster")
    task = await ground.done("it", agent="boaster")
    assert (task.summary, task.generated_code) == ("did it", "x = 1")
    assert (task.claimed_files, task.changed_files) == (("b.txt",), ("a.txt",))
    assert ground.tasks.active_agents[task.key].path == str(ground.place(task))


async def test_an_agent_that_answers_text_hands_in_text(ground: TaskGround) -> None:
    async def poet(request: Any, _: Any) -> str:
        return f"{request['prompt']}\nViolets are blue."

    ground.manager.registry.register(poet, name="poet")
    task = await ground.done("Roses are red.", agent="poet")
    assert (task.summary, task.generated_code) == ("Roses are red.\nViolets are blue.",) * 2
    assert task.changed_files == ()


# --- how it fails ------------------------------------------------------------------------------------


async def test_one_that_fails_goes_back_with_what_went_wrong_and_is_parked_in_the_end(ground: TaskGround) -> None:
    """It used to be rejected for good, and neither `requeue` nor `send-back` could bring it back."""
    task = await ground.add("echo x >> tries; echo sorry >&2; exit 3", max_failures=2)
    first = await ground.tasks.run(task.key)
    assert (first.state, first.failures) == (T.QUEUED, 1)
    assert "sh failed with exit code 3" in (first.error or "")
    assert "sorry" in first.comments[0]
    (ground.place(task) / "note").write_text("kept\n")
    last = await ground.tasks.run(task.key)
    assert (last.state, last.attempt, last.failures) == (T.QUEUED, 2, 0)
    assert "exit code 3" in (last.error or "")
    assert (ground.place(task) / "tries").read_text() == "x\nx\n", "a worktree is worked on where it was left"
    (wait,) = await ground.tasks.waits(task.key)
    assert (wait.kind, wait.due_at) == ("human", None)
    assert (wait.reason or "").startswith("failed 2 times, at last: sh failed with exit code 3")
    assert [entry["outcome"] for entry in (wait.detail or {})["attempts"]] == ["exit_code"] * 2
    assert "attempts: 2; failures that count: 2 of 2" in (await ground.tasks.why(task.key)).evidence
    with pytest.raises(InvalidOperationError, match="T001 waits: failed 2 times"):
        await ground.tasks.run(task.key)
    await ground.tasks.requeue(task.key)
    again = await ground.tasks.run(task.key)
    assert (again.attempt, again.failures) == (3, 1), "who releases it gives it all its failures again"
    rejected = await ground.tasks.reject(task.key, reason="no use")
    assert rejected.state is T.REJECTED, "only a person rejects"
    with pytest.raises(InvalidOperationError, match="rejected, which is final; add it as a new task"):
        await ground.tasks.requeue(task.key)


async def test_a_retry_waits_for_its_backoff_which_doubles(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground, working_queue(ground):
        task = await ground.add("exit 3", max_failures=9, backoff="40s")
        for failures, delay in ((1, 40), (2, 80), (3, 160)):

            async def has_failed(failures: int = failures) -> bool:
                return (await ground.get(task)).failures == failures

            await until_async(has_failed)
            (wait,) = await ground.tasks.waits(task.key)
            assert wait.due_at is not None
            seconds = (wait.due_at - wait.created_at).total_seconds()
            assert delay * 0.75 <= seconds <= delay * 1.25, "jitter goes a quarter to either side"
            assert (wait.reason or "").startswith(f"attempt {failures} failed ({failures} of 9): sh failed with exit")
            clock.advance(seconds - 1)
            assert (await ground.get(task)).state is T.QUEUED

            async def is_begun(attempt: int = failures + 1) -> bool:
                clock.advance(1)
                return (await ground.get(task)).attempt == attempt

            await until_async(is_begun)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 30), (2, 60), (5, 480), (6, 600), (999, 600)])
def test_the_backoff_of_a_task_doubles_up_to_ten_minutes(failures: int, seconds: float) -> None:
    class Middle(random.Random):
        def random(self) -> float:
            return 0.5

    assert retry_delay(timedelta(seconds=30), failures, Middle()) == timedelta(seconds=seconds)


async def test_one_that_is_killed_says_by_which_signal(ground: TaskGround) -> None:
    task = await ground.tasks.run((await ground.add("echo half > a.txt; kill -9 $$")).key)
    assert (task.state, task.failures) == (T.QUEUED, 1)
    assert "SIGKILL" in (task.error or "")
    assert (ground.place(task) / "a.txt").read_text() == "half\n"


async def test_one_that_cannot_be_started_fails_with_the_reason(ground: TaskGround) -> None:
    ground.manager.registry.register(CommandSpec(argv=("/no/such/program",)), name="missing")
    task = await ground.tasks.run((await ground.add("x", agent="missing", max_failures=1)).key)
    assert [wait.kind for wait in await ground.tasks.waits(task.key)] == ["human"]
    assert "/no/such/program" in (task.error or "")


async def test_one_that_works_too_long_is_ended(ground: TaskGround) -> None:
    task = await ground.tasks.run((await ground.add(LONG, timeout="1s")).key)
    assert (task.state, task.failures) == (T.QUEUED, 1)
    assert "longer than its time" in (task.error or "")
    assert await living(ground) == []


async def test_a_command_may_say_that_it_is_blocked_or_has_to_come_again(ground: TaskGround) -> None:
    codes: Any = {10: "blocked", 75: "retry"}
    spec = CommandSpec(argv=("sh", "-c", "{prompt}"), exit_codes=codes, env=("PATH",))
    ground.manager.registry.register(spec, name="careful")
    task = await ground.tasks.run((await ground.add("echo which database?; exit 10", agent="careful")).key)
    assert (task.state, task.failures) == (T.QUEUED, 0)
    (wait,) = await ground.tasks.waits(task.key)
    assert (wait.kind, wait.reason) == ("human", "its agent cannot go on: which database?")
    await ground.tasks.answer(wait.wait_id)
    again = await ground.tasks.run((await ground.add("exit 75", agent="careful")).key)
    assert (again.state, again.failures) == (T.QUEUED, 1)
    assert "run again: exit code 75" in (again.error or "")


# --- how it is stopped -------------------------------------------------------------------------------


async def test_a_task_is_cancelled_in_mid_work_and_nothing_of_it_lives_or_is_lost(ground: TaskGround) -> None:
    task = await ground.add(f"setsid tail -f /dev/null & {LONG}")
    running = await begun(ground, task)
    done = await ground.tasks.cancel(task.key)
    assert (done.state, done.error) == (T.REJECTED, "cancelled")
    assert (await running).key == task.key, "who waited for the attempt is told, not cancelled"
    assert await living(ground) == []
    assert (ground.place(task) / "begun").read_text() == "begun\n"


async def test_a_running_task_is_requeued_and_done_again(ground: TaskGround) -> None:
    task = await ground.add(f"test -e again || {{ touch again; {LONG}; }}")
    running = await begun(ground, task)
    requeued = await ground.tasks.requeue(task.key)
    assert (requeued.state, requeued.failures) == (T.QUEUED, 0)
    await running
    assert await living(ground) == []
    assert (await ground.tasks.run(task.key)).attempt == 2
    with pytest.raises(Exception, match="ostler task send-back T001"):
        await ground.tasks.requeue(task.key)


@pytest.mark.parametrize("verb", ["cancel", "requeue", "hold"])
async def test_a_verb_that_cannot_be_written_leaves_the_agent_at_work(
    ground: TaskGround, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk its agent used to be ended first, and the task stayed running with no agent until a restart."""
    task = await ground.add("echo begun > begun; while ! test -e go; do sleep 0.01; done")
    running = await begun(ground, task)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ground.manager.store, "run", refuse)
        with pytest.raises(StoreFullError):
            await getattr(ground.tasks, verb)(task.key)
    assert await living(ground) == ["T001-1"]
    (ground.place(task) / "go").touch()
    assert (await running).state is T.COMPLETED


async def test_the_agent_of_an_attempt_that_is_over_is_not_restarted(ground: TaskGround) -> None:
    """It used to work in the workdir once more, and what it answered was read by nothing."""
    task = await ground.tasks.run((await ground.add("echo x >> tries; exit 3")).key)
    with pytest.raises(InvalidOperationError, match="T001-1 worked on T001, which is queued; `ostler why T001`"):
        await ground.manager.restart(task.instance_id or "")
    done = await ground.done("true")
    with pytest.raises(InvalidOperationError, match="which is completed; `ostler task send-back T002`"):
        await ground.manager.restart(done.instance_id or "")
    assert (ground.place(task) / "tries").read_text() == "x\n"


async def test_a_task_whose_agent_a_person_stops_is_held_back(ground: TaskGround) -> None:
    task = await ground.add(LONG)
    running = await begun(ground, task)
    agent = (await ground.get(task)).instance_id
    assert agent is not None
    await ground.manager.handle(agent).stop(reason="enough of it")
    done = await running
    assert (done.state, done.is_held, done.failures) == (T.QUEUED, True, 0)
    assert done.error == "its agent was stopped: enough of it"


async def test_an_agent_that_is_frozen_goes_on_where_it_was(ground: TaskGround) -> None:
    script = "i=0; while ! test -e stop; do i=$((i+1)); echo $i > begun; sleep 0.01; done"
    task = await ground.add(script)
    running = await begun(ground, task)
    agent = ground.manager.handle((await ground.get(task)).instance_id or "")
    await agent.pause("freeze")
    stood = (ground.place(task) / "begun").read_text()
    (ground.place(task) / "stop").touch()
    assert not running.done()
    assert (await ground.get(task)).state is T.RUNNING
    assert (ground.place(task) / "begun").read_text() == stood
    await agent.resume()
    assert (await running).state is T.COMPLETED


# --- sent back ---------------------------------------------------------------------------------------


async def test_comments_reach_the_next_attempt_as_quotations(ground: TaskGround) -> None:
    task = await ground.done("Write a song.", agent=ECHO)
    await ground.tasks.send_back(task.key, "Too short.\nAnd no rhyme.")
    queued = await ground.get(task)
    assert (queued.state, queued.comments) == (T.QUEUED, ("Too short.\nAnd no rhyme.",))
    await ground.tasks.run(task.key)
    await ground.tasks.send_back(task.key, "Now too long.")
    await ground.tasks.run(task.key)
    said = (ground.place(task) / "said.txt").read_text()
    assert said.count("Write a song.") == 3
    assert said.endswith("newest last):\n\n> Too short.\n> And no rhyme.\n\n> Now too long.")
    audit = await ground.audited("task.send_back")
    assert [entry.detail for entry in audit] == ["Too short.\nAnd no rhyme.", "Now too long."]


# --- proof -------------------------------------------------------------------------------------------


async def test_checks_run_on_a_clean_checkout_of_what_was_submitted(ground: TaskGround) -> None:
    (ground.repository / ".gitignore").write_text("*.log\n")
    ground.commit()
    checks = ["test ! -e noise.log && grep -q new a.txt && pwd", "echo second; git status --porcelain"]
    task = await ground.done("echo new > a.txt; echo x > noise.log", checks=checks)
    first, second = task.receipts
    assert [first.command, second.command] == checks
    assert (first.exit_code, second.exit_code, second.output) == (0, 0, "second\n")
    assert str(ground.place(task)) not in first.output
    digest = hashlib.sha256(second.output.encode()).hexdigest()
    assert second.output_digest == digest
    entries = await ground.audited("task.check")
    assert [entry.outcome for entry in entries] == ["ok", "ok"]
    assert entries[1].detail == f"{checks[1]}: exit code 0; tree {second.tree}; output sha256 {digest}"
    assert list((ground.home / "proof").iterdir()) == []
    await ground.tasks.accept(task.key)
    assert first.tree == ground.git("rev-parse", "main^{tree}").strip(), "what was proven is what was merged"


async def test_a_failed_check_sends_the_task_back_with_the_output_until_it_is_parked(ground: TaskGround) -> None:
    task = await ground.add("Write it.", agent=ECHO, checks=["true", "echo no rhyme here; exit 4", "touch never"])
    for attempt in (1, 2):
        back = await ground.tasks.run(task.key)
        assert (back.state, back.failures, len(back.receipts)) == (T.QUEUED, attempt, 2)
        assert "`echo no rhyme here; exit 4` failed with exit code 4:\nno rhyme here" in (back.error or "")
    last = await ground.tasks.run(task.key)
    assert [wait.kind for wait in await ground.tasks.waits(last.key)] == ["human"]
    said = (ground.place(task) / "said.txt").read_text()
    assert said.count("> no rhyme here") == 3, "told once in the second prompt, twice in the third"
    assert [entry.outcome for entry in await ground.audited("task.check")] == ["ok", "failed"] * 3


async def test_a_check_is_bounded_in_time_and_in_what_is_kept_of_its_output(repository: Path, tmp_path: Path) -> None:
    settings = TaskSettings(check_timeout=timedelta(seconds=1))
    async with opened(repository, tmp_path / "home", settings=settings) as ground:
        slow = await ground.tasks.run((await ground.add("true", checks=["setsid tail -f /dev/null & sleep 60"])).key)
        assert (slow.state, slow.receipts[0].exit_code) == (T.QUEUED, None)
        assert "did not end in its time" in (slow.error or "")
        assert await living(ground) == []
        script = "head -c 5000000 /dev/zero; echo the end"
        loud = await ground.done(script, checks=[script])
        assert loud.receipts[0].output.endswith("the end\n")
        assert len(loud.receipts[0].output) < 10_000


async def test_a_check_of_a_cancelled_task_is_ended_too(ground: TaskGround, tmp_path: Path) -> None:
    task = await ground.add("true", checks=[f"touch {tmp_path}/checking; exec tail -f /dev/null"])
    running = asyncio.create_task(ground.tasks.run(task.key))
    await until((tmp_path / "checking").exists)
    await ground.tasks.cancel(task.key)
    await running
    assert await living(ground) == []
    assert list((ground.home / "proof").iterdir()) == []


async def test_checks_of_the_definition_hold_where_the_task_has_none(ground: TaskGround) -> None:
    folder = ground.home / "agents"
    folder.mkdir()
    text = "---\nlifecycle:\n  driver: {command: [sh, -c, 'echo x > a.txt']}\n  checks: [grep -q y a.txt]\n---\n"
    (folder / "checked.md").write_text(text)
    register_file(ground.manager.registry, folder / "checked.md")
    task = await ground.tasks.run((await ground.add("x", agent="checked")).key)
    assert (task.state, [one.command for one in task.receipts]) == (T.QUEUED, ["grep -q y a.txt"])


async def test_a_check_that_the_agent_rewrites_is_not_trusted_to_say_so(ground: TaskGround) -> None:
    """A check runs with what was submitted, so that its words alone prove nothing: the receipt has the exit code."""
    script = "printf '#!/bin/sh\\necho ok\\nexit 1\\n' > check.sh; chmod +x check.sh"
    task = await ground.tasks.run((await ground.add(script, checks=["./check.sh"])).key)
    assert (task.state, task.receipts[0].exit_code, task.receipts[0].output) == (T.QUEUED, 1, "ok\n")


def test_a_check_is_passed_only_the_variables_that_it_needs() -> None:
    assert set(proof._PASSED_ON) <= {"PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV"}  # noqa: SLF001 - the list itself
