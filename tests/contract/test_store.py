"""The store itself: opened and closed, shared by many callers, crashed at every step; its batches and lazy commands."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from store_ground import (
    HOME,
    Place,
    audit_head,
    brought_to,
    count,
    current,
    do_nothing,
    moved,
    newest,
    ready,
    reserved,
    verified,
    whole_log,
)
from store_invariants import all_instances

from ostler.errors import OutcomeUnknownError, StoreBusyError, StoreClosedError, StoreError, StoreFailedError
from ostler.failpoints import FaultPlan, Seams
from ostler.model.access import SYSTEM
from ostler.model.instance import AgentInstance
from ostler.model.states import AgentState
from ostler.store import instances, moves, writer
from ostler.store.moves import Move
from ostler.store.store import Store
from ostler.store.transaction import Reader, Transaction

pytestmark = pytest.mark.anyio

DURABLE = pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)
#: The points at which a commit is lost if the writer dies there, and those at which it is kept.
LOST = ("store.begin.before", "store.begin.after", "store.save.before", "store.save.after", "store.commit.before")
KEPT = ("store.commit.after", "store.ack.before")
ANSWERED = "store.ack.after"


class Gate:
    """A command that holds the writer until the test has queued more."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def command(self, _: Transaction) -> None:
        self.entered.set()
        assert self._open.wait(timeout=30)

    async def hold(self, store: Store) -> asyncio.Future[None]:
        held = store.submit(self.command)
        await asyncio.to_thread(self.entered.wait, 30)
        return held

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


# --- open and closed ---------------------------------------------------------------------------------


async def test_a_store_is_opened_once_at_a_time(store: Store, place: Place, seams: Seams) -> None:
    with pytest.raises(StoreError, match="open already"):
        await store.open()
    await reserved(store)
    both = place.store(seams)
    answers = await asyncio.gather(both.open(), both.open(), return_exceptions=True)
    assert sum(isinstance(one, StoreError) for one in answers) == 1
    await both.run(do_nothing)
    await both.close()


async def test_a_closed_store_says_so_and_can_be_opened_again(place: Place, seams: Seams) -> None:
    closed = place.store(seams)
    with pytest.raises(StoreClosedError):
        await newest(closed)
    await closed.open()
    await closed.close()
    await closed.close()
    with pytest.raises(StoreClosedError):
        await reserved(closed)
    with pytest.raises(StoreClosedError):
        await newest(closed)
    with pytest.raises(StoreClosedError):
        closed.subscribe(print)
    async with closed:
        await reserved(closed)
        with pytest.raises(ZeroDivisionError):
            async with place.store(seams):
                raise ZeroDivisionError
    with pytest.raises(StoreClosedError):
        await closed.run(do_nothing)


async def test_closing_finishes_every_accepted_command_and_query(place: Place, seams: Seams) -> None:
    closing = place.store(seams)
    await closing.open()
    callers = [asyncio.ensure_future(reserved(closing)) for _ in range(50)]
    lazy = [closing.submit_lazy(do_nothing) for _ in range(50)]
    readers = [asyncio.ensure_future(newest(closing)) for _ in range(50)]
    await asyncio.sleep(0)
    await closing.close()
    assert all(isinstance(one, AgentInstance) for one in await asyncio.gather(*callers))
    assert await asyncio.gather(*lazy) == [None] * 50
    assert await asyncio.gather(*readers) == [0] * 50
    if place.is_durable:
        async with place.store(seams) as again:
            assert await again.read(count("agent_instances")) == 50


async def test_an_opening_or_closing_that_is_cancelled_leaves_no_thread(place: Place, seams: Seams) -> None:
    before = set(threading.enumerate())
    for steps in range(6):
        one = place.store(seams)
        opening = asyncio.ensure_future(one.open())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        closing = asyncio.ensure_future(one.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
    while [one for one in set(threading.enumerate()) - before if "ostler" in one.name]:  # noqa: ASYNC110 - threads end without an event; the time limit of the test bounds it
        await asyncio.sleep(0.005)


# --- many callers ------------------------------------------------------------------------------------


async def test_threads_with_loops_of_their_own_may_all_use_one_store(store: Store) -> None:
    async def some() -> None:
        await asyncio.gather(*(brought_to(store, AgentState.WAITING) for _ in range(5)))

    with ThreadPoolExecutor(6) as threads:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(threads, asyncio.run, some()) for _ in range(6)))
    assert await store.read(count("agent_instances", "state = 'waiting'")) == 30
    assert await newest(store) == 30 * 4


