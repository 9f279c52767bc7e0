"""When the database fails in the middle of a batch: each caller is told the truth about its own command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_ground import count, do_nothing, ready, reserved
from store_invariants import invariant_faults

from ostler.errors import OutcomeUnknownError, StoreBusyError, StoreError, StoreFailedError, StoreFullError
from ostler.failpoints import FaultPoint, Seams
from ostler.model.instance import AgentInstance
from ostler.store.connection import Connection, Head
from ostler.store.sqlite import SqliteConnection
from ostler.store.store import SqliteDatabase, Store
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


class Broken(SqliteConnection):
    """Fails where a test says so: at the beginning, at the commit, or in a statement that holds certain words."""

    fails: dict[str, Exception]
    in_statement = ""
    #: How many such statements pass before one fails.
    passing = 0

    def begin(self) -> Head:
        self._fail("begin")
        return super().begin()

    def commit(self) -> None:
        self._fail("commit")
        super().commit()

    def execute(self, sql: str, values: Any) -> int:
        if self.in_statement and self.in_statement in sql:
            self.passing -= 1
            if self.passing < 0:
                self._fail("execute")
        return super().execute(sql, values)

    def _fail(self, where: str) -> None:
        if error := self.fails.pop(where, None):
            raise error


class BrokenDatabase(SqliteDatabase):
    writer: Broken

    def open_writer(self, fault: FaultPoint) -> Connection:
        self.writer = Broken(self.path, create=True)
        self.writer.fails = {}
        self.writer.migrate(fault)
        return self.writer


@pytest.fixture
def database(tmp_path: Path) -> BrokenDatabase:
    return BrokenDatabase(tmp_path / "ostler.db")


class Gate:
    """Holds the writer inside a commit until the test has queued more."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.queued = threading.Event()

    def __call__(self, _: Transaction) -> None:
        self.entered.set()
        assert self.queued.wait(timeout=60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.queued.set()


async def batch(store: Store, gate: Gate, prepare: Callable[[], None], wishes: int = 3) -> list[Any]:
    """What each of several commands in one commit is told, after `prepare` has broken something."""
    held = store.submit(gate)
    await asyncio.to_thread(gate.entered.wait, 30)
    waiting = [asyncio.ensure_future(reserved(store, f"n{number}")) for number in range(wishes)]
    await asyncio.sleep(0)
    prepare()
    gate.queued.set()
    _, *answers = await asyncio.gather(held, *waiting, return_exceptions=True)  # also what is held may fail
    return answers


@pytest.mark.parametrize("where", ["begin", "commit"])
@pytest.mark.parametrize("error", [StoreFullError, StoreBusyError])
async def test_a_commit_that_cannot_be_made_now_fails_its_batch_and_the_next_works(
    database: BrokenDatabase, where: str, error: type[StoreError]
) -> None:
    clock = ManualClock()
    async with Store(database, Seams(clock=clock)) as store:
        await ready(store)
        database.writer.fails[where] = error()
        answers = await asyncio.gather(*(reserved(store) for _ in range(3)), return_exceptions=True)
        assert error in {type(answer) for answer in answers}
        there = sum(isinstance(answer, AgentInstance) for answer in answers)
        assert await store.read(count("agent_instances")) == 1 + there
        await reserved(store)
        assert await invariant_faults(store, clock.wall()) == []


async def test_nothing_that_was_queued_is_written_after_the_disk_failed(database: BrokenDatabase, gate: Gate) -> None:
    async with Store(database) as store:

        def fail() -> None:
            database.writer.fails["commit"] = StoreFailedError("a failed sync")

        answers = await batch(store, gate, fail)
        assert [type(answer) for answer in answers] == [StoreFailedError] * 3
        assert len({id(answer) for answer in answers}) == 3, "each caller gets an error of its own"
    async with Store(database) as again:
        assert await again.read(count("agent_instances")) == 0
        await reserved(again)


async def test_a_commit_without_an_answer_is_told_as_unknown(database: BrokenDatabase) -> None:
    async with Store(database) as store:
        database.writer.fails["commit"] = OutcomeUnknownError()
        with pytest.raises(OutcomeUnknownError, match="read the record again"):
            await reserved(store)
        await reserved(store)


async def test_a_store_error_that_is_raised_often_does_not_grow(database: BrokenDatabase) -> None:
    async with Store(database) as store:
        database.writer.fails["commit"] = StoreFailedError("a failed sync")
        depths = set()
        for _ in range(20):
            with pytest.raises(StoreFailedError) as refused:
                await store.run(do_nothing)
            depths.add(len(refused.traceback))
        assert max(depths) < 10


async def test_what_is_written_for_the_whole_commit_fails_the_whole_of_it(database: BrokenDatabase, gate: Gate) -> None:
    clock = ManualClock()
    async with Store(database, Seams(clock=clock)) as store:

        def fail() -> None:
            database.writer.in_statement = "UPDATE workspaces SET audit_number"
            database.writer.fails["execute"] = StoreError("no")

        answers = await batch(store, gate, fail)
        assert [type(answer) for answer in answers] == [StoreError] * 3
        assert await store.read(count("agent_instances")) == 0
        await reserved(store)
        assert await invariant_faults(store, clock.wall()) == []


async def test_an_error_that_cannot_be_copied_is_told_all_the_same(database: BrokenDatabase) -> None:
    class Awkward(Exception):  # noqa: N818 - it is an error of another package
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    async with Store(database) as store:
        database.writer.fails["commit"] = Awkward(1, 2)
        with pytest.raises(StoreError, match="1 and 2"):
            await reserved(store)
        await reserved(store)


async def test_a_failed_savepoint_of_one_command_fails_the_batch_and_no_part_is_left(
    database: BrokenDatabase, gate: Gate
) -> None:
    async with Store(database) as store:

        def fail() -> None:
            database.writer.in_statement, database.writer.passing = "RELEASE SAVEPOINT", 2
            database.writer.fails["execute"] = StoreError("no")

        answers = await batch(store, gate, fail)
        assert [type(answer) for answer in answers] == [StoreError] * 3
        assert await store.read(count("agent_instances")) == 0
        await reserved(store)
