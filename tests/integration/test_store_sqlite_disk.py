"""A disk that is full, slow to lock, or broken: new work is refused, reading goes on, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from store_ground import count, current, do_nothing, finished, moved, newest, readied, ready, reserved
from store_invariants import invariant_faults

from ostler.errors import OutcomeUnknownError, StoreBusyError, StoreFailedError, StoreFullError
from ostler.failpoints import FaultPlan, FaultPoint, Seams
from ostler.model.instance import AgentInstance
from ostler.model.states import AgentState
from ostler.store.connection import Connection
from ostler.store.sqlite import SqliteConnection, store_error
from ostler.store.store import SqliteDatabase, Store
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

BIG = {"big": "x" * 200_000}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


class Watched(SqliteDatabase):
    """Its writing connection can be reached by a test, while the writer is idle."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "ostler.db")
        self.writer: SqliteConnection | None = None

    def open_writer(self, fault: FaultPoint) -> Connection:
        opened = super().open_writer(fault)
        assert isinstance(opened, SqliteConnection)
        self.writer = opened
        return opened

    def pragma(self, text: str) -> object:
        assert self.writer is not None
        return self.writer.fetch(f"PRAGMA {text}", {})[0][0]


async def test_every_commit_of_the_writer_is_synced(home: Path) -> None:
    watched = Watched(home)
    async with Store(watched) as store:
        await reserved(store)
        assert watched.pragma("journal_mode") == "wal"
        assert watched.pragma("synchronous") == 2
        assert watched.pragma("foreign_keys") == 1


# --- full --------------------------------------------------------------------------------------------


async def test_a_full_disk_refuses_new_work_and_heals_by_itself(home: Path) -> None:
    watched, clock = Watched(home), ManualClock()
    async with Store(watched, Seams(clock=clock)) as store:
        one = await ready(store)
        watched.pragma(f"max_page_count = {watched.pragma('page_count')}")
        with pytest.raises(StoreFullError, match="free some space"):
            await _fill(store)
        number = await store.read(count("agent_instances"))
        assert await current(store, one) == one, "reading goes on"
        with pytest.raises(StoreFullError):
            await reserved(store, context=BIG)
        watched.pragma("max_page_count = 1000000")
        await moved(store, one, AgentState.PROCESSING)
        await reserved(store, context=BIG)
        assert await store.read(count("agent_instances")) == number + 1
        assert await invariant_faults(store, clock.wall()) == []


async def _fill(store: Store, acknowledged: list[UUID] | None = None) -> None:
    made = [] if acknowledged is None else acknowledged
    for _ in range(100):
        made.append((await reserved(store, context={"big": "x" * 50_000})).instance_id)


async def test_a_disk_that_fills_within_a_batch_fails_the_whole_of_it_and_commits_no_part(home: Path) -> None:
    """SQLite ends the whole transaction: a later command of the batch must not be committed alone."""
    watched, clock = Watched(home), ManualClock()
    async with Store(watched, Seams(clock=clock)) as store:
        await reserved(store)
        watched.pragma(f"max_page_count = {watched.pragma('page_count')}")
        before = await newest(store)
        loop = asyncio.get_running_loop()
        begun, gone_on = asyncio.Event(), asyncio.Event()

        def hold(_: Transaction) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(gone_on.wait(), loop).result(30)

        held = store.submit(hold)
        await begun.wait()
        wishes = [asyncio.ensure_future(reserved(store, name, context=wish)) for name, wish in WISHES]
        await asyncio.sleep(0)
        gone_on.set()
        await held
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreFullError] * len(WISHES)
        watched.pragma("max_page_count = 1000000")
        assert await store.read(count("agent_instances")) == 1, "what was told as failed is not there"
        assert await newest(store) == before
        assert await invariant_faults(store, clock.wall()) == []
        await reserved(store, context=BIG)


