"""`kill -9` between any two steps, and at any moment: the same call again finishes, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import workdirs_victim
from workdirs_ground import Ground, git, make_repository, tree_of

from ostler.failpoints import POINTS
from ostler.workdirs import Accepted, Workdirs

pytestmark = pytest.mark.anyio
VICTIM = workdirs_victim.__file__
REVIEW = sorted(point for point in POINTS if point.startswith("review."))
ROUNDS = 6


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    repository = make_repository(tmp_path / "user")
    git(repository, "tag", "start")
    async with Workdirs(tmp_path / "home") as workdirs:
        yield Ground(repository, tmp_path / "home", workdirs)


def started(ground: Ground, verbs: str, point: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, VICTIM, str(ground.home), str(ground.repository), verbs, point]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def killed(ground: Ground, verbs: str, point: str) -> None:
    """Run the verbs until the point kills the program."""
    program = started(ground, verbs, point if ":" in point else f"{point}:1:kill")
    _, told = await asyncio.to_thread(program.communicate)
    assert program.returncode == -9, told


async def accepted_again(ground: Ground) -> Accepted:
    workdir = await ground.workdirs.plan("T1", near=ground.repository, base="start")
    snapshot = await ground.workdirs.snapshot(workdir, "as it is")
    accepted = await ground.accept(workdir, snapshot)
    assert await ground.accept(workdir, snapshot) == accepted
    return accepted


def accepted_once(ground: Ground) -> None:
    assert not ground.status()
    assert not (ground.repository / ".git" / "index.lock").exists()
    assert not (ground.repository / ".git" / "ostler-index").exists()
    assert ground.git("rev-list", "--count", "start..main").strip() == "1"
    assert (ground.repository / "a.txt").read_text() == "agent\n"
    assert not (ground.repository / "b.txt").exists()
    ground.git("fsck", "--strict")


@pytest.mark.parametrize("point", sorted(point for point in POINTS if point.startswith("prepare.")))
async def test_prepare_finishes(ground: Ground, point: str) -> None:
    await killed(ground, "prepare", point)
    _, place = await ground.prepared()
    assert not git(place, "status", "--porcelain")
    assert git(place, "branch", "--show-current").strip() == "ostler/T1"
    assert [file.name for file in (ground.home / "tasks").iterdir()] == ["T1"]


@pytest.mark.parametrize("point", REVIEW)
async def test_accept_finishes_once(ground: Ground, point: str) -> None:
    (ground.repository / "sub" / "c.txt").write_text("c\n")
    await killed(ground, "prepare,work,accept", point)
    await accepted_again(ground)
    accepted_once(ground)


@pytest.mark.parametrize("point", ["review.ref.before", "review.ref.after", "review.files.after"])
async def test_the_next_start_alone_brings_the_checkout_in_order(ground: Ground, point: str) -> None:
    """While the lock is held the user's git refuses to commit, so nothing can be taken back by accident."""
    await killed(ground, "prepare,work,accept", point)
    (ground.repository / "untracked").write_text("u\n")
    assert (ground.repository / ".git" / "index.lock").exists()
    assert await ground.workdirs.recover() == []
    assert ground.status() == "?? untracked\n"
    assert not (ground.repository / ".git" / "index.lock").exists()
    assert await ground.workdirs.recover() == []


async def test_files_that_were_written_before_the_kill_count_as_done(ground: Ground) -> None:
    await killed(ground, "prepare,work,accept", "review.ref.after")
    (ground.repository / "new.txt").write_text("new 1\n")  # as `read-tree` has it when it is killed half way
    (ground.repository / "b.txt").unlink()
    await ground.workdirs.recover()
    accepted_once(ground)


async def test_what_the_user_wrote_after_the_kill_is_not_overwritten(ground: Ground) -> None:
    await killed(ground, "prepare,work,accept", "review.ref.after")
    (ground.repository / "a.txt").write_text("the user's own\n")
    await ground.workdirs.recover()
    assert (ground.repository / "a.txt").read_text() == "the user's own\n"
    assert not (ground.repository / ".git" / "index.lock").exists()


@pytest.mark.parametrize(
    "point", ["review.ref.before:2", "review.ref.after:2", "review.files.after:2", "review.index.after:2"]
)
async def test_undo_finishes(ground: Ground, point: str) -> None:
    await killed(ground, "prepare,work,undo", f"{point}:kill")
    await ground.workdirs.undo(await accepted_again(ground))
    assert not ground.status()
    assert ground.tip() == ground.tip("start")
    assert (ground.repository / "b.txt").exists()


@pytest.mark.parametrize("point", sorted(point for point in POINTS if point.startswith("retire.")))
async def test_retire_finishes_and_loses_nothing(ground: Ground, point: str) -> None:
    workdir, place = await ground.prepared()
    (place / "work").write_text("work\n")
    before = tree_of(place)
    await killed(ground, "retire", point)
    entry = await ground.workdirs.retire(workdir.evolve(base=ground.tip("start")), record={})
    assert not entry.missing
    assert len(await ground.workdirs.list_entries()) == 1
    assert list((ground.home / "tasks").iterdir()) == []
    await ground.workdirs.restore(entry)
    assert tree_of(place) == before


async def test_a_half_retired_workdir_is_saved_before_a_fresh_one_is_made(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "work").write_text("first\n")
    await killed(ground, "retire", "retire.move.after")
    await ground.workdirs.prepare(workdir, fresh=True)
    (place / "work").write_text("second\n")
    second = await ground.workdirs.retire(workdir, record={})
    assert second.number == 2
    first, _ = await ground.workdirs.list_entries()
    await ground.workdirs.restore(first)
    assert (place / "work").read_text() == "first\n"


async def test_a_return_that_was_announced_and_cut_off_hides_no_entry(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "mine").write_text("work\n")
    entry = await ground.workdirs.retire(workdir, record={})
    (ground.home / "vault" / ".live-T1").touch()
    (ground.home / "tasks" / ".new-T1").mkdir()
    assert await ground.workdirs.retire(workdir, record={}) == entry
    await ground.workdirs.restore(entry)
    assert (place / "mine").read_text() == "work\n"


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_killed_at_any_moment_every_byte_is_somewhere(ground: Ground, seed: int) -> None:
    chance = random.Random(seed)
    verbs = "prepare,work,accept,retire,restore,work,accept,undo,retire,restore"
    program = started(ground, verbs)
    assert program.stdout is not None
    wanted = chance.randrange(8)
    for _ in range(wanted):
        await asyncio.to_thread(program.stdout.readline)
    await asyncio.sleep(chance.random() * 0.3)
    program.kill()
    said, _ = await asyncio.to_thread(program.communicate)
    done = wanted + len(said.split())
    await ground.workdirs.recover()
    workdir = await ground.workdirs.plan("T1", near=ground.repository, base="start")
    place = Path(workdir.path)
    if not place.exists() and not (entry := await ground.workdirs.retire(workdir, record={})).missing:
        await ground.workdirs.restore(entry)
    await ground.workdirs.prepare(workdir)
    if done >= 2:
        assert (place / "new.txt").exists()
    (place / "new.txt").write_text("last\n")
    snapshot = await ground.workdirs.snapshot(workdir, "last")
    assert (await ground.accept(workdir, snapshot)).why_not_followed is None
    assert not ground.status()
    assert (ground.repository / "new.txt").read_text() == "last\n"
    ground.git("fsck", "--strict")
