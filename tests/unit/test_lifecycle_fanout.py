"""What one observer has not read yet, and how events come to it."""

from __future__ import annotations

import asyncio
import gc
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import StoreBusyError
from ostler.lifecycle.fanout import Buffer, Fanout, is_last
from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentEvent,
    AgentSignalEvent,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Event,
    EventsMissed,
    SpawnRequest,
)
from ostler.store import Store
from ostler.store.commands import ReportSignal, ReserveInstance
from ostler.testing.clock import ManualClock, memory_store

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ONE = UUID(int=1)


def event(number: int) -> AgentSignalEvent:
    return AgentSignalEvent(occurred_at=NOW, sequence=number, instance_id=ONE, name="count")


def numbers(found: list[Event | EventsMissed]) -> list[int | str]:
    return [
        f"{one.count} from {one.first_sequence}" if isinstance(one, EventsMissed) else one.sequence for one in found
    ]


async def some(buffer: Buffer) -> Event | EventsMissed:
    found = await buffer.get()
    assert found is not None
    return found


async def drained(buffer: Buffer) -> list[int | str]:
    buffer.close()
    found: list[Event | EventsMissed] = []
    while (one := await buffer.get()) is not None:
        found.append(one)
    return numbers(found)


# --- the buffer --------------------------------------------------------------------------------------


async def test_what_fits_is_kept_in_order() -> None:
    buffer = Buffer(ONE, 3)
    assert all(buffer.put(event(number)) for number in (1, 2, 3))
    assert buffer.missed == 0
    assert await drained(buffer) == [1, 2, 3]


async def test_what_does_not_fit_drops_the_oldest_and_says_so_once() -> None:
    buffer = Buffer(ONE, 2)
    assert [buffer.put(event(number)) for number in (4, 5, 6, 8)] == [True, True, False, False]
    assert numbers([await some(buffer), await some(buffer)]) == ["2 from 4", 6]
    buffer.put(event(9))
    assert await drained(buffer) == [8, 9]


async def test_a_second_gap_is_a_gap_of_its_own() -> None:
    buffer = Buffer(ONE, 1)
    for number in (1, 2):
        buffer.put(event(number))
    assert numbers([await some(buffer)]) == ["1 from 1"]
    for number in (3, 4):
        buffer.put(event(number))
    assert await drained(buffer) == ["2 from 2", 4]


async def test_a_reader_waits_for_the_next_and_for_the_end() -> None:
    buffer = Buffer(ONE, 2)
    reading = asyncio.ensure_future(buffer.get())
    await asyncio.sleep(0)
    buffer.put(event(1))
    assert await reading == event(1)
    reading = asyncio.ensure_future(buffer.get())
    await asyncio.sleep(0)
    buffer.close()
    assert await reading is None
    assert await buffer.get() is None


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    buffer = Buffer(ONE, 2)
    reading = asyncio.ensure_future(buffer.get())
    await asyncio.sleep(0)
    reading.cancel()
    buffer.put(event(1))
    await asyncio.wait([reading])
    assert numbers([await some(buffer)]) == [1]


# --- the fan-out -------------------------------------------------------------------------------------


def anything(_: Event) -> bool:
    return True


async def spawned(store: Store) -> UUID:
    command = ReserveInstance(request=SpawnRequest(agent_definition_id=UUID(int=9)))
    return (await store.commit(command)).instance_id


async def say(store: Store, instance_id: UUID, count: int = 1) -> None:
    for _ in range(count):
        await store.commit(ReportSignal(instance_id=instance_id, attempt=1, name="count"))


async def test_it_begins_where_the_log_is() -> None:
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), lambda _: None)
        await fanout.start()
        assert fanout.cursor == (await store.head()).sequence
        one, all_of_them, other = Buffer(instance_id, 9), Buffer(None, 9), Buffer(ONE, 9)
        for buffer in (one, all_of_them, other):
            fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
        await say(store, instance_id, 3)
        await fanout.close()
        assert len(await drained(one)) == len(await drained(all_of_them)) == 3
        assert await drained(other) == []