WISHES = [("small", None), ("large", BIG), ("small too", None)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two megabytes of real file system; needs the right to mount."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a small disk here: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


async def test_a_disk_that_is_really_full_is_borne_and_works_again_with_space(small_disk: Path) -> None:
    ballast, clock = small_disk / "ballast", ManualClock()
    ballast.write_bytes(b"x" * 700_000)
    async with Store(small_disk / "home", Seams(clock=clock)) as store:
        one = await reserved(store)
        acknowledged: list[UUID] = []
        with pytest.raises(StoreFullError):
            await _fill(store, acknowledged)
        assert await current(store, one) == one
        ballast.unlink()
        up = await readied(store, one)
        await finished(store, await moved(store, up, AgentState.TERMINATING))
    async with Store(small_disk / "home", Seams(clock=clock)) as store:
        assert await invariant_faults(store, clock.wall()) == []
        for instance_id in acknowledged:
            await current(store, instance_id)


def test_no_room_for_the_memory_that_readers_share_is_a_full_disk(tmp_path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    assert isinstance(store_error(error, tmp_path), StoreFullError)


# --- broken ------------------------------------------------------------------------------------------


async def test_an_input_output_error_ends_all_writing_until_a_restart(home: Path) -> None:
    plan = FaultPlan(action="oserror")
    async with Store(home, Seams(fault=plan)) as store:
        one = await ready(store)
        plan.name = "store.commit.before"
        with pytest.raises(StoreFailedError, match="restart to recover"):
            await moved(store, one, AgentState.PROCESSING)
        plan.name = ""
        with pytest.raises(StoreFailedError, match="injected"):
            await moved(store, one, AgentState.PROCESSING)
        assert await current(store, one) == one
    async with Store(home) as store:
        assert (await moved(store, one, AgentState.PROCESSING)).version == one.version + 1


class Unsynced:
    """A connection of the driver whose sync fails once the test says so."""

    def __init__(self, inner: sqlite3.Connection) -> None:
        self._inner = inner
        self.broken = False

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self.broken and sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._inner.execute(sql, *values)  # type: ignore[arg-type]  # passed on as they came

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


async def test_a_sync_that_fails_leaves_its_commit_unknown_and_is_never_tried_again(home: Path) -> None:
    watched = Watched(home)
    async with Store(watched) as store:
        one = await ready(store)
        assert watched.writer is not None
        driver = Unsynced(watched.writer._db)  # noqa: SLF001 - a disk that fails at will
        watched.writer._db = driver  # type: ignore[assignment]  # noqa: SLF001 - as above
        driver.broken = True
        with pytest.raises(OutcomeUnknownError, match="read the record again"):
            await moved(store, one, AgentState.PROCESSING)
        driver.broken = False
        for _ in range(2):
            with pytest.raises(StoreFailedError, match="restart to recover"):
                await moved(store, one, AgentState.PROCESSING)
        assert await current(store, one) == one
    async with Store(home) as store:
        await moved(store, await current(store, one), AgentState.PROCESSING)


class Failing(SqliteConnection):
    """Its disk cannot be read any more, once a test says so."""

    broken = False

    def fetch(self, sql: str, values: object) -> list[tuple[object, ...]]:
        if self.broken:
            raise StoreFailedError("a sector is gone")
        return super().fetch(sql, values)  # type: ignore[arg-type]  # passed on as it came


async def test_a_disk_error_while_reading_inside_a_transaction_fails_the_whole_batch(home: Path) -> None:
    async with Store(home) as store:
        one = await ready(store)

    class Breaking(SqliteDatabase):
        writer: Failing

        def open_writer(self, fault: FaultPoint) -> Connection:
            self.writer = Failing(self.path)
            self.writer.migrate(fault)
            return self.writer

    breaking = Breaking(home / "ostler.db")
    async with Store(breaking) as store:
        before = await newest(store)
        breaking.writer.broken = True
        wishes = (moved(store, one, AgentState.PROCESSING), store.run(do_nothing))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert isinstance(answers[0], StoreFailedError)
        breaking.writer.broken = False
        with pytest.raises(StoreFailedError, match="a sector is gone"):
            await moved(store, one, AgentState.PROCESSING)
        assert await newest(store) == before


_LIMITED = """
import asyncio, resource, sys
from ostler.errors import OutcomeUnknownError, StoreFailedError
from ostler.store.store import Store
from store_ground import current, reserved

async def main():
    async with Store(sys.argv[1]) as store:
        one = await reserved(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        seen = []
        for _ in range(3):
            try:
                await reserved(store, context={"big": "x" * 200_000})
            except (OutcomeUnknownError, StoreFailedError) as error:
                seen.append(error)
        assert len(seen) == 3, seen
        assert "disk I/O error" in str(seen[0]), seen
        assert [type(error) for error in seen[1:]] == [StoreFailedError] * 2, seen
        assert await current(store, one) == one

asyncio.run(main())
"""


def test_a_real_input_output_error_is_seen_as_one(home: Path) -> None:
    """The kernel refuses to let the file grow: SQLite reports what a broken disk would make it report."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(home), "600000"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


# --- locked ------------------------------------------------------------------------------------------


async def test_a_lock_held_by_another_process_is_said_and_passes(home: Path) -> None:
    watched = Watched(home)
    async with Store(watched) as store:
        one = await ready(store)
        watched.pragma("busy_timeout = 20")
        other = sqlite3.connect(home / "ostler.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError):
            await moved(store, one, AgentState.PROCESSING)
        assert await current(store, one) == one
        other.execute("ROLLBACK")
        other.close()
        assert isinstance(await moved(store, one, AgentState.PROCESSING), AgentInstance)
