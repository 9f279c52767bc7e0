"""The file of a home: private, shared by processes, and refused where it is another's, newer, damaged or replaced."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_ground import count, current, do_nothing, newest, ready, reserved

from ostler.errors import NotFoundError, StoreError, StoreFailedError, StoreTooNewError
from ostler.store import moves, queries
from ostler.store.sqlite import LONGEST_PATH, SqliteConnection
from ostler.store.store import Store, view

pytestmark = pytest.mark.anyio

#: What lets root pass over the rights of files: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
PASSING_OVER = (1, 2)
PR_CAPBSET_DROP = 24


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """With signs in its name that mean something in an address."""
    home = tmp_path / "ho me?mode=rwc#%41"
    yield home
    if home.exists():
        home.chmod(0o700)


async def filled(home: Path) -> Path:
    async with Store(home) as store:
        await reserved(store)
    return home


def database(home: Path) -> Path:
    return home / "ostler.db"


def change(home: Path, *statements: str) -> None:
    """Done by another program."""
    with contextlib.closing(sqlite3.connect(database(home))) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def content(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.iterdir()}


def modes_in(home: Path) -> dict[str, int]:
    found = {path.name: path for path in home.iterdir()} | {".": home}
    return {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}


def made(home: Path, found: bytes | None = None) -> None:
    home.mkdir()
    if found is not None:
        database(home).write_bytes(found)


def open_files() -> list[Path]:
    return [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def shut(home: Path) -> None:
    for path in home.iterdir():
        path.chmod(0o400)
    home.chmod(0o500)


async def refusal(home: Path) -> str:
    with pytest.raises(StoreError) as refused:
        await Store(home).open()
    assert "check the disk" not in str(refused.value)
    return str(refused.value)


# --- usual -------------------------------------------------------------------------------------------


async def test_only_the_owner_may_look_into_a_home(home: Path) -> None:
    async with Store(home) as store:
        await reserved(store)
        modes = modes_in(home)
    assert modes == {".": 0o700, "ostler.db": 0o600, "ostler.db-wal": 0o600, "ostler.db-shm": 0o600}


def locks_on(home: Path) -> int:
    """How many locks the kernel knows on the main file."""
    inode = database(home).stat().st_ino
    return sum(f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


async def test_a_second_store_in_the_same_process_does_not_drop_the_locks_of_the_first(home: Path) -> None:
    """Closing any descriptor of a file drops all locks that the process holds on it."""
    async with Store(home) as store:
        await reserved(store)
        held = locks_on(home)
        if held == 0:
            pytest.skip("this kernel does not show the locks of this file system")
        async with Store(home) as second:
            assert await newest(second) == await newest(store)
            assert locks_on(home) >= held
        with view(home) as reader:
            assert queries.state_counts(reader)
        # A connection that closes drops its own; the writer's must have been taken back or never lost.
        assert locks_on(home) >= 1
        await reserved(store)


_OPENER = """
import asyncio, sys
from ostler.store.store import Store
from store_ground import reserved

async def main():
    sys.stdin.readline()  # all of them start when the test says so
    async with Store(sys.argv[1]) as store:
        await reserved(store)

print("ready", flush=True)
asyncio.run(main())
"""


def test_processes_that_open_a_fresh_home_at_once_all_get_in(home: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _OPENER, str(home)]
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True) for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], told

    async def counted() -> int:
        async with Store(home) as store:
            return await store.read(count("agent_instances"))

    assert asyncio.run(counted()) == 4


# --- refused and left as it is -----------------------------------------------------------------------


async def test_a_file_of_a_newer_program_is_refused_and_left_as_it_is(home: Path) -> None:
    await filled(home)
    change(home, "PRAGMA user_version = 99")
    before = content(home)
    with pytest.raises(StoreTooNewError, match=r"shape 99, this program knows up to \d+: it was made by a newer"):
        await Store(home).open()
    assert content(home) == before


@pytest.mark.parametrize("version", [0, 1, 7])
async def test_a_database_of_another_program_is_refused_and_left_as_it_is(home: Path, version: int) -> None:
    made(home)
    change(home, "CREATE TABLE recipes (name TEXT)", f"PRAGMA user_version = {version}")
    before = content(home)
    assert "is a database of another program" in await refusal(home)
    assert content(home) == before


@pytest.mark.parametrize("found", [b"a shopping list\n" * 100, bytes(range(256)) * 32])
async def test_a_file_that_is_no_database_is_refused_left_as_it_is_and_let_go_of(home: Path, found: bytes) -> None:
    made(home, found)
    told = await refusal(home)
    assert f"{database(home)} is not a database, or is damaged" in told
    assert "restore it from a backup" in told
    assert content(home)["ostler.db"] == found
    assert database(home) not in open_files()


async def test_a_damaged_schema_is_called_damaged(home: Path) -> None:
    await filled(home)
    change(
        home,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = 'CREATE TABLE ((' WHERE name = 'leases'",
    )
    assert f"{database(home)} is damaged (malformed database schema" in await refusal(home)


async def test_a_table_or_a_head_that_is_gone_is_called_damaged(home: Path) -> None:
    await filled(home)
    change(home, "DELETE FROM head")
    assert "its head row is gone" in await refusal(home)
    change(home, "DROP TABLE head")
    assert "is damaged (no such table: head)" in await refusal(home)


async def test_a_directory_or_a_pipe_in_the_place_of_the_database_is_called_what_it_is(home: Path) -> None:
    database(home).mkdir(parents=True)
    assert "ostler.db is a directory, and should be" in await refusal(home)
    database(home).rmdir()
    os.mkfifo(database(home))
    assert "ostler.db is no regular file, and should be" in await refusal(home)


async def test_a_path_that_is_too_long_for_sqlite_is_told_with_its_length(tmp_path: Path) -> None:
    told = await refusal(tmp_path.joinpath(*["x" * 100] * 5))
    assert re.search(rf"has \d+ bytes, SQLite allows {LONGEST_PATH}; choose a home with a shorter path", told)
    assert "choose a home with a shorter path" in await refusal(tmp_path / ("y" * 300) / ("z" * 300))


async def test_a_place_where_no_home_can_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (Path("/proc/nothing/here"), tmp_path / "file", tmp_path / "file" / "below"):
        assert "a home cannot be made at" in await refusal(where)


_AS_ANYBODY = """
import asyncio, sys
from ostler.errors import StoreError
from ostler.store.store import Store

