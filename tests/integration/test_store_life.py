"""From open to close: an opening that fails, a fork, two loops, an audit that is verified while others write."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import pytest
from store_ground import brought_to, do_nothing, entries, reserved, verified

from ostler.errors import StoreClosedError, StoreError
from ostler.failpoints import FaultPoint, Seams
from ostler.model.audit import AuditEntry
from ostler.model.states import AgentState
from ostler.policy.retention import RetentionPolicy
from ostler.store import audit, retention
from ostler.store.connection import Connection
from ostler.store.store import MemoryDatabase, SqliteDatabase, Store
from ostler.store.transaction import Reader
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


def our_threads(earlier: Collection[threading.Thread]) -> list[str]:
    """Threads of stores that were opened since: another test's may still be closing."""
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ostler") and thread not in earlier
    ]


# --- opening -----------------------------------------------------------------------------------------


class Blind(SqliteDatabase):
    """It can be written and not be read."""

    def open_reader(self) -> Connection | None:
        raise StoreError("nothing to be seen")


class Headless(MemoryDatabase):
    """What is asked first after the writer has come up fails."""

    def open_writer(self, fault: FaultPoint) -> Connection:
        made = super().open_writer(fault)
        made.execute("DELETE FROM head", {})
        return made


async def test_an_opening_that_fails_after_the_writer_began_leaves_no_thread_and_can_be_tried_again(
    tmp_path: Path,
) -> None:
    earlier = threading.enumerate()
    for database in (Blind(tmp_path / "ostler.db"), Headless()):
        store = Store(database)
        for _ in range(2):
            with pytest.raises(StoreError):
                await store.open()
            assert our_threads(earlier) == []
            with pytest.raises(StoreClosedError):
                store.submit(do_nothing)


class Slow(SqliteDatabase):
    """Comes up only when the test lets it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opening, self.go_on = threading.Event(), threading.Event()

    def open_writer(self, fault: FaultPoint) -> Connection:
        self.opening.set()
        assert self.go_on.wait(60)
        return super().open_writer(fault)


async def test_an_opening_that_is_cancelled_in_the_middle_is_closed_when_it_comes_up(tmp_path: Path) -> None:
    earlier = threading.enumerate()
    slow = Slow(tmp_path / "ostler.db")
    store = Store(slow)
    opening = asyncio.ensure_future(store.open())
    await asyncio.to_thread(slow.opening.wait, 30)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(StoreClosedError):
        store.submit(do_nothing)
    slow.go_on.set()
    while our_threads(earlier):  # noqa: ASYNC110 - threads end without an event; the time limit of the test bounds it
        await asyncio.sleep(0.002)
    async with store:
        await reserved(store)


def test_a_store_may_be_opened_in_one_loop_and_used_in_the_next(tmp_path: Path) -> None:
    earlier = threading.enumerate()
    store = Store(tmp_path)
    asyncio.run(store.open())
    first = asyncio.run(reserved(store))
    second = asyncio.run(reserved(store))
    asyncio.run(store.close())
    assert first.instance_id != second.instance_id
    assert our_threads(earlier) == []


# --- fork --------------------------------------------------------------------------------------------

_FORKING = """
import asyncio, os, signal, sys
from ostler.errors import StoreClosedError
from ostler.store.store import Store
from store_ground import newest, ready

def told(work):
    signal.alarm(10)  # a child that hangs dies of it
    try:
        asyncio.run(work)
    except StoreClosedError as error:
        return "another process" in str(error)
    return False

async def main():
    async with Store(sys.argv[1]) as store:
        await ready(store)
        child = os.fork()
        if child == 0:
            fine = told(ready(store)) and told(newest(store))
            asyncio.run(store.close())
            os._exit(0 if fine else 1)
        _, status = os.waitpid(child, 0)
        await ready(store)
        print(os.waitstatus_to_exitcode(status), await newest(store))

asyncio.run(main())
"""


def test_a_forked_child_is_told_to_open_it_again_and_does_not_hang(tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-W", "ignore", "-c", _FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, env=environment)
    assert done.stdout.split() == ["0", "4"], done.stderr


# --- the audit beside others -------------------------------------------------------------------------


async def test_retention_in_the_middle_of_a_verification_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with Store(tmp_path, Seams(clock=clock)) as store:
        await brought_to(store, AgentState.TERMINATED)
        clock.advance(timedelta(days=2).total_seconds())
        await reserved(store)
        loop = asyncio.get_running_loop()
        swept: list[int] = []
        list_entries = audit.list_entries

        def interrupted(reader: Reader, *args: object, **named: object) -> list[AuditEntry]:
            """Let retention in between the two looks of a verification."""
            if not swept:
                policy = RetentionPolicy(audit=timedelta(days=1))
                swept.append(asyncio.run_coroutine_threadsafe(sweep(store, policy), loop).result(30))
            return list_entries(reader, *args, **named)  # type: ignore[arg-type]  # passed on as they came

        monkeypatch.setattr(audit, "list_entries", interrupted)
        report = await verified(store)
        assert swept[0] >= 2
        assert (await entries(store))[0].number > 1, "the sweep came in between"
        assert report.faults == ()


async def sweep(store: Store, policy: RetentionPolicy) -> int:
    return (await store.run(retention.sweep, policy)).removed


async def test_a_chain_that_grows_while_it_is_verified_is_sound(tmp_path: Path) -> None:
    async with Store(tmp_path) as store:
        writing = asyncio.ensure_future(_keep_acting(store))
        entries_seen: set[int] = set()
        while len(entries_seen) < 10:  # the time limit of the test bounds it
            report = await verified(store)
            assert report.is_sound, report.faults
            entries_seen.add(report.entries)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing


async def _keep_acting(store: Store) -> None:
    while True:
        await reserved(store)
