from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostler.errors import StoreBusyError, StoreError, StoreFailedError, StoreFullError, StoreTooNewError
from ostler.model import AgentState
from ostler.seams import FaultPlan, InjectedCrash
from ostler.store import Backend, EngineStore, Seams, open_store
from ostler.store.opening import sqlite_backend
from ostler.store.queries import migrations, statements
from ostler.store.sqlite import SqliteSession
from ostler.testing import ManualClock, invariant_faults
from ostler.testing.store_suite.ground import brought_to, moved, reserved

pytestmark = pytest.mark.anyio

STEPS = sum(len(statements(script)) for _, script in migrations("sqlite"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


class Watched:
    """A store whose writing connection a test can reach."""

    def __init__(self, home: Path, seams: Seams | None = None) -> None:
        inner = sqlite_backend(home / "ostler.db")
        self.writers: list[SqliteSession] = []

        def open_writer(fault: object) -> SqliteSession:
            session = inner.open_writer(fault)  # type: ignore[arg-type]
            assert isinstance(session, SqliteSession)
            self.writers.append(session)
            return session

        self.store = EngineStore(Backend(open_writer=open_writer, open_reader=inner.open_reader), seams)

    def pragma(self, text: str) -> object:
        """Asked on the writer's own connection, while it is idle."""
        return self.writers[-1].connection.execute(f"PRAGMA {text}").fetchone()[0]


def shape(home: Path) -> tuple[int, int]:
    """Version and number of tables, read without Ostler."""
    with sqlite3.connect(home / "ostler.db") as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    connection.close()
    return version, tables


# --- the file ---------------------------------------------------------------------------------------


async def test_only_the_owner_may_look_into_the_home(home: Path) -> None:
    async with open_store(home) as store:
        await reserved(store)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()}
    assert modes == {"ostler.db": 0o600, "ostler.db-wal": 0o600, "ostler.db-shm": 0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


async def test_every_commit_of_the_writer_is_synced(home: Path) -> None:
    watched = Watched(home)
    async with watched.store as store:
        await reserved(store)
        assert watched.pragma("journal_mode") == "wal"
        assert watched.pragma("synchronous") == 2
        assert watched.pragma("foreign_keys") == 1
    assert os.stat(home / "ostler.db").st_size > 0


async def test_a_store_of_a_newer_program_is_refused_and_left_as_it_is(home: Path) -> None:
    async with open_store(home) as store:
        await reserved(store)
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (home / "ostler.db").read_bytes()
    with pytest.raises(StoreTooNewError, match=r"shape 99, this program knows up to \d+: it was made by a newer"):
        await open_store(home).open()
    assert (home / "ostler.db").read_bytes() == before


@pytest.mark.parametrize("version", [0, 1, 7])
async def test_a_database_of_another_program_is_refused_and_left_as_it_is(home: Path, version: int) -> None:
    home.mkdir()
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = (home / "ostler.db").read_bytes()
    with pytest.raises(StoreError, match="database of another program"):
        await open_store(home).open()
    assert (home / "ostler.db").read_bytes() == before


async def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(home: Path) -> None:
    home.mkdir()
    (home / "ostler.db").write_text("a shopping list\n" * 100)
    with pytest.raises(StoreError, match="not a database"):
        await open_store(home).open()
    assert (home / "ostler.db").read_text() == "a shopping list\n" * 100


# --- trouble with the disk --------------------------------------------------------------------------


async def test_a_full_disk_turns_work_away_and_reading_goes_on(home: Path) -> None:
    watched = Watched(home, Seams(clock=ManualClock()))
    async with watched.store as store:
        made = await reserved(store)
        watched.pragma(f"max_page_count = {watched.pragma('page_count')}")
        with pytest.raises(StoreFullError, match="free some space"):
            await _fill(store)
        count = len(await store.list_instances())
        assert await store.get_instance(made.instance_id) == made
        with pytest.raises(StoreFullError):
            await reserved(store, context={"big": "x" * 200_000})
        watched.pragma("max_page_count = 1000000")
        await moved(store, made, AgentState.READY)
        await reserved(store, context={"big": "x" * 200_000})
        assert len(await store.list_instances()) == count + 1
        assert await invariant_faults(store, ManualClock().wall()) == []


async def _fill(store: EngineStore) -> None:
    for _ in range(100):
        await reserved(store, context={"big": "x" * 50_000})


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
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 700_000)
    async with open_store(small_disk / "home", Seams(clock=ManualClock())) as store:
        made = await reserved(store)
        with pytest.raises(StoreFullError):
            await _fill(store)
        assert await store.get_instance(made.instance_id) == made
        ballast.unlink()
        assert (await moved(store, made, AgentState.READY)).state is AgentState.READY
    async with open_store(small_disk / "home", Seams(clock=ManualClock())) as store:
        assert await invariant_faults(store, ManualClock().wall()) == []


async def test_an_input_output_error_ends_all_writing_until_a_restart(home: Path) -> None:
    plan = FaultPlan(action="oserror")
    async with open_store(home, Seams(fault=plan)) as store:
        made = await reserved(store)
        plan.name = "store.commit.before"
        with pytest.raises(StoreFailedError, match="restart to recover"):
            await moved(store, made, AgentState.READY)
        plan.name = ""
        with pytest.raises(StoreFailedError, match="injected"):
            await moved(store, made, AgentState.READY)
        assert await store.get_instance(made.instance_id) == made
    async with open_store(home) as store:
        assert (await moved(store, made, AgentState.READY)).version == 2


_LIMITED = """
import asyncio, resource, sys
from ostler.errors import StoreFailedError
from ostler.store import open_store
from ostler.testing.store_suite.ground import reserved

async def main():
    async with open_store(sys.argv[1]) as store:
        made = await reserved(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        seen = []
        for _ in range(3):
            try:
                await reserved(store, context={"big": "x" * 200_000})
            except StoreFailedError as error:
                seen.append(str(error))
        assert len(seen) == 3, seen
        assert "disk I/O error" in seen[0], seen
        assert await store.get_instance(made.instance_id) == made

asyncio.run(main())
"""


def test_a_real_input_output_error_is_seen_as_one(home: Path) -> None:
    """The kernel refuses to let the file grow: SQLite reports what a broken disk would make it report."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(home), "600000"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


async def test_a_lock_held_by_another_process_is_said_and_passes(home: Path) -> None:
    watched = Watched(home)
    async with watched.store as store:
        made = await reserved(store)
        watched.pragma("busy_timeout = 20")
        other = sqlite3.connect(home / "ostler.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError):
            await moved(store, made, AgentState.READY)
        assert await store.get_instance(made.instance_id) == made
        other.execute("ROLLBACK")
        other.close()
        assert (await moved(store, made, AgentState.READY)).version == 2


# --- migration --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, STEPS + 1))
async def test_a_migration_that_dies_at_any_statement_leaves_the_old_shape(home: Path, nth: int) -> None:
    plan = FaultPlan(name="store.migrate.statement", nth=nth)
    with pytest.raises(InjectedCrash):
        await open_store(home, Seams(fault=plan)).open()
    assert shape(home) == (0, 0)
    async with open_store(home) as store:
        await brought_to(store, AgentState.READY)


@pytest.mark.parametrize(("point", "after"), [("store.migrate.before", False), ("store.migrate.after", True)])
async def test_a_migration_that_dies_around_its_transaction_leaves_old_or_new(
    home: Path, point: str, after: bool
) -> None:
    with pytest.raises(InjectedCrash):
        await open_store(home, Seams(fault=FaultPlan(name=point))).open()
    assert (shape(home)[0] > 0) == after
    async with open_store(home) as store:
        await reserved(store)


_OPENER = """
import asyncio, sys
from ostler.store import open_store
from ostler.testing.store_suite.ground import reserved

async def main():
    sys.stdin.readline()  # all of them start when the test says so
    async with open_store(sys.argv[1]) as store:
        await reserved(store)

print("ready", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("trial", range(3))
def test_processes_that_open_a_fresh_home_at_once_all_get_in(home: Path, trial: int) -> None:
    where = str(home / str(trial))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _OPENER, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], told

    async def count() -> int:
        async with open_store(where) as store:
            return (await store.statistics()).total_spawned

    assert asyncio.run(count()) == 4
