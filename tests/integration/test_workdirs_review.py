"""Accept and undo in real repositories."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from workdirs_ground import ADA, Ground, commit_all, git, make_repository, read, shell, write

from ostler.errors import ConflictError, GitError, InvalidOperationError, MergeConflictError, ValidationError
from ostler.workdirs import Snapshot, Workdir, Workdirs
from ostler.workdirs import git as git_module

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    repository = make_repository(tmp_path / "user")
    async with Workdirs(tmp_path / "home") as workdirs:
        yield Ground(repository, tmp_path / "home", workdirs)


def clean(ground: Ground) -> bool:
    return not ground.status() and not (ground.repository / ".git" / "index.lock").exists()


# --- accept ------------------------------------------------------------------------------------------


async def test_accept_is_one_commit_on_the_target_and_the_checkout_follows(ground: Ground) -> None:
    before = ground.tip()
    workdir, snapshot = await ground.changed(a_txt="one\n2\nthree\n", new_txt="new\n")
    accepted = await ground.accept(workdir, snapshot)
    assert accepted.followed
    assert accepted.why_not_followed is None
    assert (accepted.before, accepted.commit) == (before, ground.tip())
    assert ground.git("log", "-1", "--format=%an <%ae>|%s|%P").strip() == f"{ADA}|T1: done|{before}"
    assert (ground.repository / "a.txt").read_text() == "one\n2\nthree\n"
    assert (ground.repository / "new.txt").read_text() == "new\n"
    assert clean(ground)
    ground.git("fsck", "--strict", "--connectivity-only")


async def test_accepting_twice_gives_the_first_result(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="one\n2\nthree\n")
    accepted = await ground.accept(workdir, snapshot)
    assert await ground.accept(workdir, snapshot) == accepted
    commit_all_with(ground, "b.txt", "later\n")
    assert await ground.accept(workdir, snapshot) == accepted
    assert ground.git("rev-list", "--count", "main").strip() == "3"


def commit_all_with(ground: Ground, name: str, text: str) -> str:
    (ground.repository / name).write_text(text)
    return commit_all(ground.repository, f"user: {name}")


async def test_the_agents_own_commits_lie_under_the_snapshot(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("mine\n")
    head = commit_all(place, "mine")
    (place / "loose").write_text("not committed\n")
    git(place, "stash", "push", "--quiet", "--include-untracked")
    git(place, "stash", "apply", "--quiet")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert snapshot.head == head
    assert {change.path for change in snapshot.files} == {"a.txt", "loose"}
    await ground.accept(workdir, snapshot)
    assert ground.git("show", "main:a.txt") == "mine\n"


async def test_an_agent_that_lost_its_repository_still_has_its_files_taken(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("mine\n")
    shutil.rmtree(place / ".git")
    git(place, "init", "--quiet")
    commit_all(place, "another history")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert snapshot.head is None
    assert any(told.startswith(".git: ") for told in snapshot.left_out)
    assert [change.path for change in snapshot.files] == ["a.txt"]
    assert (await ground.accept(workdir, snapshot)).followed


async def test_a_target_that_moved_is_merged(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="one\ntwo\n3\n")
    commit_all_with(ground, "b.txt", "moved\n")
    tip = commit_all_with(ground, "a.txt", "1\ntwo\nthree\n")
    change = await ground.workdirs.changed_since_base(workdir, snapshot)
    assert (change.commits, change.merges_cleanly) == (2, True)
    accepted = await ground.accept(workdir, snapshot)
    assert accepted.before == tip
    assert (ground.repository / "a.txt").read_text() == "1\ntwo\n3\n"
    assert clean(ground)


async def test_conflicts_are_named_and_change_nothing(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n", b_txt="agent\n", new_txt="n\n")
    commit_all_with(ground, "a.txt", "user\n")
    tip = commit_all_with(ground, "b.txt", "user\n")
    refs = ground.git("for-each-ref")
    change = await ground.workdirs.changed_since_base(workdir, snapshot)
    assert change.conflicts == ("a.txt", "b.txt")
    with pytest.raises(MergeConflictError, match=r"conflicts in a\.txt, b\.txt. Nothing was changed") as raised:
        await ground.accept(workdir, snapshot)
    assert raised.value.paths == ("a.txt", "b.txt")
    assert ground.tip() == tip
    assert ground.git("for-each-ref") == refs
    assert clean(ground)
    assert (await ground.accept(workdir, snapshot, ["new.txt"])).followed


async def test_some_files_are_accepted_and_the_rest_later(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("agent\n")
    (place / "b.txt").unlink()
    (place / "dir").mkdir()
    (place / "dir" / "x").write_text("x\n")
    (place / "dir" / "y").write_text("y\n")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    first = await ground.accept(workdir, snapshot, ["dir", "b.txt"])
    assert (first.files, first.left) == (4, 1)
    assert sorted(ground.git("ls-tree", "-r", "--name-only", "main").split()) == [
        "a.txt",
        "dir/x",
        "dir/y",
        "sub/c.txt",
    ]
    assert ground.git("show", "main:a.txt") == "one\ntwo\nthree\n"
    assert await ground.accept(workdir, snapshot, ["dir", "b.txt"]) == first
    preview = await ground.workdirs.preview(workdir, snapshot)
    whole = await ground.accept(workdir, snapshot)
    assert (whole.files, whole.left) == (4, 0)
    assert ground.git("rev-parse", "main^{tree}").strip() == preview.tree
    assert ground.git("show", "main:a.txt") == "agent\n"
    assert clean(ground)
    with pytest.raises(InvalidOperationError, match=r"does not change nowhere\.txt"):
        await ground.accept(workdir, snapshot, ["nowhere.txt"])
    with pytest.raises(InvalidOperationError, match="does not change no file"):
        await ground.accept(workdir, snapshot, [])


async def test_more_work_after_an_accept_is_merged_from_there(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("agent\n")
    (place / "new.txt").write_text("1\n")
    (place / "b.txt").write_text("agent\n")
    first = await ground.accept(workdir, await ground.workdirs.snapshot(workdir, "one"), ["a.txt", "new.txt"])
    commit_all_with(ground, "sub/c.txt", "user\n")
    (place / "a.txt").write_text("agent again\n")
    (place / "new.txt").write_text("2\n")
    snapshot = await ground.workdirs.snapshot(workdir, "two")
    assert (await ground.workdirs.changed_since_base(workdir, snapshot)).merges_cleanly
    second = await ground.accept(workdir, snapshot, ["new.txt"])
    assert ground.git("show", "--name-only", "--format=", second.commit).split() == ["new.txt"]
    third = await ground.accept(workdir, snapshot)
    assert sorted(ground.git("show", "--name-only", "--format=", third.commit).split()) == ["a.txt", "b.txt"]
    assert (ground.repository / "sub" / "c.txt").read_text() == "user\n"
    assert clean(ground)
    assert ground.tip() != first.commit


async def test_renames_binaries_modes_and_odd_names_arrive_as_they_are(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "sub" / "c.txt").rename(place / "moved.txt")
    (place / "a.txt").chmod(0o755)
    (place / "picture").write_bytes(bytes(range(256)) * 100)
    (place / "link").symlink_to("a.txt")
    names = [b"with space", b'quo"te', b"new\nline", b"latin\xe9", "käse".encode(), b"-n", b"tab\t", b'"q"']
    for name in names:
        write(place, name, name)
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert "rename from sub/c.txt" in await ground.workdirs.diff(workdir, snapshot)
    odd = [change.path for change in snapshot.files if change.path[-1] in '"te\t' and "q" in change.path]
    await ground.accept(workdir, snapshot, odd)
    accepted = await ground.accept(workdir, snapshot)
    assert accepted.followed
    assert clean(ground)
    there = ground.repository
    assert not (there / "sub").exists()
    assert (there / "moved.txt").read_text() == "c\n"
    assert (there / "a.txt").stat().st_mode & 0o111
    assert (there / "picture").read_bytes() == (place / "picture").read_bytes()
    assert (there / "link").readlink() == Path("a.txt")
    for name in names:
        assert read(there, name) == name


async def test_line_endings_are_those_of_the_repository(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "user", {".gitattributes": "*.bat text eol=crlf\n", "x.bat": "a\nb\n"})
    (repository / "x.bat").unlink()
    git(repository, "checkout", "--", "x.bat")
    assert b"\r\n" in (repository / "x.bat").read_bytes()
    async with Workdirs(tmp_path / "home") as workdirs:
        ground = Ground(repository, tmp_path / "home", workdirs)
        workdir, place = await ground.prepared()
        assert (place / "x.bat").read_bytes() == b"a\r\nb\r\n"
        (place / "x.bat").write_bytes(b"a\r\nB\r\n")
        snapshot = await workdirs.snapshot(workdir, "one")
        assert [(one.path, one.added, one.removed) for one in snapshot.files] == [("x.bat", 1, 1)]
        assert (await ground.accept(workdir, snapshot)).followed
        assert (repository / "x.bat").read_bytes() == b"a\r\nB\r\n"
        assert clean(ground)


async def test_nothing_to_accept_is_no_commit(ground: Ground) -> None:
    workdir, snapshot = await ground.changed()
    tip = ground.tip()
    accepted = await ground.accept(workdir, snapshot)
    assert (accepted.commit, accepted.before) == (tip, tip)
    assert (await ground.workdirs.undo(accepted)).commit == ground.tip() == tip


async def test_the_target_may_move_while_it_is_accepted(ground: Ground) -> None:
    """Compare-and-set: another writer of the branch loses nothing, and neither does the accept."""
    prepared = [await ground.changed(f"T{number}", **{f"n{number}_txt": "x\n"}) for number in range(4)]
    git(ground.repository, "checkout", "--quiet", "--detach")
    moves = (
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do c=$(git commit-tree -p main -m $i main^{tree}) && "
        "git update-ref refs/heads/main $c main 2>/dev/null || true; done"
    )
    writer = asyncio.create_task(asyncio.to_thread(shell, ground.repository, moves))
    accepted = await asyncio.gather(*(ground.accept(workdir, snapshot) for workdir, snapshot in prepared))
    await writer
    history = ground.git("rev-list", "main").split()
    assert all(one.commit in history for one in accepted)
    assert {f"n{number}.txt" for number in range(4)} <= set(ground.git("ls-tree", "--name-only", "main").split())


@pytest.mark.parametrize("author", ["Ada", "Ada <a@b", "<a@b>", "A\nB <a@b>", "A <a b>", "A <> <a@b>"])
async def test_an_author_is_a_name_and_an_address(ground: Ground, author: str) -> None:
    workdir, snapshot = await ground.changed(a_txt="x\n")
    with pytest.raises(ValidationError, match="author must look like"):
        await ground.workdirs.accept(workdir, snapshot, message="m", author=author)
    with pytest.raises(ValidationError, match="message must have"):
        await ground.workdirs.accept(workdir, snapshot, message=" ", author=ADA)


async def test_without_an_author_it_is_the_user_of_git(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="x\n")
    ground.git("config", "user.name", "Grace Hopper")
    ground.git("config", "user.email", "grace@example.org")
    accepted = await ground.workdirs.accept(workdir, snapshot, message="m")
    assert ground.git("log", "-1", "--format=%an <%ae>", "main").strip() == "Grace Hopper <grace@example.org>"
    ground.git("update-ref", "refs/remotes/origin/main", accepted.commit)
    await ground.workdirs.undo(accepted)
    assert ground.git("log", "-1", "--format=%an <%ae>", "main").strip() == "Grace Hopper <grace@example.org>"


async def test_a_merge_that_differs_from_what_was_checked_is_refused(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="x\n")
    preview = await ground.workdirs.preview(workdir, snapshot)
    tip = commit_all_with(ground, "b.txt", "later\n")
    with pytest.raises(ConflictError, match="main moved meanwhile"):
        await ground.workdirs.accept(workdir, snapshot, message="m", author=ADA, tree=preview.tree)
    assert ground.tip() == tip


# --- the user's checkout -----------------------------------------------------------------------------


async def test_uncommitted_changes_elsewhere_stay_and_the_rest_follows(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    (ground.repository / "b.txt").write_text("user, not committed\n")
    (ground.repository / "staged.txt").write_text("staged\n")
    ground.git("add", "staged.txt")
    (ground.repository / "untracked.txt").write_text("u\n")
    assert (await ground.accept(workdir, snapshot)).followed
    assert ground.status().splitlines() == [" M b.txt", "A  staged.txt", "?? untracked.txt"]
    assert (ground.repository / "a.txt").read_text() == "agent\n"


async def test_uncommitted_changes_in_a_touched_file_are_never_overwritten(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n", new_txt="n\n")
    (ground.repository / "a.txt").write_text("one\ntwo\nuser\n")
    (ground.repository / "staged.txt").write_text("staged\n")
    ground.git("add", "staged.txt")
    assert (await ground.refused(workdir, snapshot)).paths == ("a.txt",)
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert not accepted.followed
    assert "a.txt cannot follow (changes of yours that are not committed)" in str(accepted.why_not_followed)
    assert ground.tip() == accepted.commit
    assert (ground.repository / "a.txt").read_text() == "one\ntwo\nuser\n"
    # A commit of what the user has staged does not take back what was accepted.
    ground.git("commit", "--quiet", "--message=mine")
    assert ground.git("show", "main:a.txt") == "agent\ntwo\nthree\n"


@pytest.mark.parametrize("new", [True, False], ids=["untracked too", "tracked only"])
async def test_the_refusal_names_every_file_in_the_way(ground: Ground, new: bool) -> None:
    for name in ("m.txt", "same.txt", "gone.txt"):
        commit_all_with(ground, name, "old\n")
    names = ["a.txt", "b.txt", "m.txt", *(["q.txt"] if new else [])]
    free = ["free.txt", "gone.txt", "same.txt"]
    workdir, snapshot = await ground.changed(**{name.replace(".", "_"): "agent\n" for name in [*names, *free]})
    for name in names:
        (ground.repository / name).write_text("user\n")
    ground.git("add", "b.txt")
    (ground.repository / "same.txt").write_text("agent\n")
    (ground.repository / "gone.txt").unlink()
    error = await ground.refused(workdir, snapshot)
    assert error.paths == tuple(names)
    assert f"{', '.join(names)} cannot follow (changes of yours" in str(error)
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert f"{', '.join(names)} cannot follow (changes of yours" in str(accepted.why_not_followed)


async def test_a_refusal_names_twenty_files_and_counts_the_rest(ground: Ground) -> None:
    names = [f"n{number:02}.txt" for number in range(23)]
    workdir, snapshot = await ground.changed(**{name.replace(".", "_"): "agent\n" for name in names})
    for name in names:
        (ground.repository / name).write_text("user\n")
    error = await ground.refused(workdir, snapshot)
    assert error.paths == tuple(names)
    assert "n18.txt, n19.txt and 3 more cannot follow" in str(error)


async def test_what_it_says_brings_the_files_up_to_date(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n")
    (ground.repository / "a.txt").write_text("one\ntwo\nuser\n")
    told = str((await ground.accept(workdir, snapshot, branch_only=True)).why_not_followed)
    command = told.partition("accepted ones there: ")[2]
    assert command.startswith("git diff ")
    shell(ground.repository, command)
    assert (ground.repository / "a.txt").read_text() == "agent\ntwo\nuser\n"
    assert ground.git("show", "main:a.txt") == "agent\ntwo\nthree\n"


@pytest.mark.parametrize("ignored", [True, False])
async def test_untracked_and_ignored_files_in_the_way_are_never_overwritten(ground: Ground, ignored: bool) -> None:
    if ignored:
        (ground.repository / ".gitignore").write_text("secret*\n")
        commit_all(ground.repository)
    workdir, place = await ground.prepared()
    (place / "secret.env").write_text("agent\n")
    (place / "secretdir").mkdir()
    (place / "secretdir" / "x").write_text("agent\n")
    git(place, "add", "--force", "--all")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    (ground.repository / "secret.env").write_text("user\n")
    (ground.repository / "secretdir").write_text("user\n")
    assert (await ground.refused(workdir, snapshot)).paths == ("secret.env", "secretdir/x")
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert not accepted.followed
    assert "secret" in str(accepted.why_not_followed)
    assert (ground.repository / "secret.env").read_text() == "user\n"
    assert (ground.repository / "secretdir").read_text() == "user\n"


async def test_a_directory_that_becomes_a_file_keeps_what_is_ignored_in_it(ground: Ground) -> None:
    (ground.repository / ".gitignore").write_text("*.o\n")
    commit_all(ground.repository)
    workdir, place = await ground.prepared()
    (place / "sub" / "c.txt").unlink()
    (place / "sub").rmdir()
    (place / "sub").write_text("a file now\n")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    (ground.repository / "sub" / "x.o").write_text("built\n")
    assert (await ground.refused(workdir, snapshot)).paths == ("sub",)
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert not accepted.followed
    assert (ground.repository / "sub" / "x.o").read_text() == "built\n"
    undone = await ground.workdirs.undo(accepted)
    assert ground.tip() == undone.commit == accepted.before
    (ground.repository / "sub" / "x.o").unlink()
    assert (await ground.accept(workdir, snapshot)).followed
    assert (ground.repository / "sub").read_text() == "a file now\n"


async def test_an_unfinished_merge_is_refused(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    ground.git("checkout", "--quiet", "-b", "other")
    commit_all_with(ground, "b.txt", "other\n")
    ground.git("checkout", "--quiet", "main")
    ground.git("merge", "--no-commit", "--no-ff", "other")
    with pytest.raises(InvalidOperationError, match=r"a merge in .* is not finished"):
        await ground.accept(workdir, snapshot)
    ground.git("merge", "--abort")
    accepted = await ground.accept(workdir, snapshot)
    assert accepted.followed
    ground.git("merge", "--no-commit", "--no-ff", "other")
    assert await ground.accept(workdir, snapshot) == accepted
    with pytest.raises(InvalidOperationError, match="not finished"):
        await ground.workdirs.undo(accepted)


@pytest.mark.parametrize("later", [False, True], ids=["back", "reverting"])
async def test_undo_names_every_file_that_it_leaves(ground: Ground, later: bool) -> None:
    workdir, snapshot = await ground.changed(lib="lib\n", use="use\n")
    accepted = await ground.accept(workdir, snapshot)
    if later:
        commit_all_with(ground, "b.txt", "later\n")
    (ground.repository / "use").write_text("use\nmine\n")
    undone = await ground.workdirs.undo(accepted)
    assert not undone.followed
    assert f"lib, use in {ground.repository} were left as they are" in str(undone.why_not_followed)
    assert "the work is out of the branch" in str(undone.why_not_followed)
    assert "git apply" not in str(undone.why_not_followed)
    assert (ground.repository / "use").read_text() == "use\nmine\n"
    assert ground.git("ls-tree", "--name-only", "main", "lib", "use") == ""


async def test_undo_says_nothing_where_the_checkout_never_had_the_work(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n", b_txt="agent\n", lib="lib\n")
    (ground.repository / "a.txt").write_text("one\ntwo\nuser\n")
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    undone = await ground.workdirs.undo(accepted)
    assert (undone.followed, undone.why_not_followed) == (True, None)
    assert ground.tip() == accepted.before
    assert ground.status() == " M a.txt\n"
    assert (ground.repository / "a.txt").read_text() == "one\ntwo\nuser\n"


async def test_undo_names_the_files_that_the_user_brought_up_to_date(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n", b_txt="agent\n")
    (ground.repository / "a.txt").write_text("one\ntwo\nuser\n")
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    ground.git("checkout", "--", "b.txt")
    undone = await ground.workdirs.undo(accepted)
    assert (ground.repository / "a.txt").read_text() == "one\ntwo\nuser\n"
    assert "but b.txt in" in str(undone.why_not_followed), "a.txt has only changes of the user"


async def test_undo_names_a_file_in_which_the_user_merged_the_work(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n")
    (ground.repository / "a.txt").write_text("one\ntwo\nuser\n")
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    shell(ground.repository, str(accepted.why_not_followed).partition("accepted ones there: ")[2])
    undone = await ground.workdirs.undo(accepted)
    assert (ground.repository / "a.txt").read_text() == "agent\ntwo\nuser\n"
    assert "but a.txt in" in str(undone.why_not_followed)


async def test_while_the_users_git_works_the_files_are_left(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    lock = ground.repository / ".git" / "index.lock"
    lock.write_text("")
    assert "git is at work; try again in a moment" in str(await ground.refused(workdir, snapshot))
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert not accepted.followed
    assert "git is at work" in str(accepted.why_not_followed)
    assert lock.exists()


async def test_a_linked_worktree_of_the_user_follows_too(ground: Ground, tmp_path: Path) -> None:
    linked = tmp_path / "linked tree"
    ground.git("worktree", "add", "--quiet", "-b", "feature", str(linked))
    workdir = await ground.workdirs.plan("T1", near=linked / "sub")
    assert (workdir.target, workdir.checkout) == ("feature", str(linked))
    await ground.workdirs.prepare(workdir)
    (Path(workdir.path) / "a.txt").write_text("agent\n")
    accepted = await ground.accept(workdir, await ground.workdirs.snapshot(workdir, "one"))
    assert accepted.followed
    assert (linked / "a.txt").read_text() == "agent\n"
    assert not git(linked, "status", "--porcelain")
    assert clean(ground)


async def test_a_target_that_is_not_checked_out_is_only_moved(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    ground.git("checkout", "--quiet", "-b", "other")
    accepted = await ground.accept(workdir, snapshot)
    assert (accepted.followed, accepted.why_not_followed) == (False, None)
    assert (ground.repository / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert clean(ground)


async def test_a_sparse_checkout_is_left(ground: Ground) -> None:
    ground.git("sparse-checkout", "set", "--no-cone", "/*", "!/b.txt")
    assert not (ground.repository / "b.txt").exists()
    workdir, snapshot = await ground.changed(b_txt="agent\n", a_txt="agent\n")
    assert "b.txt cannot follow (left out of a sparse checkout)" in str(await ground.refused(workdir, snapshot))
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert "b.txt cannot follow (left out of a sparse checkout)" in str(accepted.why_not_followed)
    assert not (ground.repository / "b.txt").exists()
    assert ground.tip() == accepted.commit


async def test_a_split_index_is_left(ground: Ground) -> None:
    ground.git("update-index", "--split-index")
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    assert "the files cannot follow: " in str(await ground.refused(workdir, snapshot))
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert "was left as it is" in str(accepted.why_not_followed)
    assert ground.tip() == accepted.commit
    assert not (ground.repository / ".git" / "index.lock").exists()


@pytest.mark.parametrize("attributes", ["committed", "untracked", "only in the index"])
async def test_files_that_a_filter_writes_are_left(ground: Ground, attributes: str) -> None:
    ground.git("config", "filter.upper.smudge", "tr a-z A-Z")
    ground.git("config", "filter.upper.clean", "tr A-Z a-z")
    place = ground.repository / "sub" / ".gitattributes"
    place.write_text("c.txt filter=upper\n")
    if attributes != "untracked":
        commit_all(ground.repository)
    if attributes == "only in the index":
        place.unlink()
    workdir, snapshot = await ground.changed(**{"sub/c_txt": "agent\n"})
    assert (await ground.refused(workdir, snapshot)).paths == ("sub/c.txt",)
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    assert "sub/c.txt cannot follow (written by a filter" in str(accepted.why_not_followed)


# --- undo --------------------------------------------------------------------------------------------


async def test_undo_sets_the_target_back_when_nothing_followed(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n", new_txt="n\n")
    accepted = await ground.accept(workdir, snapshot)
    undone = await ground.workdirs.undo(accepted)
    assert (undone.commit, undone.reverted, undone.followed) == (accepted.before, False, True)
    assert ground.tip() == accepted.before
    assert not (ground.repository / "new.txt").exists()
    assert clean(ground)
    again = await ground.workdirs.undo(accepted)
    assert again.commit == ground.tip() == accepted.before
    redone = await ground.accept(workdir, snapshot)
    assert ground.tip() == redone.commit
    assert (ground.repository / "new.txt").exists()


async def test_undo_reverts_by_a_commit_when_more_followed(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\ntwo\nthree\n")
    accepted = await ground.accept(workdir, snapshot)
    commit_all_with(ground, "b.txt", "later\n")
    undone = await ground.workdirs.undo(accepted, author=ADA)
    assert undone.reverted
    assert undone.followed
    assert (ground.repository / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert (ground.repository / "b.txt").read_text() == "later\n"
    assert clean(ground)
    tip = ground.tip()
    assert (await ground.workdirs.undo(accepted)).commit == ground.tip() == tip
    redone = await ground.accept(workdir, snapshot)
    assert redone.commit not in {accepted.commit, tip}
    assert (ground.repository / "a.txt").read_text() == "agent\ntwo\nthree\n"


async def test_undo_reverts_by_a_commit_what_was_published(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    accepted = await ground.accept(workdir, snapshot)
    ground.git("update-ref", "refs/remotes/origin/main", accepted.commit)
    undone = await ground.workdirs.undo(accepted)
    assert undone.reverted
    assert undone.before == accepted.commit


async def test_undo_says_which_files_it_could_not_take_out(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n", b_txt="agent\n")
    accepted = await ground.accept(workdir, snapshot)
    (ground.repository / "b.txt").write_text("user\n")
    undone = await ground.workdirs.undo(accepted)
    assert ground.tip() == undone.commit == accepted.before
    assert not undone.followed
    assert "b.txt cannot follow" in str(undone.why_not_followed)
    assert (ground.repository / "b.txt").read_text() == "user\n"


async def test_undo_names_conflicts_and_changes_nothing(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    accepted = await ground.accept(workdir, snapshot)
    tip = commit_all_with(ground, "a.txt", "builds on agent\n")
    with pytest.raises(MergeConflictError, match=r"later work builds on it: conflicts in a\.txt") as raised:
        await ground.workdirs.undo(accepted)
    assert raised.value.paths == ("a.txt",)
    assert ground.tip() == tip
    assert clean(ground)


async def test_review_needs_only_the_records(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    async with Workdirs(ground.home) as another:
        again = Workdir.from_dict(workdir.to_dict()), Snapshot.from_dict(snapshot.to_dict())
        assert "+agent" in await another.diff(*again)
        accepted = await another.accept(*again, message="m", author=ADA)
    async with Workdirs(ground.home) as third:
        assert (await third.undo(type(accepted).from_dict(accepted.to_dict()))).commit == accepted.before


# --- repositories ------------------------------------------------------------------------------------


async def test_a_detached_head_needs_a_target(ground: Ground) -> None:
    ground.git("checkout", "--quiet", "--detach")
    with pytest.raises(InvalidOperationError, match="check out the one to merge into"):
        await ground.workdirs.plan("T1", near=ground.repository)
    assert (await ground.workdirs.plan("T1", near=ground.repository, target="main")).base == ground.tip()


async def test_an_unborn_branch_is_refused_with_what_to_do(tmp_path: Path, ground: Ground) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "--quiet")
    with pytest.raises(InvalidOperationError, match="make a first one"):
        await ground.workdirs.plan("T1", near=empty)


async def test_a_bare_repository_works(ground: Ground, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "--quiet", "--bare", str(ground.repository), str(bare))
    workdir = await ground.workdirs.plan("T1", near=bare)
    assert workdir.checkout is None
    await ground.workdirs.prepare(workdir)
    (Path(workdir.path) / "a.txt").write_text("agent\n")
    accepted = await ground.accept(workdir, await ground.workdirs.snapshot(workdir, "one"))
    assert not accepted.followed
    assert git(bare, "show", "main:a.txt") == "agent\n"
    await ground.workdirs.undo(accepted)
    assert git(bare, "show", "main:a.txt") == "one\ntwo\nthree\n"


async def test_a_shallow_clone_works_and_may_be_deepened(ground: Ground, tmp_path: Path) -> None:
    for number in range(3):
        commit_all_with(ground, "b.txt", f"{number}\n")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{ground.repository}", str(shallow))
    there = Ground(shallow, ground.home, ground.workdirs)
    workdir, snapshot = await there.changed(a_txt="agent\n")
    assert git(Path(workdir.path), "log", "--format=%s").strip() == "user: b.txt"
    assert (await there.accept(workdir, snapshot)).followed
    git(shallow, "fetch", "--quiet", "--unshallow")
    _, place = await there.prepared("T2")
    assert len(git(place, "log", "--format=%s").splitlines()) == 5


async def test_a_partial_clone_is_refused_with_what_to_do(ground: Ground, tmp_path: Path) -> None:
    ground.git("config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    git(tmp_path, "clone", "--quiet", "--filter=blob:none", f"file://{ground.repository}", str(partial))
    workdir = await ground.workdirs.plan("T1", near=partial)
    with pytest.raises(InvalidOperationError, match="clone it again without --filter"):
        await ground.workdirs.prepare(workdir)


async def test_submodules_stay_links_and_are_said(ground: Ground, tmp_path: Path) -> None:
    library = make_repository(tmp_path / "library", {"lib.c": "1\n"})
    ground.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    commit_all(ground.repository, "submodule")
    workdir = await ground.workdirs.plan("T1", near=ground.repository)
    notes = await ground.workdirs.prepare(workdir)
    assert notes == ("submodules are not checked out: lib; the agent can run git submodule update",)
    place = Path(workdir.path)
    (place / "a.txt").write_text("agent\n")
    git(place, "-c", "protocol.file.allow=always", "submodule", "--quiet", "update", "--init")
    assert (place / "lib" / "lib.c").exists()
    (place / "lib" / "lib.c").write_text("2\n")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert [change.path for change in snapshot.files] == ["a.txt"]
    newer = commit_all(place / "lib", "newer")
    git(place, "add", "lib")
    snapshot = await ground.workdirs.snapshot(workdir, "two")
    assert [change.path for change in snapshot.files] == ["a.txt", "lib"]
    assert (await ground.accept(workdir, snapshot)).followed
    assert newer in ground.git("ls-tree", "main", "lib")
    assert (ground.repository / "lib" / "lib.c").read_text() == "1\n"


async def test_a_repository_with_sha256_works(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "user", None, "--object-format=sha256")
    async with Workdirs(tmp_path / "home") as workdirs:
        ground = Ground(repository, tmp_path / "home", workdirs)
        workdir, snapshot = await ground.changed(a_txt="agent\n")
        assert len(snapshot.commit) == 64
        accepted = await ground.accept(workdir, snapshot)
        assert accepted.followed
        assert (await workdirs.undo(accepted)).followed
        assert clean(ground)


async def test_places_with_odd_names_work(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / 'us:er "of' / "käse")
    async with Workdirs(tmp_path / 'ho:me "x') as workdirs:
        ground = Ground(repository, workdirs.home, workdirs)
        workdir, snapshot = await ground.changed(a_txt="agent\n")
        assert not git(Path(workdir.path), "fsck", "--no-dangling")
        accepted = await ground.accept(workdir, snapshot)
        assert accepted.followed
        assert (await workdirs.undo(accepted)).followed
        assert clean(ground)


async def test_a_workdir_of_an_agent_is_no_users_repository(ground: Ground) -> None:
    workdir, _ = await ground.prepared()
    with pytest.raises(InvalidOperationError, match="is the workdir of an agent"):
        await ground.workdirs.plan("T2", near=Path(workdir.path))


async def test_a_repository_that_is_gone_is_said_and_the_work_is_still_there(ground: Ground, tmp_path: Path) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    ground.repository.rename(tmp_path / "away")
    assert "+agent" in await ground.workdirs.diff(workdir, snapshot)
    assert (await ground.workdirs.snapshot(workdir, "again")).commit == snapshot.commit
    with pytest.raises(InvalidOperationError, match="is not there any more"):
        await ground.accept(workdir, snapshot)
    await ground.workdirs.retire(workdir, record={})


async def test_an_old_git_is_refused_with_a_sentence(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_module, "_version", lambda: "git version 2.37.1")
    with pytest.raises(GitError, match=r"git 2\.38 or newer, and this is 'git version 2\.37\.1'"):
        await ground.workdirs.plan("T1", near=ground.repository)


# --- what the agent finds ----------------------------------------------------------------------------


async def test_the_agent_finds_branch_history_remotes_and_name(ground: Ground, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", str(ground.repository), "origin.git")
    ground.git("remote", "add", "origin", "../origin.git")
    ground.git("fetch", "--quiet", "origin")
    ground.git("config", "user.name", "Grace")
    ground.git("config", "user.email", "grace@example.org")
    ground.git("tag", "-a", "v1", "-m", "v1")
    _, place = await ground.prepared()
    assert git(place, "branch", "--show-current").strip() == "ostler/T1"
    assert not git(place, "status", "--porcelain")
    assert git(place, "config", "user.name").split() == ["Agent"]  # of this helper's own arguments
    assert git(place, "config", "--local", "user.name").strip() == "Grace"
    assert set(git(place, "for-each-ref", "--format=%(refname)").split()) == {
        "refs/heads/main", "refs/heads/ostler/T1", "refs/remotes/origin/main", "refs/tags/v1",
    }  # fmt: skip
    (place / "a.txt").write_text("agent\n")
    commit_all(place)
    git(place, "push", "--quiet", "origin", "HEAD")
    assert git(tmp_path / "origin.git", "show", "ostler/T1:a.txt") == "agent\n"
    assert "ostler/T1" not in ground.git("for-each-ref")


async def test_worktreeinclude_brings_untracked_files_that_stay_out_of_the_work(ground: Ground, tmp_path: Path) -> None:
    user = ground.repository
    (user / ".gitignore").write_text("*.env\nbuild/\n")
    (user / ".worktreeinclude").write_text("*.env\nbuild/keep\nnotes [1].md\n!not.env\n")
    commit_all(user)
    (user / "x.env").write_text("key\n")
    (user / "x.env").chmod(0o600)
    (user / "not.env").write_text("no\n")
    (user / "build").mkdir()
    (user / "build" / "keep").write_text("kept\n")
    (user / "build" / "drop").write_text("dropped\n")
    (user / "notes [1].md").write_text("untracked, not ignored\n")
    (tmp_path / "outside").write_text("outside\n")
    (user / "link.env").symlink_to(tmp_path / "outside")
    workdir, place = await ground.prepared()
    assert (place / "x.env").read_text() == "key\n"
    assert (place / "x.env").stat().st_mode & 0o777 == 0o600
    assert (place / "link.env").is_symlink()
    assert {file.name for file in (place / "build").iterdir()} == {"keep"}
    assert not (place / "not.env").exists()
    assert not git(place, "status", "--porcelain")
    assert not (await ground.workdirs.snapshot(workdir, "one")).files
    snapshot = await ground.workdirs.snapshot(workdir, "two")
    await ground.workdirs.checkout(snapshot, ground.home / "proof", include_for=workdir)
    assert (ground.home / "proof" / "x.env").read_text() == "key\n"


async def test_what_the_users_git_ignores_is_ignored(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "git").mkdir()
    (tmp_path / "git" / "ignore").write_text("*.swp\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (ground.repository / ".git" / "info" / "exclude").write_text("*.bak\n")
    workdir, place = await ground.prepared()
    for name in ("a.swp", "a.bak", "a.new"):
        (place / name).write_text("x\n")
    assert [change.path for change in (await ground.workdirs.snapshot(workdir, "one")).files] == ["a.new"]


async def test_what_the_agent_added_by_force_is_taken(ground: Ground) -> None:
    (ground.repository / ".gitignore").write_text("*.bin\n")
    commit_all(ground.repository)
    workdir, place = await ground.prepared()
    (place / "added.bin").write_text("x\n")
    (place / "ignored.bin").write_text("x\n")
    git(place, "add", "--force", "added.bin")
    assert [change.path for change in (await ground.workdirs.snapshot(workdir, "one")).files] == ["added.bin"]


async def test_twenty_worktrees_at_once(ground: Ground) -> None:
    prepared = await asyncio.gather(*(ground.prepared(f"T{number}") for number in range(20)))
    for number, (_, place) in enumerate(prepared):
        (place / f"n{number}").write_text("x\n")
    snapshots = await asyncio.gather(*(ground.workdirs.snapshot(workdir, "one") for workdir, _ in prepared))
    await asyncio.gather(
        *(ground.accept(workdir, snapshot) for (workdir, _), snapshot in zip(prepared, snapshots, strict=True))
    )
    assert {f"n{number}" for number in range(20)} <= {file.name for file in ground.repository.iterdir()}
    assert clean(ground)
