"""One owner: a lock on the home, a lease in the store; and what happens to a manager that loses them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lifecycle_agents import Stage
from lifecycle_ground import NONE, PROCESS, THREAD, Crew, S, at, do, killed, opened, until
from machine_ground import lives, swept

import ostler
from ostler import (
    AgentGoneError,
    AttemptOutcome,
    LeaseHeldError,
    OstlerError,
    Seams,
    StaleWriterError,
    StoreError,
)
from ostler.home import DATABASE_FILE, LOCK_FILE
from ostler.model.types import from_micros
from ostler.store.moves import get_instance
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

MINUTE = timedelta(minutes=1)


@asynccontextmanager
async def heir(crew: Crew) -> AsyncIterator[Store]:
    """Another owner takes the store over."""
    async with Store(crew.where, Seams(clock=crew.clock)) as other:
        await other.take_lease("heir", ttl=MINUTE, steal=True)
        yield other
        await other.release_lease()


async def test_a_second_manager_is_refused_and_told_who_has_it(crew: Crew) -> None:
    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} manages the home") as refused:
        async with ostler.open(crew.home):
            pass
    assert str(crew.home) in str(refused.value)
    agent = await crew.start()
    assert await agent.ask(do("echo", value=1)) == 1, "the first one is not disturbed"


@at(NONE)
async def test_another_program_is_refused_too(crew: Crew) -> None:
    script = "import asyncio, sys, ostler\nasync def main():\n async with ostler.open(sys.argv[1]): pass\n"
    script += "try:\n asyncio.run(main())\nexcept ostler.LeaseHeldError as error:\n print(error)\n"
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(crew.home), stdout=asyncio.subprocess.PIPE
    )
    said = (await other.communicate())[0].decode()
    assert f"process {os.getpid()} manages the home" in said


@at(NONE)
async def test_the_home_is_free_again_after_a_close_and_after_an_opening_that_failed(crew: Crew) -> None:
    for _ in range(3):
        agent = await crew.start()
        await crew.close()
        assert (crew.home / LOCK_FILE).read_text() == ""
        await crew.open()
    assert await crew.state(crew.again(agent)) is S.TERMINATED
    await crew.close()
    for file in crew.home.glob("ostler.db*"):
        file.unlink()
    (crew.home / DATABASE_FILE).write_text("this is no database")
    with pytest.raises(StoreError):
        await crew.open()
    (crew.home / DATABASE_FILE).unlink()
    await crew.open()
    await crew.start()


async def test_an_opening_that_is_called_off_leaves_the_home_free(tmp_path: Path) -> None:
    async def opening() -> None:
        async with ostler.open(tmp_path / "home"):
            await asyncio.Event().wait()

    def writers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ostler-writer"}

    earlier = writers()
    for steps in range(0, 40, 3):
        task = asyncio.create_task(opening())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    async with ostler.open(tmp_path / "home") as manager:
        assert (await manager.get_statistics()).active_instances == 0
    await until(lambda: not writers() - earlier, "a store that came up late was not closed")


async def one_ready(crew: Crew) -> dict[str, Any]:
    crew.level = THREAD
    return {"id": (await crew.start()).instance_id}


async def test_the_lock_of_a_killed_manager_holds_no_other_up(home: Path, stage: Stage) -> None:
    crew = Crew(home, ManualClock(datetime.now(UTC)), stage, THREAD)
    made = await killed(one_ready, crew)
    assert (home / LOCK_FILE).read_text().isdigit()
    async with opened(crew):
        assert (home / LOCK_FILE).read_text() == str(os.getpid())
        await crew.reaches(crew.manager.handle(made["id"]), S.FAILED)


async def test_a_manager_whose_store_was_taken_over_stops_its_agents_and_refuses(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await crew.start()
    call = await crew.busy(agent)
    await crew.reaches(agent, S.PROCESSING)
    request = crew.request()
    async with heir(crew) as other:
        crew.advance(10)  # a third of the lease: the next renewal
        await until(lambda: crew.runtime.closing is not None)
        with pytest.raises(AgentGoneError, match="another manager owns"):
            await call
        await until(lambda: not crew.runtime.instances)
        verbs = (
            crew.manager.spawn(request),
            agent.why(),
            crew.manager.get_statistics(),
            agent.stop(),
            agent.ask(do("echo")),
        )
        for verb in verbs:
            with pytest.raises(StaleWriterError):
                await verb
        record = await other.read(get_instance, UUID(str(agent.instance_id)))
        assert record is not None
        assert record.state is S.PROCESSING, "the record is the new owner's to write"
        await crew.close()
    assert "Ownership of the home lost" in caplog.text
    await crew.open()
    await crew.reaches(crew.again(agent), S.FAILED)
    (first,) = await crew.attempts(crew.again(agent))
    assert first.outcome is AttemptOutcome.LOST


@at(PROCESS)
async def test_a_manager_that_loses_its_lease_lets_go_of_what_outlives_it(crew: Crew) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    call = await crew.busy(agent, id="r-1")
    await crew.reaches(agent, S.PROCESSING)
    async with heir(crew):
        crew.advance(10)
        await until(lambda: crew.runtime.closing is not None)
        with pytest.raises(AgentGoneError, match="another manager owns"):
            await call
        await crew.close()
    assert lives(pid)
    await crew.open()
    agent = crew.again(agent)
    joined = crew.begin(agent.ask(do("hang"), id="r-1"))
    crew.stage.release("work")
    assert await joined == "let go"
    assert (await agent.ask(do("know")))["pid"] == pid


async def test_a_write_after_the_store_was_taken_over_is_refused_before_the_next_renewal(crew: Crew) -> None:
    agent = await crew.start()
    async with heir(crew):
        with pytest.raises(StaleWriterError):
            await crew.start()
        with pytest.raises((StaleWriterError, AgentGoneError)):
            await agent.pause()
        await crew.close()
    await crew.open()


def lease_end(home: Path) -> datetime:
    with closing(sqlite3.connect(home / DATABASE_FILE)) as database:
        ((micros,),) = database.execute("SELECT expires_at FROM leases").fetchall()
    return from_micros(micros)


@at(NONE)
async def test_the_lease_is_renewed_for_as_long_as_it_is_needed(crew: Crew) -> None:
    agent = await crew.start()
    for _ in range(12):
        await crew.tick(10, step=5)
        await until(lambda: lease_end(crew.home) > crew.clock.wall())
    assert await agent.ask(do("echo", value=1)) == 1
    async with Store(crew.home, Seams(clock=crew.clock)) as other:
        with pytest.raises(LeaseHeldError):
            await other.take_lease("late", ttl=MINUTE)


# --- a home that is changed under its manager ---------------------------------------------------------


def remove_home(home: Path) -> None:
    shutil.rmtree(home)


def empty_database(home: Path) -> None:
    with closing(sqlite3.connect(home / DATABASE_FILE)) as database, database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if not table.startswith("sqlite_"):
                database.execute(f"DELETE FROM {table}")


def truncate_database(home: Path) -> None:
    (home / DATABASE_FILE).write_bytes(b"")


@pytest.mark.parametrize("harm", [remove_home, empty_database, truncate_database])
@at(THREAD)
async def test_a_home_that_is_removed_or_emptied_is_refused_with_a_sentence(
    crew: Crew, harm: Callable[[Path], None]
) -> None:
    agent = await crew.start()
    harm(crew.home)
    with pytest.raises(OstlerError) as refused:
        await crew.start()
    assert len(str(refused.value)) > 20
    with pytest.raises(OstlerError):
        await agent.pause()
    result = await crew.passes(_outcome(agent.stop()), 30)
    assert isinstance(result, OstlerError) or result.error_message, "nothing is acknowledged that is not written"
    await crew.close()


async def _outcome(work: Any) -> Any:
    try:
        return await work
    except OstlerError as error:
        return error


@at(PROCESS)
async def test_agents_of_a_home_that_was_removed_can_be_ended(crew: Crew) -> None:
    with swept(crew.home):
        agent = await crew.start()
        pid = (await agent.ask(do("know")))["pid"]
        (crew.home / DATABASE_FILE).unlink()
        result = await crew.passes(_outcome(agent.stop()), 60)
        assert isinstance(result, OstlerError) or result.error_message
        await until(lambda: not lives(pid))
        await crew.close()
