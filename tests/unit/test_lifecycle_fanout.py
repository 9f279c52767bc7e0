"""What one observer has not read yet, and how events come to it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from ostler.lifecycle.observe import Buffer, Fanout, is_last
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.events import (
    AgentEvent,
    AgentSignalEvent,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Event,
    EventsMissed,
)
from ostler.model.states import AgentState

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ONE = UUID(int=1)


def event(number: int) -> AgentSignalEvent:
    return AgentSignalEvent(
        occurred_at=NOW, sequence=number, workspace_id=HOME_WORKSPACE_ID, instance_id=ONE, name="count"
    )


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


async def test_a_burst_is_read_without_waiting_in_order_and_with_its_gap() -> None:
    buffer = Buffer(None, 3)
    assert buffer.get_ready() is None
    for number in range(1, 6):
        buffer.put(event(number))
    burst = [await some(buffer)]
    while (item := buffer.get_ready()) is not None:
        burst.append(item)
    assert numbers(burst) == ["2 from 1", 3, 4, 5]


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


def fanout_at(cursor: int, *, note_drops: Callable[[int], None] = lambda _: None) -> Fanout:
    fanout = Fanout(note_drops)
    fanout.cursor = cursor
    return fanout


async def test_an_observer_gets_later_events_of_its_instance_or_of_its_workspace() -> None:
    fanout = fanout_at(4)
    one, all_of_them, other, foreign = Buffer(ONE, 9), Buffer(None, 9), Buffer(UUID(int=2), 9), Buffer(None, 9)
    for buffer in (one, all_of_them, other):
        fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
    fanout.attach(foreign, UUID(int=5), anything)
    late = Buffer(ONE, 9)
    late.after = 6
    fanout.attach(late, HOME_WORKSPACE_ID, anything)
    fanout.publish([event(number) for number in (5, 6, 7)])
    fanout.close()
    assert await drained(one) == await drained(all_of_them) == [5, 6, 7]
    assert await drained(late) == [7]
    assert await drained(other) == await drained(foreign) == []
    assert fanout.cursor == 7


async def test_a_large_commit_does_not_overflow_an_observer_that_reads_as_it_comes() -> None:
    dropped: list[int] = []
    fanout, buffer = fanout_at(0, note_drops=dropped.append), Buffer(ONE, 100)
    fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
    fanout.publish([event(number) for number in range(1, 1001)])
    fanout.publish([event(1001)])
    assert numbers([await some(buffer) for _ in range(1001)]) == list(range(1, 1002))
    assert dropped == []


async def test_what_is_pending_at_the_end_is_delivered() -> None:
    fanout, buffer = fanout_at(0), Buffer(ONE, 1000)
    fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
    fanout.publish([event(number) for number in range(1, 501)])
    fanout.close()
    assert await drained(buffer) == list(range(1, 501))


async def test_what_is_dropped_is_counted() -> None:
    dropped: list[int] = []
    fanout, slow = fanout_at(0, note_drops=dropped.append), Buffer(ONE, 2)
    fanout.attach(slow, HOME_WORKSPACE_ID, anything)
    fanout.publish([event(number) for number in range(1, 11)])
    fanout.close()
    assert sum(dropped) == 8
    assert await drained(slow) == ["8 from 1", 9, 10]


async def test_an_observer_that_is_let_go_is_forgotten_and_one_that_comes_too_late_has_ended() -> None:
    fanout = fanout_at(0)
    buffers = [Buffer(ONE, 2) for _ in range(3)]
    for buffer in buffers:
        fanout.attach(buffer, HOME_WORKSPACE_ID, anything)
    fanout.detach(buffers[0])
    fanout.detach(buffers[0])
    assert len(fanout) == 2
    del buffer, buffers
    gc.collect()
    assert len(fanout) == 0
    fanout.close()
    late = Buffer(ONE, 2)
    fanout.attach(late, HOME_WORKSPACE_ID, anything)
    assert await late.get() is None


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