@DURABLE
async def test_two_stores_over_one_database_see_each_other_and_one_log(
    store: Store, place: Place, seams: Seams
) -> None:
    async with place.store(seams) as other:
        mine, theirs = await asyncio.gather(ready(store, "mine"), ready(other, "theirs"))
        mine = await moved(other, mine, AgentState.PROCESSING)
        theirs = await moved(store, theirs, AgentState.PROCESSING)
        await moved(store, mine, AgentState.WAITING)
        await moved(other, theirs, AgentState.WAITING)
        assert await store.read(all_instances, HOME) == await other.read(all_instances, HOME)
        await asyncio.gather(*(brought_to(one, AgentState.TERMINATED) for one in (store, other) * 10))
        assert await whole_log(store) == await whole_log(other)
        assert (await verified(store)).is_sound


async def test_cancelling_a_caller_neither_undoes_its_command_nor_hangs_the_store(store: Store) -> None:
    callers = [asyncio.ensure_future(reserved(store, f"n{number}")) for number in range(10)]
    await asyncio.sleep(0)  # each has handed its command over
    for caller in callers:
        caller.cancel()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in answers)
    await reserved(store, "last")
    names = {one.name for one in await store.read(all_instances, HOME)}
    assert names == {"last", *(f"n{number}" for number in range(10))}


async def test_a_caller_whose_loop_is_closed_does_not_stop_the_others(store: Store) -> None:
    class Leaving(asyncio.SelectorEventLoop):
        """Closes in the very moment in which the answer arrives."""

        def call_soon_threadsafe(self, *args: Any, **named: Any) -> asyncio.Handle:  # type: ignore[override]  # passed on as they came
            self.close()
            return super().call_soon_threadsafe(*args, **named)

    def leave() -> None:
        loop = Leaving()
        caller = loop.create_task(reserved(store, "gone"))
        loop.call_soon(loop.stop)
        loop.run_forever()
        caller._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - it is left on purpose
        caller.get_coro().close()

    await asyncio.to_thread(leave)
    assert (await reserved(store, "stays")).name == "stays"
    assert {one.name for one in await store.read(all_instances, HOME)} == {"gone", "stays"}


async def test_more_than_the_store_accepts_is_refused_at_once_and_passes(
    store: Store, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 20)
    held = await gate.hold(store)
    waiting = [store.submit(do_nothing) for _ in range(20)]
    with pytest.raises(StoreBusyError, match="try again in a moment"):
        store.submit(do_nothing)
    gate.open()
    await asyncio.gather(held, *waiting)
    await store.run(do_nothing)


# --- batches -----------------------------------------------------------------------------------------


async def test_what_queues_during_a_commit_is_one_commit_in_the_order_of_submission(
    store: Store, gate: Gate, plan: FaultPlan
) -> None:
    ran: list[int] = []
    held = await gate.hold(store)
    plan.seen.clear()
    waiting = [store.submit(lambda _, number=number: ran.append(number)) for number in range(100)]  # type: ignore[misc]  # a command
    gate.open()
    await asyncio.gather(held, *waiting)
    assert ran == list(range(100))
    assert plan.seen.count("store.commit.after") == 2


async def test_a_command_that_raises_fails_alone(store: Store, gate: Gate) -> None:
    def broken(tx: Transaction) -> None:
        tx.execute("UPDATE workspaces SET name = 'half done'")
        raise ZeroDivisionError

    held = await gate.hold(store)
    waiting: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(reserved(store)),
        store.submit(broken),
        asyncio.ensure_future(reserved(store)),
    ]
    await asyncio.sleep(0)
    gate.open()
    answers = await asyncio.gather(held, *waiting, return_exceptions=True)
    assert [type(one) for one in answers[1:]] == [AgentInstance, ZeroDivisionError, AgentInstance]
    assert await store.read(count("agent_instances")) == 2
    assert await store.read(count("workspaces", "name = 'half done'")) == 0


