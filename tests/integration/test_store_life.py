"""From open to close: what fails, what is cancelled, what is forked, and what is only looked at."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ostler.errors import StoreError
from ostler.model import AgentState
from ostler.policy import RetentionPolicy
from ostler.seams import FaultPoint
from ostler.store import Backend, EngineStore, Seams, Store, open_store, view_store
from ostler.store.filters import matches
from ostler.store.port import Changes, Head, Session
from ostler.testing.clock import ManualClock, MemoryTables, memory_store
from ostler.testing.memory import MemorySession
from ostler.testing.store_suite.ground import brought_to, reserved

pytestmark = pytest.mark.anyio


def our_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("ostler")]


class Blind(MemorySession):
    def head(self) -> Head:
        raise StoreError("nothing to be seen")


async def test_an_opening_that_fails_after_the_writer_began_leaves_no_thread() -> None:
    tables = MemoryTables()
    store = EngineStore(Backend(open_writer=lambda _fault: MemorySession(tables), open_reader=lambda: Blind(tables)))
    for _ in range(2):  # and it may be tried again
        with pytest.raises(StoreError, match="nothing to be seen"):
            await store.open()
        assert our_threads() == []


_FORKING = """
import asyncio, os, signal, sys
from ostler.errors import StoreClosedError
from ostler.store import open_store
from ostler.testing.store_suite.ground import reserved

def told(work):
    signal.alarm(10)  # a child that hangs dies of it
    try:
        asyncio.run(work)
    except StoreClosedError as error:
        return "another process" in str(error)
    return False

async def main():
    async with open_store(sys.argv[1]) as store:
        await reserved(store)
        child = os.fork()
        if child == 0:
            fine = told(reserved(store)) and told(store.head())
            asyncio.run(store.close())
            os._exit(0 if fine else 1)
        _, status = os.waitpid(child, 0)
        await reserved(store)
        print(os.waitstatus_to_exitcode(status), (await store.head()).sequence)

asyncio.run(main())
"""


def test_a_forked_child_is_told_to_open_it_again_and_does_not_hang(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.stdout.split() == ["0", "2"], done.stderr


async def test_a_place_where_no_home_can_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in ("/proc/nothing/here", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="a home cannot be made at"):
            await open_store(where).open()


async def test_a_view_says_that_it_cannot_be_written_and_the_disk_is_not_blamed(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        made = await reserved(store)
    async with view_store(tmp_path) as view:
        for _ in range(2):
            with pytest.raises(StoreError, match="opened for reading only; open it with open_store"):
                await reserved(view)
        assert await view.get_instance(made.instance_id) == made
        assert not any("writer" in name for name in our_threads())


async def test_what_a_store_reads_with_cannot_write(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        with pytest.raises(StoreError):
            await store._read(lambda session: session.execute("DELETE FROM workspaces", {}))  # type: ignore[attr-defined]  # noqa: SLF001 - a reader is given to nobody outside
        assert len(await store.list_workspaces()) == 1


# --- the audit beside retention ---------------------------------------------------------------------


class Interrupted(MemorySession):
    """Lets somebody in between the two looks of a verification."""

    between: list[Callable[[], None]]

    def audit(self, *args: object) -> list[object]:  # type: ignore[override]  # passed on as they came
        while self.between:
            self.between.pop()()
        return super().audit(*args)  # type: ignore[arg-type, return-value]  # passed on as they came


async def test_a_sweep_in_the_middle_of_a_verification_is_no_fault() -> None:
    tables, clock = MemoryTables(), ManualClock()
    seams = Seams(clock=clock)
    Interrupted.between = []
    looking = EngineStore(
        Backend(open_writer=lambda _fault: MemorySession(tables), open_reader=lambda: Interrupted(tables)), seams
    )
    async with memory_store(seams, tables) as sweeping, looking:
        await brought_to(sweeping, AgentState.TERMINATED)
        clock.advance(timedelta(days=2).total_seconds())
        await reserved(sweeping)
        Interrupted.between = [lambda: _in_a_loop_of_its_own(sweeping)]
        report = await looking.verify_audit()
        assert (await sweeping.read_audit())[0].number > 1, "the sweep came in between"
        assert report.faults == ()


def _in_a_loop_of_its_own(store: Store) -> None:
    asyncio.run(store.sweep(RetentionPolicy(audit=timedelta(days=1))))


# --- memory and patterns ----------------------------------------------------------------------------


class Spoiling(MemorySession):
    """The last event of a commit cannot be read back."""

    def save(self, changes: Changes) -> None:
        if changes.events and changes.head.sequence == 3:
            changes.events[-1] = changes.events[-1]._replace(body="no json")
        super().save(changes)


async def test_a_commit_in_memory_that_fails_leaves_nothing() -> None:
    tables = MemoryTables()

    def open_writer(_fault: FaultPoint) -> Session:
        return Spoiling(tables)

    async with EngineStore(Backend(open_writer=open_writer, open_reader=lambda: MemorySession(tables))) as store:
        await reserved(store)
        await reserved(store)
        before = await store.head()
        with pytest.raises(json.JSONDecodeError):
            await reserved(store)
        assert await store.head() == before
        assert len(await store.list_instances()) == 2
        assert (await store.verify_audit()).is_sound


def test_no_pattern_takes_long() -> None:
    begin = time.perf_counter()
    assert not matches("*a" * 40 + "b", "a" * 200)
    assert matches("*a" * 40 + "*", "a" * 200)
    assert time.perf_counter() - begin < 1
    for pattern, name, fits in (
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("*b*", "abc", True),
        ("ab*bc", "abc", False),
    ):
        assert matches(pattern, name) is fits, pattern