async def test_what_is_committed_while_a_page_is_read_is_delivered_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), lambda _: None)
        await fanout.start()
        one = Buffer(instance_id, 9)
        fanout.attach(one, HOME_WORKSPACE_ID, anything)
        read, reading, go_on = store.read_page, asyncio.Event(), asyncio.Event()

        async def late(*words: Any, **more: Any) -> Any:
            page = await read(*words, **more)
            reading.set()
            await go_on.wait()
            return page

        monkeypatch.setattr(store, "read_page", late)
        await say(store, instance_id, 1)
        await reading.wait()
        await say(store, instance_id, 1)
        closing = asyncio.create_task(fanout.close())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        assert len(await drained(one)) == 2


async def test_who_is_let_go_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), lambda _: None)
        await fanout.start()
        buffer = Buffer(ONE, 9)
        fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
        del buffer
        gc.collect()

        async def unread(*_: Any, **__: Any) -> Any:
            pytest.fail("nobody looks")

        monkeypatch.setattr(store, "read_page", unread)
        await say(store, instance_id, 1)
        await fanout.close()
        assert fanout.cursor == (await store.head()).sequence


async def test_another_workspace_and_what_is_known_are_left_out() -> None:
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), lambda _: None)
        await fanout.start()
        foreign, late = Buffer(None, 9), Buffer(instance_id, 9)
        fanout.attach(foreign, UUID(int=5), anything)
        late.after = fanout.cursor + 2
        fanout.attach(late, HOME_WORKSPACE_ID, anything)
        await say(store, instance_id, 3)
        await fanout.close()
        assert await drained(foreign) == []
        assert await drained(late) == [late.after + 1]


async def test_what_is_dropped_is_counted() -> None:
    dropped: list[int] = []
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), dropped.append)
        await fanout.start()
        slow = Buffer(instance_id, 2)
        fanout.attach(slow, HOME_WORKSPACE_ID, anything)
        await say(store, instance_id, 10)
        await fanout.close()
        assert sum(dropped) == slow.missed == 8


async def test_who_is_let_go_is_forgotten_and_who_comes_too_late_has_ended() -> None:
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, ManualClock(), lambda _: None)
        await fanout.start()
        buffers = [Buffer(instance_id, 2) for _ in range(3)]
        for buffer in buffers:
            fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
        fanout.detach(buffers[0])
        fanout.detach(buffers[0])
        assert fanout.watching == 2
        del buffer, buffers
        gc.collect()
        assert fanout.watching == 0
        await fanout.close()
        late = Buffer(instance_id, 2)
        fanout.attach(late, HOME_WORKSPACE_ID, anything)
        assert await late.get() is None


async def test_a_store_that_is_busy_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with memory_store() as store:
        instance_id = await spawned(store)
        fanout = Fanout(store, clock, lambda _: None)
        await fanout.start()
        buffer = Buffer(instance_id, 9)
        fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
        real, asked = store.read_page, asyncio.Event()

        async def moody(after: int = 0) -> object:
            if asked.is_set():
                return await real(after)
            asked.set()
            raise StoreBusyError

        monkeypatch.setattr(store, "read_page", moody)
        await say(store, instance_id)
        await asked.wait()
        reading = asyncio.ensure_future(buffer.get())
        while not reading.done():
            clock.advance(1)
            await asyncio.sleep(0.001)
        assert isinstance(reading.result(), AgentSignalEvent)
        await fanout.close()


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (AgentTerminatedEvent, True),
        (AgentState.TERMINATED, False),  # it says one thing more
        (AgentState.FAILED, True),
        (AgentState.READY, False),
        (None, False),
    ],
)
def test_which_event_is_the_last(last: object, found: bool) -> None:
    about: dict[str, Any] = {"occurred_at": NOW, "instance_id": ONE}
    one: AgentEvent = event(1)
    if isinstance(last, AgentState):
        final = last in {AgentState.FAILED, AgentState.TERMINATED}
        one = AgentStateChangedEvent(previous_state=AgentState.WAITING, new_state=last, is_final=final, **about)
    elif last is AgentTerminatedEvent:
        one = AgentTerminatedEvent(final_state=AgentState.TERMINATED, was_graceful=True, uptime=NOW - NOW, **about)
    assert is_last(one) is found
