"""Looking at a home that one may not write, while others come and go: never an old state, never a false alarm."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ostler.errors import StoreBusyError, StoreFailedError
from ostler.store import open_store
from ostler.store.homeview import HomeView
from ostler.testing.store_suite.ground import reserved

pytestmark = pytest.mark.anyio

#: Answers each line with what it sees. A process of its own: what it opens and closes must not touch our locks.
VIEWER = """
import asyncio, os, sys
from ostler.store import view_store

os.access = lambda path, mode: mode == os.R_OK

async def main():
    async with view_store(sys.argv[1]) as store:
        for _ in sys.stdin:
            try:
                print((await store.head()).sequence, len(await store.list_instances()), flush=True)
            except Exception as error:
                print(repr(error), flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def viewer(home: Path) -> Iterator[Callable[[], str]]:
    command = [sys.executable, "-c", VIEWER, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def ask() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield ask
        process.communicate(timeout=20)


async def test_an_owner_who_comes_later_is_seen_and_so_is_what_it_left(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await reserved(store)
        first = (await store.head()).sequence
    with viewer(tmp_path) as ask:
        assert ask() == f"{first} 1"
        async with open_store(tmp_path) as store:
            assert ask() == f"{first} 1"
            for _ in range(20):
                await reserved(store)
            then = (await store.head()).sequence
            assert ask() == f"{then} 21"
    with viewer(tmp_path) as ask:
        assert ask() == f"{then} 21"


async def test_an_owner_who_came_and_went_between_two_looks_is_seen(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await reserved(store)
    with viewer(tmp_path) as ask:
        assert ask().endswith(" 1")
        for count in (41, 81):
            async with open_store(tmp_path) as store:
                for _ in range(40):
                    await reserved(store)
            assert ask().endswith(f" {count}")


@pytest.fixture
async def shut_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    async with open_store(tmp_path) as store:
        await reserved(store)
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.R_OK)
    return tmp_path / "ostler.db"


async def test_a_file_that_never_rests_is_told_as_busy(shut_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.store.homeview._PAUSE_SECONDS", 0)
    view = HomeView(shut_home, lambda _pragma: None)
    moment = iter(range(10**6))
    monkeypatch.setattr("ostler.store.homeview._marks", lambda _path: (1, next(moment), 1, False))
    with pytest.raises(StoreBusyError, match="changes faster than it can be looked at; try again"):
        view.head()
    monkeypatch.undo()
    view.close()


def spoil(path: Path) -> None:
    """All but the first page, by which it is known."""
    found = path.read_bytes()
    path.write_bytes(found[:4096] + b"\xff" * (len(found) - 4096))


async def test_what_did_not_change_and_is_damaged_is_called_so(shut_home: Path) -> None:
    spoil(shut_home)
    with pytest.raises(StoreFailedError, match="is damaged"):
        HomeView(shut_home, lambda _pragma: None).head()
