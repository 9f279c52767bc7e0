"""What holds for every kind of workdir."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from workdirs_ground import git, make_repository, tree_of

from ostler.errors import InvalidOperationError, ValidationError
from ostler.workdirs import Accepted, Snapshot, VaultEntry, Workdir, WorkdirKind, Workdirs

pytestmark = pytest.mark.anyio
ODD_NAMES = [
    b"with space",
    b'quo"te',
    b"back\\slash",
    b"new\nline",
    "käse ✓".encode(),
    b"latin\xe9",
    b"-dash",
    b"#!",
    b"$x",
]


@pytest.fixture(params=list(WorkdirKind), ids=str)
def kind(request: pytest.FixtureRequest) -> WorkdirKind:
    found: WorkdirKind = request.param
    return found


@pytest.fixture
def near(kind: WorkdirKind, tmp_path: Path) -> Path:
    place = tmp_path / "project"
    if kind is WorkdirKind.WORKTREE:
        return make_repository(place)
    place.mkdir()
    return place


@pytest.fixture
async def workdirs(tmp_path: Path) -> AsyncIterator[Workdirs]:
    async with Workdirs(tmp_path / "home") as workdirs:
        yield workdirs


@pytest.fixture
async def workdir(workdirs: Workdirs, near: Path) -> Workdir:
    workdir = await workdirs.plan("T1", near=near)
    await workdirs.prepare(workdir)
    return workdir


def fill(place: Path) -> None:
    """Everything that a workdir may hold, apart from what cannot be kept."""
    (place / ".gitignore").write_text("ignored/\n*.log\n")
    (place / "ignored").mkdir()
    (place / "ignored" / "cache.bin").write_bytes(bytes(range(256)) * 40)
    (place / "empty").mkdir(mode=0o750)
    (place / "tool.sh").write_text("#!/bin/sh\n")
    (place / "tool.sh").chmod(0o755)
    (place / "secret").write_text("s\n")
    (place / "secret").chmod(0o400)
    (place / "link").symlink_to("tool.sh")
    (place / "outside").symlink_to("/etc/passwd")
    (place / "dangling").symlink_to("nowhere")
    closed = place / "closed"
    closed.mkdir()
    (closed / "inner").write_text("inner\n")
    for name in ODD_NAMES:
        with open(os.fsencode(place) + b"/" + name, "wb") as file:  # noqa: PTH123 - bytes
            file.write(name)
    make_repository(place / "nested", {"n.txt": "n\n"})


async def test_a_plan_decides_and_writes_nothing(workdirs: Workdirs, near: Path, kind: WorkdirKind) -> None:
    before = tree_of(near)
    workdir = await workdirs.plan("T1", near=near)
    assert workdir.kind is kind
    assert Workdir.from_dict(workdir.to_dict()) == workdir
    assert not workdirs.home.exists()
    assert tree_of(near) == before


async def test_without_a_place_it_is_a_directory(workdirs: Workdirs) -> None:
    assert (await workdirs.plan("T1", near=None)).kind is WorkdirKind.DIRECTORY


@pytest.mark.parametrize(
    "key", ["", "../x", "/abs", ".git", "a\0b", "a\rb", "x" * 65, "-x", "a/b", "a\u202eb", "con.txt", "a b"]
)
async def test_only_plain_keys_name_directories(workdirs: Workdirs, key: str) -> None:
    with pytest.raises(ValidationError, match="key must be"):
        await workdirs.plan(key, near=None)
    with pytest.raises(ValidationError, match="key must be"):
        await workdirs.prepare(Workdir(kind=WorkdirKind.DIRECTORY, key=key, path=f"{workdirs.home}/work/{key}"))
    assert not workdirs.home.exists()


async def test_a_record_of_another_home_is_refused(workdirs: Workdirs, workdir: Workdir, tmp_path: Path) -> None:
    for path in (str(tmp_path), "/", f"{workdirs.home}/work/T1/../T2"):
        with pytest.raises(ValidationError, match="path must be"):
            await workdirs.retire(workdir.evolve(path=path), record={})


async def test_preparing_again_keeps_what_is_there(workdirs: Workdirs, workdir: Workdir) -> None:
    (Path(workdir.path) / "mine").write_text("work")
    await workdirs.prepare(workdir)
    assert (Path(workdir.path) / "mine").read_text() == "work"


async def test_fresh_puts_what_was_there_into_the_vault(workdirs: Workdirs, workdir: Workdir) -> None:
    first = tree_of(Path(workdir.path))
    (Path(workdir.path) / "mine").write_text("work")
    await workdirs.prepare(workdir, fresh=True)
    assert {name for name in tree_of(Path(workdir.path)) if not name.startswith(".git")} == {
        name for name in first if not name.startswith(".git")
    }
    entry = await workdirs.find("T1")
    assert entry is not None
    await workdirs.retire(workdir, record={})
    await workdirs.restore(entry)
    assert (Path(workdir.path) / "mine").read_text() == "work"


async def test_a_snapshot_holds_all_but_ignored_files_and_changes_nothing(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    fill(place)
    os.mkfifo(place / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "socket"))
    before = {name: entry for name, entry in tree_of_readable(place).items() if name not in {"pipe", "socket"}}
    snapshot = await workdirs.snapshot(workdir, "as it is")
    assert {name: entry for name, entry in tree_of_readable(place).items() if name not in {"pipe", "socket"}} == before
    assert Snapshot.from_dict(snapshot.to_dict()) == snapshot
    paths = {change.path for change in snapshot.files}
    assert {"with space", 'quo"te', "käse ✓", '"new\\nline"', '"latin\\351"', "secret", "link", "nested/n.txt"} <= paths
    assert all(change.status == "A" for change in snapshot.files)
    assert not paths & {"pipe", "socket", "ignored/cache.bin"}
    assert any(told.startswith("nested/.git: ") for told in snapshot.left_out)
    assert {"pipe: neither a file nor a link", "socket: neither a file nor a link"} <= set(snapshot.left_out)


def tree_of_readable(place: Path) -> dict[str, tuple[str, int, bytes]]:
    found = {}
    for file in place.iterdir():
        if not file.is_fifo() and not file.is_socket():
            found[file.name] = ("", file.lstat().st_mode, b"")
    return found


async def test_an_unchanged_workdir_has_the_same_snapshot(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    (place / "x").write_text("1")
    first = await workdirs.snapshot(workdir, "one")
    assert await workdirs.snapshot(workdir, "two") == first
    (place / "x").write_text("2")
    second = await workdirs.snapshot(workdir, "three")
    assert (first.number, second.number) == (1, 2)
    assert second.tree != first.tree


async def test_a_snapshot_follows_every_kind_of_change(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    for name in ("stays", "goes", "becomes-link", "becomes-folder", "gets-mode"):
        (place / name).write_text("x\n")
    (place / "folder").mkdir()
    (place / "folder" / "inner").write_text("x\n")
    first = await workdirs.snapshot(workdir, "one")
    (place / "goes").unlink()
    (place / "becomes-link").unlink()
    (place / "becomes-link").symlink_to("stays")
    (place / "becomes-folder").unlink()
    (place / "becomes-folder").mkdir()
    (place / "becomes-folder" / "f").write_text("f\n")
    (place / "gets-mode").chmod(0o755)
    (place / "folder" / "inner").unlink()
    (place / "folder").rmdir()
    (place / "folder").symlink_to("/etc")
    second = await workdirs.snapshot(workdir, "two")
    into = workdirs.home / "proof"
    await workdirs.checkout(second, into)
    found = {name: entry for name, entry in tree_of(into).items() if not name.startswith(".git")}
    wanted = {name: entry for name, entry in tree_of(place).items() if not name.startswith(".git")}
    assert found == wanted
    assert first.tree != second.tree


async def test_the_diff_is_text_whole_or_of_some_files(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    (place / "x.txt").write_text("ex\n")
    (place / "y y.txt").write_text("why\n")
    (place / "picture").write_bytes(b"\0\1\2" * 100)
    snapshot = await workdirs.snapshot(workdir, "one")
    whole = await workdirs.diff(workdir, snapshot)
    assert "+ex" in whole
    assert "+why" in whole
    assert "Binary files" in whole
    assert "\x1b" not in whole
    one = await workdirs.diff(workdir, snapshot, paths=["y y.txt"])
    assert "+why" in one
    assert "+ex" not in one
    assert "3 files changed" in await workdirs.diff(workdir, snapshot, stat=True)
    assert {change.path: (change.added, change.removed) for change in snapshot.files} == {
        "x.txt": (1, 0),
        "y y.txt": (1, 0),
        "picture": (None, None),
    }
    assert (await workdirs.changed_since_base(workdir, snapshot)).merges_cleanly


async def test_a_checkout_is_the_snapshot_and_can_be_removed(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    (place / "x").write_text("1\n")
    snapshot = await workdirs.snapshot(workdir, "one")
    (place / "x").write_text("2\n")
    into = workdirs.home / "proof"
    await workdirs.checkout(snapshot, into)
    assert (into / "x").read_text() == "1\n"
    with pytest.raises(InvalidOperationError, match="is in the way"):
        await workdirs.checkout(snapshot, into)
    (into / "away").symlink_to(place)
    await workdirs.remove(into)
    assert not into.exists()
    assert (place / "x").read_text() == "2\n"
    for kept in (workdirs.home, workdirs.home / "vault", workdirs.home / "repos" / "x", workdirs.home / "proof" / ".."):
        with pytest.raises(InvalidOperationError, match="not removed"):
            await workdirs.remove(kept)


async def test_retire_keeps_all_and_restore_brings_it_back(
    workdirs: Workdirs, workdir: Workdir, tmp_path: Path
) -> None:
    place = Path(workdir.path)
    fill(place)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "out.log").write_text("said\n")
    before = tree_of(place)
    times = {name: (place / name).lstat().st_mtime_ns for name in ("tool.sh", "empty", "link")}
    entry = await workdirs.retire(workdir, record={"task": "T1", "said": "ünïcode"}, logs=logs)
    assert VaultEntry.from_dict(entry.to_dict()) == entry
    assert (entry.key, entry.number, entry.missing, entry.record["said"]) == ("T1", 1, False, "ünïcode")
    assert not place.exists()
    assert await workdirs.list_entries() == [entry]
    assert await workdirs.find("T1") == entry
    assert await workdirs.restore(entry, logs=tmp_path / "logs again") == workdir
    assert tree_of(place) == before
    assert {name: (place / name).lstat().st_mtime_ns for name in times} == pytest.approx(times, abs=2000)
    assert (tmp_path / "logs again" / "out.log").read_text() == "said\n"
    with pytest.raises(InvalidOperationError, match="in the way"):
        await workdirs.restore(entry)


async def test_what_denies_its_owner_is_kept_too(workdirs: Workdirs, workdir: Workdir) -> None:
    place = Path(workdir.path)
    closed = place / "closed"
    closed.mkdir()
    (closed / "file").write_text("kept\n")
    (closed / "file").chmod(0)
    closed.chmod(0)
    entry = await workdirs.retire(workdir, record={})
    assert not place.exists()
    await workdirs.restore(entry)
    assert closed.stat().st_mode & 0o777 == 0
    closed.chmod(0o700)
    assert (closed / "file").stat().st_mode & 0o777 == 0
    (closed / "file").chmod(0o600)
    assert (closed / "file").read_text() == "kept\n"


async def test_retiring_twice_gives_the_same_entry_and_again_after_restore_another(
    workdirs: Workdirs, workdir: Workdir
) -> None:
    entry = await workdirs.retire(workdir, record={})
    assert await workdirs.retire(workdir, record={}) == entry
    await workdirs.restore(entry)
    (Path(workdir.path) / "more").write_text("more")
    again = await workdirs.retire(workdir, record={})
    assert (entry.number, again.number) == (1, 2)


async def test_a_missing_workdir_gives_an_entry_that_says_so(workdirs: Workdirs, workdir: Workdir) -> None:
    Path(workdir.path).rename(workdirs.home / "elsewhere")
    entry = await workdirs.retire(workdir, record={"why": "gone"})
    assert entry.missing
    assert entry.record == {"why": "gone"}
    assert await workdirs.retire(workdir, record={}) == entry
    with pytest.raises(InvalidOperationError, match="was missing"):
        await workdirs.restore(entry)
    with pytest.raises(InvalidOperationError, match="prepare it"):
        await workdirs.snapshot(workdir, "x")


@pytest.mark.usefixtures("workdir")
async def test_workdirs_that_no_key_owns_are_found(workdirs: Workdirs, near: Path) -> None:
    other = await workdirs.plan("T2", near=near)
    await workdirs.prepare(other)
    assert await workdirs.orphans({"T1"}) == [Path(other.path)]
    assert await workdirs.orphans({"T1", "T2"}) == []
    Path(other.path).rename(workdirs.home / "tasks" / ".retired-T2-1")
    assert await workdirs.orphans({"T1", "T2"}) == []
    assert len(await workdirs.orphans({"T1"})) == 1


async def test_a_cancelled_call_still_comes_to_its_end(
    workdirs: Workdirs, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = await workdirs.plan("T3", near=near)
    prepare, begun, may_go_on = workdirs._prepare, threading.Event(), threading.Event()  # noqa: SLF001 - tests may look inside

    def slowly(*arguments: Any, **more: Any) -> tuple[str, ...]:
        begun.set()
        assert may_go_on.wait(60)
        return prepare(*arguments, **more)

    monkeypatch.setattr(workdirs, "_prepare", slowly)
    task = asyncio.create_task(workdirs.prepare(workdir))
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go_on.set()
    await workdirs.prepare(workdir)  # waits for the first
    assert Path(workdir.path).is_dir()


async def test_an_agent_in_it_does_not_find_a_repository_around_the_home(tmp_path: Path, kind: WorkdirKind) -> None:
    project = make_repository(tmp_path / "project")
    async with Workdirs(project / ".ostler") as workdirs:
        workdir = await workdirs.plan("T1", near=project, kind=kind)
        await workdirs.prepare(workdir)
        environment = {"PATH": os.environ["PATH"], **workdir.environment()}
        asked = await asyncio.create_subprocess_exec(
            "git", "rev-parse", "--show-toplevel", cwd=workdir.path, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        told, _ = await asked.communicate()
        assert told.decode().strip() == (workdir.path if kind is WorkdirKind.WORKTREE else "")


async def test_a_directory_has_nothing_to_accept_into(workdirs: Workdirs, workdir: Workdir, near: Path) -> None:
    (Path(workdir.path) / "x").write_text("1\n")
    snapshot = await workdirs.snapshot(workdir, "one")
    if workdir.kind is WorkdirKind.DIRECTORY:
        with pytest.raises(InvalidOperationError, match="no branch to accept into"):
            await workdirs.accept(workdir, snapshot, message="m", author="A <a@b>")
        return
    accepted = await workdirs.accept(workdir, snapshot, message="m", author="A <a@b>")
    assert Accepted.from_dict(accepted.to_dict()) == accepted
    assert git(near, "show", "main:x") == "1\n"
    assert not git(near, "status", "--porcelain")
