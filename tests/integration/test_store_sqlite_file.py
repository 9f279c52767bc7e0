from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ostler.errors import StoreError, StoreTooNewError
from ostler.model import AgentInstance, AgentState
from ostler.seams import FaultPlan, InjectedCrash
from ostler.store import EngineStore, Seams, open_store, view_store
from ostler.store.queries import migrations, statements
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlsession import Row, Values
from ostler.testing.store_suite.ground import brought_to, reserved
from ostler.testing.store_suite.simulations import RUN, begun

pytestmark = pytest.mark.anyio

#: For each statement of all migrations: the shape that is left when it is the last that was run.
DYING = [number - 1 for number, script in migrations("sqlite") for _ in statements(script)]
NEWEST = migrations("sqlite")[-1][0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def shape(home: Path) -> tuple[int, int]:
    """Version and number of tables, read without Ostler."""
    with sqlite3.connect(home / "ostler.db") as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    connection.close()
    return version, tables


def modes(home: Path) -> dict[str, int]:
    found = {path.name: path for path in home.iterdir()} | {".": home}
    return {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}


def foreign(home: Path, *statements: str) -> bytes:
    """A database that some other program has made."""
    home.mkdir()
    with sqlite3.connect(home / "ostler.db") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return content(home)


def content(home: Path) -> bytes:
    return (home / "ostler.db").read_bytes()


# --- the file ---------------------------------------------------------------------------------------


async def test_only_the_owner_may_look_into_the_home(home: Path) -> None:
    async with open_store(home) as store:
        await reserved(store)
        files = modes(home)
    assert files == {".": 0o700, "ostler.db": 0o600, "ostler.db-wal": 0o600, "ostler.db-shm": 0o600}


async def test_a_store_of_a_newer_program_is_refused_and_left_as_it_is(home: Path) -> None:
    async with open_store(home) as store:
        await reserved(store)
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = content(home)
    with pytest.raises(StoreTooNewError, match=r"shape 99, this program knows up to \d+: it was made by a newer"):
        await open_store(home).open()
    assert content(home) == before


@pytest.mark.parametrize("version", [0, 1, 7])
async def test_a_database_of_another_program_is_refused_and_left_as_it_is(home: Path, version: int) -> None:
    before = foreign(home, "CREATE TABLE recipes (name TEXT)", f"PRAGMA user_version = {version}")
    with pytest.raises(StoreError, match="database of another program"):
        await open_store(home).open()
    assert content(home) == before


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(home: Path) -> None:
    home.mkdir()
    (home / "ostler.db").write_text("a shopping list\n" * 100)
    with pytest.raises(StoreError, match="not a database"):
        asyncio.run(open_store(home).open())
    assert content(home) == b"a shopping list\n" * 100


def locks_on(home: Path) -> int:
    """How many locks the kernel knows on the main file."""
    inode = (home / "ostler.db").stat().st_ino
    return sum(f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.parametrize("look", [open_store, view_store])
async def test_a_second_look_at_a_home_does_not_drop_the_locks_of_the_first(
    home: Path, look: Callable[[Path], EngineStore]
) -> None:
    """Closing any descriptor of a file drops all locks that the process holds on it."""
    async with open_store(home) as store:
        await reserved(store)
        held = locks_on(home)
        if held == 0:
            pytest.skip("this kernel does not show the locks of this file system")
        async with look(home) as second:
            assert await second.head() == await store.head()
            assert locks_on(home) >= held
        # A connection that closes drops its own; the writer's must have been taken back or never lost.
        assert locks_on(home) >= 1
        await reserved(store)


# --- migration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nth", "left"), list(enumerate(DYING, 1)))
async def test_a_migration_that_dies_at_any_statement_leaves_the_old_shape(home: Path, nth: int, left: int) -> None:
    plan = FaultPlan(name="store.migrate.statement", nth=nth)
    with pytest.raises(InjectedCrash):
        await open_store(home, Seams(fault=plan)).open()
    old = [script for number, script in migrations("sqlite") if number <= left]
    tables = sum(statement.startswith("CREATE TABLE") for script in old for statement in statements(script))
    assert shape(home) == (left, tables)
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


async def old_home(home: Path, version: int) -> AgentInstance:
    """A home as the program of that shape has left it, with one instance in it."""
    async with open_store(home) as store:
        made = await brought_to(store, AgentState.READY)
    with sqlite3.connect(home / "ostler.db") as connection:
        for table in ("simulation_turns", "simulation_runs"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    return made


async def test_a_home_of_the_first_shape_is_brought_up_to_date_and_works(home: Path) -> None:
    made = await old_home(home, 1)
    async with open_store(home) as store:
        assert await store.get_instance(made.instance_id) == made
        assert (await begun(store, turns=2)).turn == 2
        await reserved(store)
    assert shape(home)[0] == NEWEST
    async with view_store(home) as seen:
        assert len(await seen.read_turns(RUN)) == 3


async def test_looking_at_a_home_of_the_first_shape_says_what_to_do(home: Path) -> None:
    await old_home(home, 1)
    with pytest.raises(StoreError, match=f"has shape 1, this program reads {NEWEST}; open it once with ostler.open_st"):
        await view_store(home).open()
    assert shape(home)[0] == 1


async def test_a_kill_between_two_migrations_is_gone_on_from(home: Path) -> None:
    plan = FaultPlan(name="store.migrate.after", nth=1)
    with pytest.raises(InjectedCrash):
        await open_store(home, Seams(fault=plan)).open()
    assert shape(home)[0] == 1
    async with open_store(home) as store:
        await begun(store, turns=1)
    assert shape(home)[0] == NEWEST


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
            [sys.executable, "-c", _OPENER, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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


def test_a_file_that_is_no_database_is_let_go_of_again(home: Path) -> None:
    home.mkdir()
    path = home / "ostler.db"
    path.write_bytes(b"no database at all, only words " * 200)
    with pytest.raises(StoreError):
        SqliteSession(path)
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert path not in held


async def test_statistics_are_one_statement(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would tell of two moments: a plan that was changed, and the agents that lived before."""
    asked: list[str] = []
    select = SqliteSession.select

    def noted(session: SqliteSession, sql: str, values: Row | Values) -> tuple[list[str], list[Values]]:
        asked.append(sql)
        return select(session, sql, values)

    async with open_store(home) as store:
        await reserved(store)
        monkeypatch.setattr(SqliteSession, "select", noted)
        told = await store.statistics()
        assert (told.active_instances, told.max_concurrent) == (1, None)
        assert len(asked) == 1, asked
