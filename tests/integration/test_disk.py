"""What a home takes on the disk: measured beside the work, each file once; and the limit that holds new tasks back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from api_served import serving
from tasks_ground import SHELL, T, TaskGround, ground, opened, repository, until_async, working_queue

from ostler import (
    Client,
    CrewSettings,
    InboxKind,
    InboxRow,
    InvalidOperationError,
    Supervisor,
    TaskNotFoundError,
)
from ostler.lifecycle.disk import DiskMeter
from ostler.tasks.make_room import make_room
from ostler.testing.clock import ManualClock

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio
MEGABYTE = 1024 * 1024
#: Writes that much into an ignored file of its workdir; random, so that the vault cannot make it small.
FILL = "head -c {size} /dev/urandom > filling"


@asynccontextmanager
async def limited(repository: Path, home: Path, disk: str) -> AsyncIterator[TaskGround]:
    async with opened(repository, home, disk=disk) as ground:
        ground.commit(_gitignore="filling\n")  # or the snapshots would hold it too, and these are kept
        yield ground


async def disk_row(ground: TaskGround) -> InboxRow:
    (row,) = [row for row in await ground.manager.inbox() if row.kind is InboxKind.DISK]
    return row


def occupied(path: Path) -> int:
    return path.lstat().st_blocks * 512


# --- measured ----------------------------------------------------------------------------------------


async def test_a_file_with_several_names_counts_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
    big = tmp_path / "tasks" / "one" / "big"
    big.write_bytes(os.urandom(MEGABYTE))
    (tmp_path / "tasks" / "two" / "big").hardlink_to(big)
    (tmp_path / "tasks" / "two" / "link").symlink_to(big)
    (tmp_path / "vault").mkdir()
    (tmp_path / "vault" / "again").hardlink_to(big)
    usage = (await DiskMeter(tmp_path, ManualClock(), None).measure()).usage
    assert MEGABYTE <= usage.workdirs + usage.vault < 2 * MEGABYTE


async def test_a_measurement_is_shared_and_kept_for_a_while(tmp_path: Path) -> None:
    clock = ManualClock()
    meter = DiskMeter(tmp_path, clock, 1)
    first, shared = await asyncio.gather(meter.measure(), meter.measure())
    assert first is shared
    (tmp_path / "ostler.db").write_bytes(bytes(MEGABYTE))
    assert await meter.measure(10) is first
    clock.advance(10)
    assert (await meter.measure(10)).usage.store >= MEGABYTE


async def test_a_home_is_told_by_kind_and_by_task(ground: TaskGround) -> None:
    small = await ground.done("echo some > small.txt; echo hello")
    large = await ground.done(FILL.format(size=MEGABYTE))
    await ground.tasks.accept(large.key)
    await ground.tasks.retire(large.key)
    usage = await ground.manager.disk(max_age=0)
    assert [task.key for task in usage.tasks] == [large.key, small.key]
    assert [task.state for task in usage.tasks] == [T.ACCEPTED, T.COMPLETED]
    assert usage.tasks[0].vault >= MEGABYTE
    assert usage.tasks[0].workdir == 0
    assert usage.tasks[1].workdir > 0
    assert usage.tasks[1].logs > 0
    assert usage.store >= occupied(ground.home / "ostler.db") > 0
    assert usage.repositories > 0
    parts = (usage.workdirs, usage.vault, usage.logs, usage.store, usage.repositories, usage.homes, usage.other)
    assert usage.total == sum(parts)
    assert usage.limit is usage.share is None


# --- the limit ---------------------------------------------------------------------------------------


async def test_a_full_home_begins_no_task_and_says_so(repository: Path, tmp_path: Path) -> None:
    async with limited(repository, tmp_path / "home", "10M") as ground:
        unreviewed = await ground.done(FILL.format(size=12 * MEGABYTE))
        async with working_queue(ground):
            waiting = await ground.add("true")
            await make_room(ground.tasks.tasks)
            assert not await ground.manager.has_room()
            assert "; no new task begins" in (await disk_row(ground)).sentence
            assert "ostler df" in await ground.tasks.next_step(await ground.get(waiting))
            assert "no new task begins" in (ground.tasks.untaken(waiting) or "")
            why = await ground.tasks.why(waiting.key)
            assert why.verdict == "the limit of the disk is reached"
            assert "allows 10 M" in why.evidence[0]
            assert "ostler df" in why.what_would_change_it[0]
            with pytest.raises(InvalidOperationError, match="no new task begins"):
                await ground.tasks.run(waiting.key)
            assert (await ground.get(waiting)).state is T.QUEUED
            assert (ground.place(unreviewed) / "filling").is_file()
            await ground.tasks.reject(unreviewed.key, reason="too large")
            await make_room(ground.tasks.tasks)
            await ground.until_state(waiting, T.COMPLETED)
        assert not ground.place(unreviewed).exists()


async def test_a_crew_begins_nothing_either(repository: Path, tmp_path: Path) -> None:
    async with limited(repository, tmp_path / "home", "10M") as ground:
        filling = ground.home / "tasks" / "filling"
        filling.parent.mkdir(exist_ok=True)
        filling.write_bytes(os.urandom(12 * MEGABYTE))
        await make_room(ground.tasks.tasks)
        waiting = await ground.add("true")
        async with Supervisor(ground.tasks, {"coder": CrewSettings(agent=SHELL)}):
            assert "ostler df" in await ground.tasks.next_step(waiting)
            filling.unlink()
            assert (await ground.get(waiting)).state is T.QUEUED
            await make_room(ground.tasks.tasks)
            await ground.until_state(waiting, T.COMPLETED)


async def test_the_oldest_reviewed_work_goes_first(repository: Path, tmp_path: Path) -> None:
    """Of four of 10 MB each, two were reviewed and are in the vault; one was retired without a review."""
    async with limited(repository, tmp_path / "home", "40M") as ground:
        oldest, unreviewed, newer = [await ground.done(FILL.format(size=10 * MEGABYTE)) for _ in range(3)]
        await ground.tasks.retire(unreviewed.key)
        for task in (oldest, newer):
            await ground.tasks.reject(task.key, reason="no")
            await ground.tasks.retire(task.key)
        assert await ground.manager.has_room()
        large = await ground.done(FILL.format(size=10 * MEGABYTE))
        usage = await make_room(ground.tasks.tasks)
        assert not usage.is_full
        vault = {path.name for path in (ground.home / "vault").iterdir() if path.is_dir()}
        assert vault == {f"{unreviewed.key}-1", f"{newer.key}-1"}
        assert (await ground.get(oldest)).vault is None
        assert (ground.place(large) / "filling").is_file()
        with pytest.raises(TaskNotFoundError, match=f"nothing of {oldest.key} in the vault"):
            await ground.tasks.unretire(oldest.key)


async def test_output_without_a_record_goes_before_any_work(repository: Path, tmp_path: Path) -> None:
    async with limited(repository, tmp_path / "home", "10M") as ground:
        rejected = await ground.done("true")
        await ground.tasks.reject(rejected.key, reason="no")
        stray = ground.home / "logs" / str(ground.manager.new_id())
        stray.mkdir(parents=True)
        (stray / "1.log").write_bytes(os.urandom(12 * MEGABYTE))
        assert not (await make_room(ground.tasks.tasks)).is_full
        assert not stray.exists()
        assert ground.place(rejected).is_dir()


async def test_from_80_per_cent_on_a_row_is_in_the_inbox(repository: Path, tmp_path: Path) -> None:
    async with limited(repository, tmp_path / "home", "40M") as ground:
        filling = ground.home / "tasks" / "filling"
        filling.parent.mkdir(exist_ok=True)
        filling.write_bytes(os.urandom(24 * MEGABYTE))
        assert not (await ground.manager.disk(max_age=0)).is_high
        assert await ground.manager.inbox() == []
        filling.write_bytes(os.urandom(34 * MEGABYTE))
        first = await ground.manager.disk(max_age=0)
        await ground.manager.disk(max_age=0)
        row = await disk_row(ground)
        assert (row.since, row.next) == (first.measured_at, "ostler df")
        assert row.sentence.endswith("; at 100 % no new task begins")
        assert await ground.manager.has_room()
        filling.unlink()
        await ground.manager.disk(max_age=0)
        assert await ground.manager.inbox() == []


async def test_room_that_was_made_by_hand_is_noticed(repository: Path, tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(repository, tmp_path / "home", disk="1M", clock=clock) as ground:
        filling = ground.home / "tasks" / "filling"
        filling.parent.mkdir(exist_ok=True)
        filling.write_bytes(os.urandom(2 * MEGABYTE))
        assert not await ground.manager.has_room()
        filling.unlink()
        clock.jump(timedelta(minutes=5))
        clock.advance(60)
        await until_async(ground.manager.has_room)


# --- over the wire -----------------------------------------------------------------------------------


async def test_a_client_reads_what_the_home_takes(tmp_path: Path) -> None:
    (tmp_path / "ostler.toml").write_text('[retention]\ndisk = "1G"\n')
    async with serving(tmp_path / ".ostler") as served, Client(served.home) as client:
        usage = await client.disk()
        assert usage.limit == 1024 * MEGABYTE
        assert usage.store > 0
        assert 0 < (usage.share or 0) < 0.8
        values = await client.call("disk")
        assert values["total"] == usage.total