async def main():
    try:
        async with Store(sys.argv[1]):
            print("open")
    except StoreError as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""


def as_anybody(home: Path) -> str:
    """What a program says that has no more rights than the files give it, also where root runs the tests."""

    def give_up() -> None:
        for capability in PASSING_OVER:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)

    command = [sys.executable, "-c", _AS_ANYBODY, str(home)]
    return subprocess.run(command, preexec_fn=give_up, capture_output=True, text=True, check=True).stdout.strip()


async def test_a_home_that_may_not_be_written_names_its_owner_and_stays_as_it_is(home: Path) -> None:
    await filled(home)
    shut(home)
    before = content(home)
    told = as_anybody(home)
    assert re.fullmatch(r"StoreFailedError .* may not be written by this user, it belongs to \w+ .* choose .*", told)
    assert content(home) == before


async def test_a_home_that_may_not_be_read_names_its_owner(home: Path) -> None:
    await filled(home)
    database(home).chmod(0)
    told = as_anybody(home)
    assert re.fullmatch(r"StoreFailedError .* may not be read by this user, it belongs to \w+ .*", told)


# --- changed under a live store ----------------------------------------------------------------------


def removed(home: Path) -> None:
    database(home).unlink()


def emptied(home: Path) -> None:
    os.truncate(database(home), 0)


def replaced(home: Path) -> None:
    other = home / "other.db"
    shutil.copy(database(home), other)
    other.rename(database(home))


def headless(home: Path) -> None:
    change(home, "DELETE FROM head")


@pytest.mark.parametrize("happens", [removed, emptied, replaced, headless])
async def test_nothing_is_acknowledged_after_the_file_was_changed_under_the_store(home: Path, happens: object) -> None:
    async with Store(home) as store:
        await reserved(store)
        assert callable(happens)
        happens(home)
        for _ in range(2):
            with pytest.raises(StoreFailedError, match=r"under this program.*; nothing more is written"):
                await reserved(store)
        with pytest.raises(StoreFailedError):
            await store.run(do_nothing)


async def test_a_file_that_is_only_touched_or_chmodded_is_still_ours(home: Path) -> None:
    async with Store(home) as store:
        database(home).touch()
        database(home).chmod(0o640)
        await reserved(store)


# --- a look beside the owner -------------------------------------------------------------------------


async def test_a_view_reads_beside_the_owner_and_writes_nothing(home: Path) -> None:
    async with Store(home) as store:
        one = await ready(store)
        with view(home) as reader:
            assert moves.get_instance(reader, one.instance_id) == one
            with pytest.raises(StoreError):
                reader.fetch("DELETE FROM agent_instances RETURNING id")
        assert await current(store, one) == one


def test_a_view_of_what_is_not_there_makes_nothing(home: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no home at"), view(home):
        pass
    assert not home.exists()
    with pytest.raises(StoreError, match="only by the program that opened it"), view(":memory:"):
        pass


async def test_a_view_refuses_what_is_newer_older_or_of_another_program(home: Path) -> None:
    await filled(home)
    change(home, "PRAGMA user_version = 99")
    before = content(home)
    with pytest.raises(StoreTooNewError), view(home):
        pass
    change(home, "PRAGMA user_version = 0")
    with pytest.raises(NotFoundError, match="there is no Ostler store there"), view(home):
        pass
    change(home, "PRAGMA application_id = 7")
    with pytest.raises(StoreError, match="database of another program"), view(home):
        pass
    assert before.keys() == content(home).keys()


def test_what_a_reader_uses_cannot_write(home: Path) -> None:
    asyncio.run(filled(home))
    reader = SqliteConnection(database(home), read_only=True)
    with pytest.raises(StoreError):
        reader.execute("DELETE FROM workspaces", {})
    assert reader.fetch("SELECT count(*) FROM workspaces", {}) == [(1,)]
    reader.close()
