"""One home, one manager: who is refused, who takes over, and what the one who lost it does."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lifecycle_aids import Scene, kill_manager, until

import ostler
from ostler.errors import AgentGoneError, LeaseHeldError, StaleWriterError
from ostler.lifecycle.ownership import LOCK_FILE
from ostler.model import AgentState, AttemptOutcome, IsolationLevel, from_micros
from ostler.store import Seams, open_store
from ostler.store.opening import DATABASE_FILE
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

S = AgentState
MINUTE = timedelta(minutes=1)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def test_a_second_manager_is_refused_and_told_who_has_it(scene: Scene) -> None:
    async with scene.open() as manager:
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} manages the home") as refused:
            async with ostler.open(scene.home):
                pass
        assert str(scene.home) in str(refused.value)
        instance = await scene.spawn()  # the first one is not disturbed
        assert await manager.process(instance.instance_id, "hello") == "hello"


def test_another_program_is_refused_too(tmp_path: Path) -> None:
    script = "import asyncio, sys, ostler\nasync def main():\n async with ostler.open(sys.argv[1]): pass\n"
    script += "try:\n asyncio.run(main())\nexcept ostler.LeaseHeldError as error:\n print(error)\n"

    async def main() -> str:
        async with ostler.open(tmp_path):
            other = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
            )
            return (await other.communicate())[0].decode()

    assert f"process {os.getpid()} manages the home" in asyncio.run(main())


async def test_the_home_is_free_again_after_a_close(scene: Scene) -> None:
    for _ in range(3):
        async with scene.open():
            instance = await scene.spawn()
        assert (scene.home / LOCK_FILE).read_text() == ""
    async with scene.open():
        assert await scene.state(instance) is S.TERMINATED


async def test_the_home_is_free_again_after_an_opening_that_failed(scene: Scene) -> None:
    (scene.home / "ostler.db").write_text("this is no database")
    with pytest.raises(ostler.StoreError):
        async with scene.open():
            pass
    (scene.home / "ostler.db").unlink()
    async with scene.open():
        await scene.spawn()


async def test_the_lock_of_one_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    names = kill_manager(tmp_path, "one_ready")
    assert (tmp_path / LOCK_FILE).read_text().isdigit()
    scene = Scene(home=tmp_path, clock=ManualClock(datetime.now(UTC)))
    async with scene.open() as manager:
        assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())
        record = await manager.get_instance(names["ready"])
        assert record is not None
        assert record.state is S.FAILED


@pytest.mark.parametrize("level", [IsolationLevel.NONE, IsolationLevel.THREAD])
async def test_one_whose_store_was_taken_over_stops_its_agents_and_refuses(
    scene: Scene, level: IsolationLevel, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        call = await scene.busy(instance)
        other = open_store(scene.home, Seams(clock=scene.clock))
        async with other:
            await other.take_lease("thief", ttl=MINUTE, steal=True)
            house = manager._house  # noqa: SLF001 - that it shut itself is told to nobody
            scene.clock.advance(10)  # a third of the lease: the next renewal
            await until(lambda: house.shut is not None)
            with pytest.raises(AgentGoneError):
                await call
            await until(lambda: house.lives[instance.instance_id].cell is None)
            for verb in (manager.spawn(scene.request()), manager.why(instance.instance_id), manager.get_statistics()):
                with pytest.raises(StaleWriterError):
                    await verb
            # The record is the new owner's to write.
            record = await other.get_instance(instance.instance_id)
            assert record is not None
            assert record.state is S.PROCESSING
            await other.release_lease()
    assert "Ownership of the home lost" in caplog.text
    async with scene.open():
        assert await scene.state(instance) is S.FAILED
        (first,) = await scene.attempts(instance)
        assert first.outcome is AttemptOutcome.LOST


async def test_a_write_after_the_store_was_taken_over_is_refused(scene: Scene) -> None:
    """Before the next renewal has told: the store itself does not take it."""
    async with scene.open():
        instance = await scene.spawn()
        async with open_store(scene.home, Seams(clock=scene.clock)) as other:
            await other.take_lease("thief", ttl=MINUTE, steal=True)
            with pytest.raises(StaleWriterError):
                await scene.spawn()
            with pytest.raises(StaleWriterError):
                await scene.manager.process(instance.instance_id, "hello")
            await other.release_lease()


def lease_end(scene: Scene) -> datetime:
    with closing(sqlite3.connect(scene.home / DATABASE_FILE)) as database:
        ((micros,),) = database.execute("SELECT expires_at FROM leases").fetchall()
    return from_micros(micros)


async def test_the_lease_is_renewed_for_as_long_as_it_is_needed(scene: Scene) -> None:
    async with scene.open():
        instance = await scene.spawn()
        for _ in range(120):
            await scene.tick(1)
            await until(lambda: lease_end(scene) > scene.clock.wall())
        assert await scene.manager.process(instance.instance_id, "hello") == "hello"
        async with open_store(scene.home, Seams(clock=scene.clock)) as other:
            with pytest.raises(LeaseHeldError):
                await other.take_lease("late", ttl=MINUTE)


async def test_a_home_whose_name_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    """It would have to be told to agents and be named in records, which are text."""
    odd = tmp_path / os.fsdecode(b"h\xff")
    with pytest.raises(ostler.StoreError, match=r"is no UTF-8; choose a directory whose path is"):
        async with ostler.open(odd):
            pass
    assert not odd.exists()
