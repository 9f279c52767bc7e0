"""Places and the queue before them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ostler.lifecycle.slots import Slots

from ostler.errors import AgentBusyError, AgentGoneError

pytestmark = pytest.mark.anyio


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    slots, served = Slots(1, 10), []

    async def ask(number: int) -> None:
        await slots.acquire()
        served.append(number)

    await slots.acquire()
    tasks = [asyncio.ensure_future(ask(number)) for number in range(4)]
    await turn()
    assert (slots.taken, slots.queued, served) == (1, 4, [])
    for number in range(4):
        slots.release()
        await turn()
        assert served == list(range(number + 1))
        assert slots.taken == 1
    slots.release()
    assert (slots.taken, slots.queued) == (0, 0)
    await asyncio.gather(*tasks)


async def test_nobody_overtakes_one_who_was_given_a_place() -> None:
    slots = Slots(1, 10)
    await slots.acquire()
    waiter = asyncio.ensure_future(slots.acquire())
    await turn()
    slots.release()  # given to the waiter, who has not run yet
    with pytest.raises(AgentBusyError):
        await slots.acquire(wait=False)
    await waiter
    assert slots.taken == 1


async def test_a_full_queue_says_what_it_holds() -> None:
    slots = Slots(2, 1)
    await slots.acquire()
    await slots.acquire()
    waiter = asyncio.ensure_future(slots.acquire())
    await turn()
    with pytest.raises(AgentBusyError, match="2 requests are being processed and 1 wait"):
        await slots.acquire()
    slots.release()
    await waiter


async def test_without_waiting_it_is_now_or_not() -> None:
    slots = Slots(1, 10)
    await slots.acquire(wait=False)
    with pytest.raises(AgentBusyError):
        await slots.acquire(wait=False)
    slots.release()
    await slots.acquire(wait=False)


async def test_a_queue_of_none_refuses_at_once() -> None:
    slots = Slots(1, 0)
    await slots.acquire()
    with pytest.raises(AgentBusyError):
        await slots.acquire()


async def test_one_who_gives_up_leaves_the_queue() -> None:
    slots = Slots(1, 10)
    await slots.acquire()
    waiter = asyncio.ensure_future(slots.acquire())
    await turn()
    waiter.cancel()
    await asyncio.wait([waiter])
    assert slots.queued == 0
    slots.release()
    assert slots.taken == 0


async def test_one_who_gives_up_in_the_moment_of_being_served_passes_the_place_on() -> None:
    slots = Slots(1, 10)
    await slots.acquire()
    first, second = (asyncio.ensure_future(slots.acquire()) for _ in range(2))
    await turn()
    slots.release()
    first.cancel()
    await second
    assert first.cancelled()
    assert (slots.taken, slots.queued) == (1, 0)


async def test_those_who_wait_are_told_when_nobody_will_be_served() -> None:
    slots = Slots(1, 10)
    await slots.acquire()
    waiters = [asyncio.ensure_future(slots.acquire()) for _ in range(3)]
    await turn()
    slots.turn_away(AgentGoneError("it has ended"))
    for waiter in waiters:
        with pytest.raises(AgentGoneError, match="it has ended"):
            await waiter
    slots.release()
    assert (slots.taken, slots.queued) == (0, 0)
    slots.turn_away(AgentGoneError("again"))
    await slots.acquire()


@given(st.lists(st.sampled_from(["ask", "release", "cancel", "away"]), max_size=60), st.integers(1, 3))
def test_places_are_neither_lost_nor_made_up(steps: list[str], limit: int) -> None:
    async def play() -> None:
        slots, queue, held = Slots(limit, 5), [], 0
        for step in steps:
            if step == "ask":
                queue.append(asyncio.ensure_future(slots.acquire()))
            elif step == "release" and held:
                slots.release()
                held -= 1
            elif step == "cancel" and queue:
                queue[-1].cancel()
            elif step == "away":
                slots.turn_away(AgentGoneError("gone"))
            await turn()
            done = [one for one in queue if one.done()]
            queue = [one for one in queue if not one.done()]
            held += sum(1 for one in done if not one.cancelled() and one.exception() is None)
            assert slots.taken == held <= limit
            assert slots.queued == len(queue)
            assert not queue or held == limit
        for one in queue:
            one.cancel()
        await turn()

    asyncio.run(play())
