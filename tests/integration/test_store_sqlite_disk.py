from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.errors import StoreBusyError, StoreFailedError, StoreFullError
from ostler.model import AgentState
from ostler.seams import FaultPlan
from ostler.store import Backend, EngineStore, Seams, open_store
from ostler.store.commands import TakeLease
from ostler.store.kinds import Key, Kind
from ostler.store.opening import sqlite_backend
from ostler.store.sqlite import SqliteSession
from ostler.testing.clock import ManualClock, invariant_faults
from ostler.testing.store_suite.ground import moved, reserved

pytestmark = pytest.mark.anyio


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


class Watched:
    """A store whose writing connection a test can reach."""

    def __init__(self, home: Path, seams: Seams | None = None) -> None:
        inner = sqlite_backend(home / "ostler.db")
        self.writers: list[SqliteSession] = []

        def open_writer(fault: object) -> SqliteSession:
            assert inner.open_writer is not None
            session = inner.open_writer(fault)  # type: ignore[arg-type]  # passed on as it came
            assert isinstance(session, SqliteSession)
            self.writers.append(session)
            return session

        self.store = EngineStore(Backend(open_writer=open_writer, open_reader=inner.open_reader), seams)

    def pragma(self, text: str) -> object:
        """Asked on the writer's own connection, while it is idle."""
        return self.writers[-1].connection.execute(f"PRAGMA {text}").fetchone()[0]


async def test_every_commit_of_the_writer_is_synced(home: Path) -> None:
    watched = Watched(home)
    async with watched.store as store:
        await reserved(store)
        assert watched.pragma("journal_mode") == "wal"
        assert watched.pragma("synchronous") == 2
        assert watched.pragma("foreign_keys") == 1


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


class Failing(SqliteSession):
    """Its disk cannot be read any more, once a test says so."""

    broken = False

    def load(self, kind: Kind, key: Key) -> Any:
        if self.broken:
            raise StoreFailedError("a sector is gone")
        return super().load(kind, key)


async def test_an_error_while_reading_inside_a_transaction_ends_the_whole_of_it(home: Path) -> None:
    async with open_store(home) as store:
        made = await reserved(store)
    sessions: list[Failing] = []

    def open_writer(_fault: object) -> Failing:
        sessions.append(Failing(home / "ostler.db"))
        return sessions[-1]

    backend = Backend(open_writer=open_writer, open_reader=sqlite_backend(home / "ostler.db").open_reader)
    async with EngineStore(backend) as store:
        before = await store.head()
        sessions[0].broken = True
        # Neither names a record that is cached, and the second would need nothing but the first one's refusal.
        wishes = (moved(store, made, AgentState.READY), store.commit(TakeLease(owner="me")))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert [str(one) for one in answers] == ["a sector is gone"] * 2
        sessions[0].broken = False
        with pytest.raises(StoreFailedError):
            await moved(store, made, AgentState.READY)
        assert await store.head() == before


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
