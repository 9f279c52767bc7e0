"""Review: diff, accept whole or by file, reject, undo, retire and bring back; nothing of the user's is overwritten."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from isolation.ground import until
from tasks_ground import T, TaskGround, ground, opened, repository, until_async
from workdirs_ground import git, plant, tree_of

from ostler import (
    CheckoutBlockedError,
    InvalidOperationError,
    MergeConflictError,
    Task,
    TaskNotFoundError,
    TaskSettings,
    ValidationError,
)
from ostler.tasks import retire
from ostler.testing.clock import ManualClock

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio
EDIT = "sed -i 's/^one$/ONE/' a.txt; echo new > made.txt"


# --- diff --------------------------------------------------------------------------------------------


async def test_the_diff_is_against_where_the_work_began(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    ground.commit(b_txt="moved\n")
    text = await ground.tasks.diff(task.key)
    assert "-one\n+ONE\n" in text
    assert "b.txt" not in text, "what others did meanwhile is no part of it"
    assert "a.txt" not in await ground.tasks.diff(task.key, paths=["made.txt"])
    assert "2 files changed" in await ground.tasks.diff(task.key, stat=True)
    state = await ground.tasks.merge_state(task.key)
    assert (state["target"], state["commits"], state["conflicts"]) == ("main", 1, [])
    with pytest.raises(TaskNotFoundError, match="T002 has no workdir yet"):
        await ground.tasks.diff((await ground.add("true")).key)


# --- accept ------------------------------------------------------------------------------------------


async def test_accepted_work_is_one_commit_and_a_clean_checkout_follows(ground: TaskGround) -> None:
    before = ground.tip()
    task = await ground.done(
        f"{EDIT}; git add -A; git -c user.name=x -c user.email=x@x commit -qm mine; echo 2 > b.txt"
    )
    done = await ground.tasks.accept(task.key)
    assert done.state is T.ACCEPTED
    assert done.accepted is not None
    assert (done.accepted["before"], done.accepted["commit"], done.accepted["followed"]) == (before, ground.tip(), True)
    assert ground.git("rev-list", "--count", f"{before}..main").strip() == "1"
    assert ground.git("status", "--porcelain") == ""
    assert (ground.repository / "made.txt").read_text() == "new\n"
    assert "Ostler-Task: T001" in ground.git("log", "-1", "--format=%B")
    assert [entry.subject for entry in await ground.audited("task.accept")] == ["task:T001"]


async def test_accepting_twice_merges_once(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    first, second = await asyncio.gather(
        ground.tasks.accept(task.key), ground.tasks.accept(task.key), return_exceptions=True
    )
    assert any(isinstance(one, Task) for one in (first, second))
    tip = ground.tip()
    third = await ground.tasks.accept(task.key)
    assert third.state is T.ACCEPTED
    assert ground.tip() == tip
    assert ground.git("rev-list", "--count", "main").strip() == "2"


async def test_some_files_are_accepted_and_the_rest_can_be_accepted_later(ground: TaskGround) -> None:
    task = await ground.done(f"{EDIT}; echo 3 > sub/c.txt")
    before = ground.tip()
    with pytest.raises(InvalidOperationError, match=r"does not change b\.txt"):
        await ground.tasks.accept(task.key, paths=["b.txt"])
    part = await ground.tasks.accept(task.key, paths=["made.txt", "sub"])
    assert part.state is T.COMPLETED
    assert part.accepted is not None
    assert (part.accepted["files"], part.accepted["left"]) == (3, 1)
    assert (ground.shown("a.txt"), ground.shown("made.txt"), ground.shown("sub/c.txt")) == (
        "one\ntwo\nthree\n",
        "new\n",
        "3\n",
    )
    assert (ground.place(task) / "a.txt").read_text() == "ONE\ntwo\nthree\n"
    whole = await ground.tasks.accept(task.key)
    assert whole.state is T.ACCEPTED
    assert ground.shown("a.txt") == "ONE\ntwo\nthree\n"
    undone = await ground.tasks.undo(task.key)
    assert (undone.state, undone.accepted, ground.tip()) == (T.COMPLETED, None, before)
    assert ground.git("status", "--porcelain") == ""


async def test_a_partial_accept_can_be_undone(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    before = ground.tip()
    await ground.tasks.accept(task.key, paths=["made.txt"])
    undone = await ground.tasks.undo(task.key)
    assert (undone.state, undone.accepted, ground.tip()) == (T.COMPLETED, None, before)


async def test_the_checks_run_on_what_a_partial_accept_merges(ground: TaskGround) -> None:
    task = await ground.done(EDIT, checks=["test -e made.txt"])
    before = ground.tip()
    with pytest.raises(InvalidOperationError, match=r"with these files alone the check `test -e made\.txt`"):
        await ground.tasks.accept(task.key, paths=["a.txt"])
    assert ground.tip() == before
    assert (await ground.tasks.accept(task.key, paths=["made.txt"])).accepted is not None
    assert ground.shown("made.txt") == "new\n"
    assert not any((ground.home / "proof").iterdir())


async def test_what_a_check_leaves_and_cannot_be_removed_says_nothing_about_the_work(
    ground: TaskGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def refuse(path: Any, *more: Any, **options: Any) -> None:
        if path == b"stays":
            raise PermissionError(1, "Operation not permitted", path)
        real(path, *more, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    task = await ground.done(EDIT, checks=["touch stays"])
    assert [receipt.exit_code for receipt in task.receipts] == [0]
    (ground.place(task) / "stays").write_text("s")
    retired = await ground.tasks.retire(task.key)
    assert (retired.workdir, retired.vault is not None) == (None, True)
    assert retired.vault is not None
    assert "stays in" in retired.vault["not_removed"]


async def test_the_commit_is_the_users_and_names_agent_and_task(ground: TaskGround) -> None:
    ground.git("config", "user.name", "Grace Hopper")
    ground.git("config", "user.email", "grace@example.org")
    task = await ground.done(EDIT)
    await ground.tasks.accept(task.key, message="Shout the first line")
    author, *text = ground.git("log", "-1", "--format=%an <%ae>%n%B").strip().splitlines()
    assert author == "Grace Hopper <grace@example.org>"
    assert text == ["Shout the first line", "", f"Ostler-Task: {task.key}", f"Ostler-Agent: {task.agent}"]


async def test_undo_names_the_files_that_it_could_not_take_out(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    await ground.tasks.accept(task.key)
    (ground.repository / "a.txt").write_text("mine\n")
    undone, (result,) = await ground.tasks.take_back(task.key)
    assert undone.state is T.COMPLETED
    assert not result.followed
    assert "a.txt cannot follow" in str(result.why_not_followed)


async def test_a_base_that_moved_is_merged_where_that_is_clean(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    theirs = ground.commit(a_txt="one\ntwo\nTHREE\n")
    done = await ground.tasks.accept(task.key)
    assert done.accepted is not None
    assert done.accepted["before"] == theirs
    assert ground.shown("a.txt") == "ONE\ntwo\nTHREE\n"


async def test_a_conflict_names_the_paths_and_changes_nothing(ground: TaskGround) -> None:
    task = await ground.done(f"{EDIT}; rm b.txt")
    tip = ground.commit(a_txt="eins\ntwo\nthree\n", b_txt="other\n")
    before = tree_of(ground.repository)
    with pytest.raises(MergeConflictError, match=r"conflicts in a\.txt, b\.txt") as caught:
        await ground.tasks.accept(task.key)
    assert sorted(caught.value.paths) == ["a.txt", "b.txt"]
    assert (await ground.get(task)).state is T.COMPLETED
    assert ground.tip() == tip
    assert tree_of(ground.repository) == before
    assert (await ground.tasks.merge_state(task.key))["conflicts"] == ["a.txt", "b.txt"]
    await ground.tasks.accept(task.key, paths=["made.txt"])
    assert ground.shown("made.txt") == "new\n", "what does not conflict can be had"


async def test_a_conflict_that_its_agent_resolves_is_accepted(ground: TaskGround) -> None:
    me = "-c user.name=x -c user.email=x@x"
    task = await ground.done(
        "if git merge-base --is-ancestor main HEAD; then sed -i 's/two/ZWEI/;s/one/ONE/' a.txt;"
        f" else git {me} commit -qam mine; git {me} merge -q main || true;"
        f" printf 'eins\\nZWEI\\nthree\\n' > a.txt; git {me} commit -qam merged; fi"
    )
    ground.commit(a_txt="eins\ntwo\nthree\n")
    with pytest.raises(MergeConflictError):
        await ground.tasks.accept(task.key)
    sent = await ground.tasks.send_back(task.key)
    assert "conflicts with it in a.txt" in sent.comments[-1], "the conflict is comment enough"
    assert (await ground.tasks.run(task.key)).state is T.COMPLETED
    assert (await ground.tasks.accept(task.key)).state is T.ACCEPTED
    assert ground.shown("a.txt") == "eins\nZWEI\nthree\n"


async def test_a_conflict_that_its_agent_resolves_without_committing_the_merge_is_accepted(ground: TaskGround) -> None:
    """It used to be told the same again, for its files without the merge conflict as before."""
    me = "-c user.name=x -c user.email=x@x"
    task = await ground.done(
        "if git merge-base --is-ancestor main HEAD; then sed -i 's/two/ZWEI/;s/one/ONE/' a.txt;"
        f" else git {me} commit -qam mine; git {me} merge -q main || true; test -e resolve || exit 0;"
        " printf 'eins\\nZWEI\\nthree\\n' > a.txt; fi"
    )
    ground.commit(a_txt="eins\ntwo\nthree\n")
    await ground.tasks.send_back(task.key)
    assert "<<<<<<<" in await ground.tasks.diff((await ground.tasks.run(task.key)).key)
    with pytest.raises(MergeConflictError):
        await ground.tasks.accept(task.key)
    sent = await ground.tasks.send_back(task.key)
    assert "edit these files until no <<<<<<< is left" in sent.comments[-1]
    (ground.place(task) / "resolve").touch()
    assert (await ground.tasks.run(task.key)).state is T.COMPLETED
    assert (await ground.tasks.merge_state(task.key))["conflicts"] == []
    await ground.tasks.accept(task.key)
    assert ground.shown("a.txt") == "eins\nZWEI\nthree\n"


async def test_changes_of_the_user_that_are_not_committed_are_never_overwritten(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    (ground.repository / "a.txt").write_text("mine, not committed\n")
    (ground.repository / "untracked").write_text("mine too\n")
    tip = ground.tip()
    with pytest.raises(CheckoutBlockedError, match=r"a\.txt cannot follow \(changes of yours .* Nothing was") as raised:
        await ground.tasks.accept(task.key)
    assert raised.value.paths == ("a.txt",)
    assert (ground.tip(), (await ground.get(task)).state) == (tip, T.COMPLETED)
    done = await ground.tasks.accept(task.key, branch_only=True)
    assert done.accepted is not None
    assert done.accepted["followed"] is False
    assert "not committed" in str(done.accepted["why_not_followed"])
    assert (ground.repository / "a.txt").read_text() == "mine, not committed\n"
    assert (ground.repository / "untracked").read_text() == "mine too\n"
    assert ground.shown("a.txt") == "ONE\ntwo\nthree\n", "the branch has it"


async def test_what_an_agent_plants_for_git_runs_nowhere(ground: TaskGround, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    task = await ground.add("test -e planted")
    assert (await ground.tasks.run(task.key)).failures == 1
    plant(ground.place(task), canary)
    (ground.place(task) / "planted").write_text("x\n")
    done = await ground.tasks.run(task.key)
    assert done.state is T.COMPLETED, done.error
    await ground.tasks.diff(task.key)
    await ground.tasks.accept(task.key, paths=["planted"])
    ground.git("status")
    await ground.tasks.undo(task.key)
    await ground.tasks.retire(task.key)
    assert not canary.exists()
    assert ground.git("config", "--list", "--local").count("hookspath") == 0


async def test_a_link_to_a_secret_is_not_followed(ground: TaskGround, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key\n")
    task = await ground.done(f"ln -s {secret} link; ln -s {tmp_path} folder", checks=["true"])
    assert "the key" not in await ground.tasks.diff(task.key)
    retired = await ground.tasks.retire(task.key)
    assert retired.vault is not None
    assert b"the key" not in (Path(retired.vault["path"]) / "manifest.jsonl").read_bytes()
    await ground.tasks.unretire(task.key)
    assert (ground.place(task) / "link").is_symlink()
    assert secret.read_text() == "the key\n"


# --- reject, undo ------------------------------------------------------------------------------------


async def test_rejecting_is_final_and_keeps_the_work(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    done = await ground.tasks.reject(task.key, reason="wrong way")
    assert (done.state, done.error) == (T.REJECTED, "wrong way")
    assert await ground.tasks.reject(task.key, reason="again") == done
    for verb in (ground.tasks.accept, ground.tasks.undo, ground.tasks.requeue):
        with pytest.raises(InvalidOperationError, match="is rejected"):
            await verb(task.key)
    with pytest.raises(InvalidOperationError, match="only a completed task"):
        await ground.tasks.send_back(task.key, "please")
    assert (ground.place(task) / "made.txt").exists()
    assert [entry.detail for entry in await ground.audited("task.reject")] == ["wrong way"]


async def test_an_accept_is_undone_and_can_be_done_again(ground: TaskGround) -> None:
    before = ground.tip()
    task = await ground.done(EDIT)
    await ground.tasks.accept(task.key)
    undone = await ground.tasks.undo(task.key)
    assert (undone.state, undone.accepted, ground.tip()) == (T.COMPLETED, None, before)
    assert not (ground.repository / "made.txt").exists()
    with pytest.raises(InvalidOperationError, match="T001 is completed and nothing of it is accepted"):
        await ground.tasks.undo(task.key)
    assert (await ground.get(task), ground.tip()) == (undone, before)
    again = await ground.tasks.accept(task.key)
    assert again.state is T.ACCEPTED
    assert ground.shown("made.txt") == "new\n"


async def test_undo_of_what_was_never_accepted_is_refused(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    with pytest.raises(InvalidOperationError, match="only an accepted task can be undone"):
        await ground.tasks.undo(task.key)
    assert await ground.get(task) == task
    assert await ground.audited("task.undo") == []


async def test_an_undo_below_later_work_reverts(ground: TaskGround) -> None:
    task = await ground.done(EDIT)
    await ground.tasks.accept(task.key)
    ground.commit(b_txt="later\n")
    await ground.tasks.undo(task.key)
    assert (ground.shown("a.txt"), ground.shown("b.txt")) == ("one\ntwo\nthree\n", "later\n")
    assert ground.git("log", "-1", "--format=%s").strip() == "Undo T001"
    second = await ground.done(EDIT)
    await ground.tasks.accept(second.key)
    tip = ground.commit(made_txt="built on it\n")
    with pytest.raises(MergeConflictError, match="later work builds on it"):
        await ground.tasks.undo(second.key)
    assert (ground.tip(), (await ground.get(second)).state) == (tip, T.ACCEPTED)


async def test_a_comment_has_words(ground: TaskGround) -> None:
    task = await ground.done("true")
    for comment in (None, "", " \n", "x" * 20_001):
        with pytest.raises(ValidationError, match="comment"):
            await ground.tasks.send_back(task.key, comment)


# --- the vault ---------------------------------------------------------------------------------------

MESS = (
    "echo committed > made.txt; git add made.txt; git -c user.name=x -c user.email=x@x commit -qm mine;"
    "echo staged > a.txt; git add a.txt; echo unstaged > b.txt; chmod 755 b.txt; ln -s b.txt link;"
    "echo untracked > 'odd name'"
)


async def test_a_retired_workdir_comes_back_whole(ground: TaskGround) -> None:
    task = await ground.done(MESS)
    before = tree_of(ground.place(task))
    status = git(ground.place(task), "status", "--porcelain")
    retired = await ground.tasks.retire(task.key)
    assert (retired.workdir, ground.place(task).exists()) == (None, False)
    assert retired.vault is not None
    assert task.key not in ground.tasks.active_agents
    assert (await ground.tasks.retire(task.key)).vault == retired.vault, "twice is safe"
    assert "unstaged" in await ground.tasks.diff(task.key), "it can still be looked at"
    back = await ground.tasks.unretire(task.key)
    assert (back.vault, ground.tasks.active_agents[task.key].path) == (None, str(ground.place(task)))
    assert tree_of(ground.place(task)) == before
    assert git(ground.place(task), "status", "--porcelain") == status
    with pytest.raises(InvalidOperationError, match="is in its place"):
        await ground.tasks.unretire(task.key)
    await ground.tasks.accept(task.key)
    assert (ground.shown("a.txt"), ground.shown("b.txt"), ground.shown("odd name")) == (
        "staged\n",
        "unstaged\n",
        "untracked\n",
    )


async def test_a_retired_task_can_be_accepted_sent_back_and_undone(ground: TaskGround) -> None:
    first, second = await ground.done(EDIT), await ground.done("echo 2 > b.txt")
    for task in (first, second):
        await ground.tasks.retire(task.key)
    await ground.tasks.accept(first.key)
    assert ground.shown("made.txt") == "new\n"
    await ground.tasks.undo(first.key)
    await ground.tasks.send_back(second.key, "once more")
    assert (await ground.tasks.run(second.key)).changed_files == ("b.txt",)


async def test_the_log_and_the_record_are_in_the_vault_too(ground: TaskGround) -> None:
    task = await ground.done("echo said by the agent")
    retired = await ground.tasks.retire(task.key)
    entry = await ground.tasks.tasks.workdirs.find(task.key)
    assert entry is not None
    assert (entry.record["key"], entry.record["summary"]) == ("T001", "said by the agent")
    assert retired.vault == entry.to_dict()
    assert b"logs/" in (Path(entry.path) / "manifest.jsonl").read_bytes() or entry.files > 3


async def test_what_runs_or_was_never_there_is_not_retired(ground: TaskGround) -> None:
    task = await ground.add("true")
    assert (await ground.tasks.retire(task.key)).vault is None
    with pytest.raises(TaskNotFoundError, match="nothing of T001 in the vault"):
        await ground.tasks.unretire(task.key)
    with pytest.raises(TaskNotFoundError, match="T404"):
        await ground.tasks.unretire("T404")
    record = await ground.tasks.get_lifecycle(task.key)
    assert record is not None
    record.state = T.RUNNING
    await ground.tasks.update_lifecycle(record)
    with pytest.raises(InvalidOperationError, match="ostler task cancel T001"):
        await ground.tasks.retire(task.key)


# --- retention ---------------------------------------------------------------------------------------


async def test_finished_tasks_go_to_the_vault_after_their_time_and_can_be_had_back(
    repository: Path, tmp_path: Path
) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", clock=clock) as ground:
        accepted, rejected = await ground.done(EDIT), await ground.done("echo 2 > b.txt", key="own-key")
        waiting = await ground.done("echo 3 > sub/c.txt")
        await ground.tasks.accept(accepted.key)
        await ground.tasks.reject(rejected.key, reason="no")
        needed = await ground.add("true")
        await ground.add("true", depends_on=[needed.key], hold=True)
        await ground.tasks.cancel(needed.key)
        private = ground.home / "homes" / str(rejected.task_id)
        private.mkdir(parents=True)
        collecting = asyncio.create_task(ground.tasks.gc_loop())
        clock.advance(timedelta(hours=23).total_seconds())

        async def purged() -> bool:
            clock.advance(600)
            return await ground.tasks.get_lifecycle(accepted.key) is None

        assert await ground.tasks.get_lifecycle(accepted.key) is not None
        await until_async(purged)
        await until_async(lambda: is_gone(ground, rejected))
        await until(lambda: not private.exists())
        collecting.cancel()
        assert (await ground.get(waiting)).state is T.COMPLETED, "what waits for its review stays"
        assert (await ground.get(needed)).state is T.REJECTED, "and what an unfinished task names"
        assert not ground.place(rejected).exists()
        assert [entry.subject for entry in await ground.audited("task.purge")] == ["task:T001", "task:own-key"]
        back = await ground.tasks.unretire("own-key")
        assert (back.state, back.error, back.ended_at) == (T.REJECTED, "no", clock.wall())
        assert (ground.place(back) / "b.txt").read_text() == "2\n"
        assert await retire.collect(ground.tasks.tasks) == 0, "its time begins again"
        assert (await ground.add("true")).key != "T001", "numbers are not given twice"


async def is_gone(ground: TaskGround, task: Task) -> bool:
    return await ground.tasks.get_lifecycle(task.key) is None


async def test_the_time_of_retention_is_a_setting(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    settings = TaskSettings(retention=timedelta(minutes=5))
    async with opened(repository, tmp_path / "home", settings=settings, clock=clock) as ground:
        await ground.tasks.cancel((await ground.add("true")).key)
        assert await retire.collect(ground.tasks.tasks) == 0
        clock.advance(300)
        assert await retire.collect(ground.tasks.tasks) == 1
        with pytest.raises(TaskNotFoundError):
            await ground.get("T001")
        with pytest.raises(InvalidOperationError, match="only its record is kept"):
            await ground.tasks.unretire("T001")


async def test_a_workdir_that_no_task_owns_goes_to_the_vault(ground: TaskGround) -> None:
    orphan = ground.home / "tasks" / "lost"
    orphan.mkdir(parents=True)
    (orphan / "work.txt").write_text("of somebody\n")
    await retire.collect(ground.tasks.tasks)
    assert not orphan.exists()
    entry = await ground.tasks.tasks.workdirs.find("lost")
    assert entry is not None
    assert entry.files == 1
    with pytest.raises(TaskNotFoundError, match="the workdir of no known task"):
        await ground.tasks.unretire("lost")
