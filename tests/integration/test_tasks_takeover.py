"""A person goes on in the session of a coding agent: meanwhile nothing else works on it, and then it is proven."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from isolation.ground import until
from tasks_ground import T, TaskGround, opened, repository, until_async, working_queue
from workdirs_ground import git

from ostler import InvalidOperationError, MergeConflictError, Task

__all__ = ["repository"]

pytestmark = pytest.mark.anyio
#: As Claude Code speaks: it names its session first, then works until it may end.
_CLAUDE = """#!/bin/sh
echo "$@" >> {stage}/calls
cat > /dev/null
echo '{{"type":"system","subtype":"init","session_id":"session-1"}}'
touch {stage}/begun
while ! test -e {stage}/go; do sleep 0.01; done
test -e {stage}/idle || echo by the agent > made.txt
echo '{{"type":"result","subtype":"success","is_error":false,"result":"ok","session_id":"session-1","num_turns":1}}'
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stage"
    folder.mkdir()
    program = folder / "claude"
    program.write_text(_CLAUDE.format(stage=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
    return folder


@pytest.fixture
async def ground(repository: Path, tmp_path: Path, stage: Path) -> AsyncIterator[TaskGround]:
    assert stage.is_dir()
    async with opened(repository, tmp_path / "home") as ground:
        yield ground


async def running(ground: TaskGround, stage: Path) -> Task:
    """A task whose agent works, in its session."""
    task = await ground.add("do it", agent="claude")
    await until((stage / "begun").exists)

    async def has_named_its_session() -> bool:
        instance = (await ground.get(task)).instance_id
        return instance is not None and bool([line async for line in ground.manager.log(instance, raw=True)])

    await until_async(has_named_its_session)
    return await ground.get(task)


async def test_completed_work_is_opened_in_its_session_and_proven_anew(ground: TaskGround, stage: Path) -> None:
    (stage / "go").touch()
    task = await ground.done("do it", agent="claude", checks=["test -e made.txt"])
    session = await ground.tasks.take_over(task.key)
    assert session.argv == ("claude", "--resume", "session-1")
    assert session.path == str(ground.place(task))
    assert session.environment["OSTLER_PORT"] == str(task.port)
    (ground.place(task) / "by-hand.txt").write_text("mine\n")
    given = await ground.tasks.give_back(task.key)
    assert given.state is T.COMPLETED
    assert set(given.changed_files or ()) == {"made.txt", "by-hand.txt"}
    assert [receipt.passed for receipt in given.receipts] == [True]
    assert len((stage / "calls").read_text().splitlines()) == 1, "no agent was started for it"


async def test_nothing_works_on_it_meanwhile_and_every_list_says_so(ground: TaskGround, stage: Path) -> None:
    async with working_queue(ground):
        task = await running(ground, stage)
        await ground.tasks.take_over(task.key)
        taken = await ground.get(task)
        assert taken.state is T.QUEUED
        assert not await ground.manager.get_active_instances()
        assert (await ground.tasks.why(task.key)).verdict == "it is taken over by hand"
        assert "taken over by hand" in await ground.tasks.next_step(taken)
        other = await ground.add("true")
        assert (await ground.until_state(other, T.COMPLETED)).key == other.key, "the queue has looked"
        assert (await ground.get(task)).attempt == taken.attempt
        with pytest.raises(InvalidOperationError, match="only a completed task"):
            await ground.tasks.accept(task.key)


async def test_left_without_changes_its_agent_goes_on_in_the_session(ground: TaskGround, stage: Path) -> None:
    async with working_queue(ground):
        task = await running(ground, stage)
        await ground.tasks.take_over(task.key)
        (stage / "go").touch()
        await ground.tasks.give_back(task.key)
        done = await ground.until_state(task, T.COMPLETED)
        assert done.attempt == 2
        assert "--resume session-1" in (stage / "calls").read_text().splitlines()[-1]


async def test_a_check_that_refuses_what_was_done_by_hand_says_so(ground: TaskGround, stage: Path) -> None:
    (stage / "go").touch()
    task = await ground.done("do it", agent="claude", checks=["! test -e wrong.txt"], max_failures=1)
    await ground.tasks.take_over(task.key)
    (ground.place(task) / "wrong.txt").touch()
    given = await ground.tasks.give_back(task.key)
    assert given.state is T.QUEUED
    assert "wrong.txt" in str(given.error)


async def test_what_another_program_finds_is_still_taken_over(repository: Path, tmp_path: Path, stage: Path) -> None:
    (stage / "go").touch()
    async with opened(repository, tmp_path / "home") as ground:
        task = await ground.done("do it", agent="claude")
        await ground.tasks.take_over(task.key)
    async with opened(repository, tmp_path / "home") as later, working_queue(later):
        again = await later.tasks.take_over(task.key)
        assert again.session == "session-1"
        assert (await later.tasks.give_back(task.key)).state is T.COMPLETED


async def test_a_requeue_gives_it_back_to_its_agent(ground: TaskGround, stage: Path) -> None:
    (stage / "go").touch()
    task = await ground.done("do it", agent="claude")
    await ground.tasks.take_over(task.key)
    await ground.tasks.requeue(task.key)
    assert (await ground.tasks.run(task.key)).state is T.COMPLETED
    with pytest.raises(InvalidOperationError, match="is not taken over"):
        await ground.tasks.give_back(task.key)


async def test_an_agent_without_a_session_is_named_with_another_way_in(ground: TaskGround) -> None:
    task = await ground.done("true")
    with pytest.raises(InvalidOperationError, match="shell, which works on T001, keeps no session; `ostler shell"):
        await ground.tasks.take_over(task.key)
    waiting = await ground.add("true")
    with pytest.raises(InvalidOperationError, match="has no worktree"):
        await ground.tasks.take_over(waiting.key)
    assert (await ground.get(task)).state is T.COMPLETED


async def test_given_back_to_its_agent_it_is_not_handed_in(ground: TaskGround, stage: Path) -> None:
    (stage / "go").touch()
    task = await ground.done("do it", agent="claude")
    await ground.tasks.take_over(task.key)
    (ground.place(task) / "half.txt").touch()
    assert (await ground.tasks.give_back(task.key, to_agent=True)).state is T.QUEUED


# --- handed in: changed by hand after its agent had ended -------------------------------------------------


async def test_what_was_changed_by_hand_is_checked_and_reviewed_with_the_rest(ground: TaskGround) -> None:
    """It used to be left out of the diff and of the merge, without a word."""
    task = await ground.done("echo by the agent > made.txt", checks=["test -e made.txt"])
    (ground.place(task) / "by-hand.txt").write_text("mine\n")
    handed_in = await ground.tasks.hand_in(task.key)
    assert (handed_in.state, handed_in.attempt) == (T.COMPLETED, 2)
    assert set(handed_in.changed_files or ()) == {"made.txt", "by-hand.txt"}
    assert [receipt.passed for receipt in handed_in.receipts] == [True]
    assert "+mine" in await ground.tasks.diff(task.key)
    await ground.tasks.accept(task.key)
    assert ground.shown("by-hand.txt") == "mine\n"
    assert [entry.actor for entry in await ground.audited("task.hand_in")] == [ground.manager.actor.name]


async def test_a_commit_by_hand_is_handed_in_and_nothing_new_is_left_as_it_is(ground: TaskGround) -> None:
    task = await ground.done("echo by the agent > made.txt")
    assert await ground.tasks.hand_in(task.key) == task, "nothing has changed"
    git(ground.place(task), "add", "-A")
    git(ground.place(task), "commit", "-q", "-m", "mine")
    (ground.place(task) / "made.txt").write_text("better\n")
    git(ground.place(task), "commit", "-q", "-a", "-m", "mine too")
    handed_in = await ground.tasks.hand_in(task.key)
    assert await ground.tasks.hand_in(task.key) == handed_in
    await ground.tasks.accept(task.key)
    assert ground.shown("made.txt") == "better\n"


async def test_a_check_that_refuses_what_was_handed_in_says_so(ground: TaskGround) -> None:
    task = await ground.done("touch made.txt", checks=["! test -e wrong.txt"])
    (ground.place(task) / "wrong.txt").touch()
    handed_in = await ground.tasks.hand_in(task.key)
    assert handed_in.state is T.QUEUED
    assert "the check `! test -e wrong.txt` failed" in str(handed_in.error)


async def test_a_conflict_is_merged_by_hand_and_handed_in(ground: TaskGround) -> None:
    task = await ground.done("sed -i s/two/ZWEI/ a.txt")
    ground.commit(a_txt="one\nzwei\nthree\n")
    with pytest.raises(MergeConflictError, match="run `git merge main` in its worktree"):
        await ground.tasks.accept(task.key)
    place = ground.place(task)
    git(place, "commit", "-q", "-a", "-m", "the agent's")
    git(place, "merge", "-q", "--strategy-option=ours", "main")
    assert (await ground.tasks.hand_in(task.key)).state is T.COMPLETED
    await ground.tasks.accept(task.key)
    assert ground.shown("a.txt") == "one\nZWEI\nthree\n"


async def test_work_that_no_agent_of_ours_did_is_handed_in_again(ground: TaskGround) -> None:
    task = await ground.tasks.submit("by hand", near=ground.repository)
    record = await ground.tasks.get_lifecycle(task.key)
    assert record is not None
    record.state = T.RUNNING
    await ground.tasks.update_lifecycle(record)
    await ground.tasks.submit_result(task.key, "I did it")
    (ground.place(task) / "later.txt").touch()
    handed_in = await ground.tasks.hand_in(task.key)
    assert (handed_in.state, handed_in.changed_files) == (T.COMPLETED, ("later.txt",))


async def test_only_completed_work_is_handed_in(ground: TaskGround, stage: Path) -> None:
    waiting = await ground.add("true")
    with pytest.raises(InvalidOperationError, match="T001 is queued; only a completed task is handed in"):
        await ground.tasks.hand_in(waiting.key)
    async with working_queue(ground):
        task = await running(ground, stage)
        with pytest.raises(InvalidOperationError, match="is running; what is in its worktree is taken in"):
            await ground.tasks.hand_in(task.key)
        await ground.tasks.take_over(task.key)
        with pytest.raises(InvalidOperationError, match="is taken over by hand"):
            await ground.tasks.hand_in(task.key)