async def test_a_refused_command_leaves_the_head_as_it_was(store: Store) -> None:
    def greedy(tx: Transaction) -> None:
        tx.epoch, tx.pruned_until = 99, 99
        raise ZeroDivisionError

    answers = await asyncio.gather(store.run(greedy), reserved(store), return_exceptions=True)
    assert isinstance(answers[0], ZeroDivisionError)
    assert isinstance(answers[1], AgentInstance)
    assert await store.read(lambda reader: reader.fetch("SELECT horizon, epoch FROM head")) == [(0, 0)]


@pytest.mark.parametrize("value", [2**70, "lone \ud800", object()], ids=["a large number", "a surrogate", "an object"])
async def test_a_value_that_the_database_cannot_hold_fails_alone(store: Store, gate: Gate, value: object) -> None:
    def unfit(tx: Transaction) -> None:
        tx.execute("UPDATE workspaces SET name = :value, max_tokens_per_minute = :value", value=value)

    held = await gate.hold(store)
    waiting: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(reserved(store)),
        store.submit(unfit),
        asyncio.ensure_future(reserved(store)),
    ]
    await asyncio.sleep(0)
    gate.open()
    answers = await asyncio.gather(held, *waiting, return_exceptions=True)
    assert isinstance(answers[2], StoreError), answers[2]
    assert isinstance(answers[1], AgentInstance)
    assert isinstance(answers[3], AgentInstance)
    with pytest.raises(StoreError):
        await store.read(lambda reader: reader.fetch("SELECT id FROM workspaces WHERE name = :value", value=value))
    await store.run(do_nothing)


async def test_a_refused_move_in_a_batch_is_not_reported_as_done(store: Store, gate: Gate) -> None:
    """Rows changed are counted: of many moves from one state in one commit the first alone happens."""
    one = await ready(store)
    held = await gate.hold(store)
    tries = [store.submit(moves.move_instance, one, Move(to=AgentState.PROCESSING)) for _ in range(20)]
    gate.open()
    answers = await asyncio.gather(held, *tries, return_exceptions=True)
    assert [isinstance(answer, dict) for answer in answers[1:]] == [True] + [False] * 19
    assert (await current(store, one)).version == one.version + 1


async def test_what_a_query_would_write_is_not_written(store: Store) -> None:
    def sly(reader: Reader) -> None:
        reader.fetch("UPDATE workspaces SET name = 'mine' RETURNING name")

    with contextlib.suppress(StoreError):
        await store.read(sly)
    assert await store.read(count("workspaces", "name = 'mine'")) == 0
    await reserved(store)
    assert await store.read(count("workspaces", "name = 'mine'")) == 0


async def test_a_query_that_raises_harms_no_other(store: Store) -> None:
    def broken(reader: Reader) -> None:
        reader.fetch("SELECT nonsense FROM nowhere")

    answers = await asyncio.gather(
        store.read(broken), reserved(store), store.read(count("workspaces")), return_exceptions=True
    )
    assert isinstance(answers[0], StoreError)
    assert isinstance(answers[1], AgentInstance)
    assert answers[2] == 1


# --- lazy commands -----------------------------------------------------------------------------------


