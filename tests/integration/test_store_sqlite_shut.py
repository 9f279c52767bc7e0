"""Homes that cannot be opened as usual: read-only ones, and files that are damaged or no database at all."""

from __future__ import annotations

import ctypes
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ostler
from ostler.errors import StoreError, StoreFailedError, StoreFullError, ValidationError
from ostler.store import open_store, view_store
from ostler.store.sqlitefaults import store_error
from ostler.testing.store_suite.ground import reserved

pytestmark = pytest.mark.anyio

#: What lets root pass over the rights of files: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
PASSING_OVER = (1, 2)
PR_CAPBSET_DROP = 24

LOOK = """
import asyncio, sys
from ostler.errors import StoreError
from ostler.store import open_store, view_store

async def main(how):
    try:
        async with how(sys.argv[2]) as store:
            print(len(await store.list_instances()), (await store.verify_audit()).is_sound)
    except StoreError as error:
        print(type(error).__name__, error)

asyncio.run(main({"look": view_store, "open": open_store}[sys.argv[1]]))
"""
DIE = """
import asyncio, os, sys
from ostler.store import open_store
from ostler.testing.store_suite.ground import reserved

async def main():
    async with open_store(sys.argv[1]) as store:
        await reserved(store)
        os._exit(0)

asyncio.run(main())
"""


def as_anybody(*arguments: str | Path) -> str:
    """What a program says that has no more rights than the files give it, also where root runs the tests."""

    def give_up() -> None:
        for capability in PASSING_OVER:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)

    command = [sys.executable, "-c", LOOK, *arguments]
    return subprocess.run(command, preexec_fn=give_up, capture_output=True, text=True, check=True).stdout.strip()


def content(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.iterdir()}


def shut(home: Path) -> None:
    for path in home.iterdir():
        path.chmod(0o400)
    home.chmod(0o500)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """With signs in its name that mean something in an address."""
    home = tmp_path / "ho me?mode=rwc#%41"
    yield home
    if home.exists():
        home.chmod(0o700)


async def filled(home: Path) -> Path:
    async with open_store(home) as store:
        await reserved(store)
    return home


def abandon(home: Path) -> None:
    """A home that was not closed."""
    subprocess.run([sys.executable, "-c", DIE, home], check=True)


def spoil(home: Path, found: bytes) -> None:
    home.mkdir()
    (home / "ostler.db").write_bytes(found)


# --- read-only ------------------------------------------------------------------------------------


async def test_a_home_that_may_not_be_written_can_be_looked_at(home: Path) -> None:
    await filled(home)
    shut(home)
    before = content(home)
    assert as_anybody("look", home) == "1 True"
    assert content(home) == before
    told = as_anybody("open", home)
    assert re.fullmatch(r"StoreFailedError .* may not be written by this user, it belongs to \w+ .* choose .*", told)


async def test_so_can_one_that_was_not_closed_if_all_of_it_is_there(home: Path) -> None:
    abandon(home)
    shut(home)
    before = content(home)
    assert before["ostler.db-wal"]
    assert as_anybody("look", home) == "1 True"
    assert content(home) == before


async def test_where_the_last_changes_cannot_be_read_it_says_so_and_shows_no_older_state(home: Path) -> None:
    abandon(home)
    (home / "ostler.db-shm").unlink()
    shut(home)
    told = as_anybody("look", home)
    assert re.fullmatch(r"StoreError .* was not closed, .* look at it as \w+, or copy the whole directory .*", told)


async def test_a_home_that_may_not_be_read_says_whose_it_is(home: Path) -> None:
    await filled(home)
    (home / "ostler.db").chmod(0)
    assert re.fullmatch(
        r"StoreError .* cannot be read \(Permission denied\); it belongs to \w+", as_anybody("look", home)
    )


# --- damaged --------------------------------------------------------------------------------------


async def both(home: Path) -> list[str]:
    """What looking and opening say of it."""
    said = []
    for how in (view_store, open_store):
        with pytest.raises(StoreError) as refused:
            await how(home).open()
        assert "check the disk" not in str(refused.value)
        said.append(str(refused.value))
    return said


async def test_random_bytes_are_not_called_a_broken_disk(home: Path) -> None:
    spoil(home, os.urandom(8192))
    for told in await both(home):
        assert f"{home}/ostler.db is not a database, or is damaged" in told
        assert "restore it from a backup" in told


async def test_a_damaged_schema_is_called_damaged(home: Path) -> None:
    await filled(home)
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = 'CREATE TABLE ((' WHERE name = 'leases'")
    connection.close()
    for told in await both(home):
        assert f"{home}/ostler.db is damaged (malformed database schema" in told


async def test_a_table_or_a_head_that_is_gone_is_called_damaged(home: Path) -> None:
    await filled(home)
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("DELETE FROM store_head")
    connection.close()
    assert all("the one row of store_head is gone" in told for told in await both(home))
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("DROP TABLE store_head")
    connection.close()
    assert all("is damaged (no such table: store_head)" in told for told in await both(home))


async def test_a_directory_or_a_pipe_in_the_place_of_the_database_is_called_what_it_is(home: Path) -> None:
    (home / "ostler.db").mkdir(parents=True)
    assert all("ostler.db is a directory, and should be" in told for told in await both(home))
    (home / "ostler.db").rmdir()
    os.mkfifo(home / "ostler.db")
    assert all("ostler.db is no regular file, and should be" in told for told in await both(home))


async def test_a_path_that_is_too_long_for_sqlite_is_told_with_its_length(tmp_path: Path) -> None:
    home = tmp_path.joinpath(*["x" * 100] * 5)
    with pytest.raises(StoreFailedError, match=r"has \d+ bytes, SQLite bears 504; choose a home with a shorter one"):
        await open_store(home).open()


def test_no_room_for_the_memory_that_readers_share_is_a_full_disk(tmp_path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    assert isinstance(store_error(error, tmp_path), StoreFullError)


# --- what is no place at all ----------------------------------------------------------------------


@pytest.mark.parametrize("open_it", [open_store, view_store, ostler.open])
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("", "is empty; name a directory"),
        (" ", "is empty; name a directory"),
        (None, "must be a directory or a postgresql:// address, as a text or a Path, was None"),
        (7, "must be a directory or"),
        ("a\0b", "has a NUL in it"),
        (Path("a\0b"), "has a NUL in it"),
        ("~no-such-user/x", "must be a directory that can be found; this user has none"),
    ],
)
async def test_what_can_be_no_home_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_it: Callable[[Any], Any], where: Any, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if open_it is ostler.open and not isinstance(where, str | Path):  # a manager also takes a store
        sentence = "where must be a directory, an address or a Store"
    else:
        sentence = f"store {told}"
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        async with open_it(where):
            pass
    assert not content(tmp_path)


class Somewhere:
    """What leads to a path without being one."""

    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> str | bytes:
        return self._path


async def test_whatever_leads_to_a_path_is_taken_for_one(tmp_path: Path) -> None:
    where: Any = Somewhere(str(tmp_path / "home"))
    for open_it in (open_store, view_store, ostler.open):
        async with open_it(where):
            pass
    assert "ostler.db" in content(tmp_path / "home")
    for wrong in (Somewhere(b"home"), Somewhere("")):
        with pytest.raises(ValidationError, match=r"store (must be a directory|is empty)"):
            open_store(wrong)  # type: ignore[arg-type]  # it is what is tested