async def test_a_lazy_command_keeps_its_place_and_rides_on_the_next_commit(
    store: Store, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LAZY_SECONDS", 30.0)
    ran: list[str] = []
    plan.seen.clear()
    first = store.submit_lazy(lambda _: ran.append("lazy"))
    second = store.submit_lazy(lambda _: ran.append("lazy too"))
    third = store.submit(lambda _: ran.append("eager"))
    await asyncio.gather(first, second, third)
    assert ran == ["lazy", "lazy too", "eager"]
    assert plan.seen.count("store.commit.after") == 1


async def test_a_lazy_command_starts_a_commit_of_its_own_after_a_while(store: Store, plan: FaultPlan) -> None:
    plan.seen.clear()
    begin = time.monotonic()
    await store.submit_lazy(do_nothing)
    assert time.monotonic() - begin >= writer.LAZY_SECONDS * 0.9
    assert plan.seen.count("store.commit.after") == 1


async def test_closing_does_not_wait_for_the_while_of_a_lazy_command(
    place: Place, seams: Seams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LAZY_SECONDS", 60.0)
    closing = place.store(seams)
    await closing.open()
    lazy = closing.submit_lazy(do_nothing)
    begin = time.monotonic()
    await closing.close()
    await lazy
    assert time.monotonic() - begin < 30


# --- crashes -----------------------------------------------------------------------------------------


async def test_every_commit_passes_the_named_points_in_order(store: Store, plan: FaultPlan) -> None:
    plan.seen.clear()
    await store.run(do_nothing)
    await store.run(do_nothing)  # the last point of a commit comes after its answer, and before the next commit
    points = [*LOST, *KEPT, ANSWERED]
    first = plan.seen.index(LOST[0])  # the end of the commit before may have been seen as well
    assert plan.seen[first : first + len(points) + 1] == [*points, LOST[0]]


@DURABLE
@pytest.mark.parametrize("point", [*LOST, *KEPT])
async def test_a_batch_whose_writer_dies_is_there_whole_or_not_at_all(
    store: Store, place: Place, seams: Seams, plan: FaultPlan, gate: Gate, point: str
) -> None:
    old = await ready(store)
    before, audit = await newest(store), await audit_head(store)
    held = await gate.hold(store)
    pushed = store.submit(moves.move_instance, old, Move(to=AgentState.PROCESSING))
    made = asyncio.ensure_future(reserved(store, "new"))
    await asyncio.sleep(0)
    plan.name, plan.nth = point, 2 if point in LOST[2:4] else 1
    gate.open()
    answers = await asyncio.gather(held, pushed, made, return_exceptions=True)
    died = [one for one in answers if isinstance(one, BaseException)]
    assert all(isinstance(one, StoreFailedError | OutcomeUnknownError) for one in died), answers
    with pytest.raises(StoreFailedError, match="died"):
        await reserved(store)
    await store.close()
    plan.name = ""
    async with place.store(seams) as again:
        found = await current(again, old)
        is_new = await again.read(count("agent_instances", "name = 'new'"))
        told = await newest(again) - before
        acts = (await audit_head(again)).number - audit.number
        assert (told, acts) == (found.state is AgentState.PROCESSING, is_new)
        for answer, there in ((answers[1], told), (answers[2], is_new)):
            assert there or isinstance(answer, BaseException), "acknowledged and gone"
        assert told == is_new or not died, "the two were one batch"
        await brought_to(again, AgentState.TERMINATED)


async def _until_refused(store: Store) -> None:
    while True:  # it may not have died yet
        await store.run(do_nothing)


@DURABLE
@pytest.mark.parametrize("action", ["raise", "oserror"])
async def test_what_was_acknowledged_survives_a_writer_that_dies_right_afterwards(
    place: Place, seams: Seams, plan: FaultPlan, action: Literal["raise", "oserror"]
) -> None:
    plan.name, plan.action = ANSWERED, action
    async with place.store(seams) as store:
        made = await reserved(store)
        with pytest.raises(StoreFailedError, match="died"):
            await _until_refused(store)
        assert await current(store, made) == made
    plan.name = ""
    async with place.store(seams) as again:
        assert await current(again, made) == made
        await again.run(instances.ready_instance, made, {}, {}, by=SYSTEM)


@DURABLE
@pytest.mark.parametrize("point", [*LOST, *KEPT])
async def test_reading_goes_on_beside_a_dead_writer(store: Store, plan: FaultPlan, point: str) -> None:
    made = await ready(store)
    plan.name = point
    try:
        await moved(store, made, AgentState.PROCESSING)
    except StoreError:
        assert point in {*LOST, "store.commit.after"}
    assert (await current(store, made)).state is (AgentState.READY if point in LOST else AgentState.PROCESSING)
    assert len(await whole_log(store)) == 2 + (point in KEPT)
    plan.name = ""


async def test_a_dead_writer_answers_every_caller(store: Store, plan: FaultPlan, gate: Gate) -> None:
    held = await gate.hold(store)
    plan.name = "store.save.after"
    waiting = [store.submit(do_nothing) for _ in range(20)]
    gate.open()
    answers = await asyncio.gather(held, *waiting, return_exceptions=True)
    assert all(isinstance(one, StoreError) for one in answers)
    assert len({id(one) for one in answers}) == 21, "each caller gets an error of its own"
    with pytest.raises(StoreFailedError):
        store.submit(do_nothing)
