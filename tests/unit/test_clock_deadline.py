"""A bound on a block, by a clock that is driven by hand."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ostler.clock import Deadline, SystemClock
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def bounded(clock: ManualClock, limit: timedelta | float | None, over: asyncio.Event) -> str:
    async with Deadline(clock, limit):
        await over.wait()
    return "done"


@pytest.mark.parametrize("limit", [2, 2.0, timedelta(seconds=2)])
async def test_a_block_that_takes_too_long_is_cancelled(clock: ManualClock, limit: float) -> None:
    task = asyncio.ensure_future(bounded(clock, limit, asyncio.Event()))
    await turn()
    clock.advance(1.9)
    await turn()
    assert not task.done()
    clock.advance(0.2)
    with pytest.raises(TimeoutError):
        await task
    assert not task.cancelled()
    assert task.cancelling() == 0


async def test_one_that_is_in_time_is_not(clock: ManualClock) -> None:
    over = asyncio.Event()
    task = asyncio.ensure_future(bounded(clock, 2, over))
    await turn()
    over.set()
    assert await task == "done"
    clock.advance(10)
    await turn()
    assert task.cancelling() == 0


async def test_without_a_limit_it_waits_for_ever(clock: ManualClock) -> None:
    over = asyncio.Event()
    task = asyncio.ensure_future(bounded(clock, None, over))
    await turn()
    clock.advance(10**9)
    await turn()
    assert not task.done()
    over.set()
    assert await task == "done"


@pytest.mark.parametrize("limit", [0, -1, timedelta(0)])
async def test_no_time_at_all_is_over_at_the_first_wait(clock: ManualClock, limit: float) -> None:
    task = asyncio.ensure_future(bounded(clock, limit, asyncio.Event()))
    with pytest.raises(TimeoutError):
        await task


async def test_the_wall_clock_does_not_matter(clock: ManualClock) -> None:
    task = asyncio.ensure_future(bounded(clock, 2, asyncio.Event()))
    await turn()
    clock.jump(timedelta(days=365))
    await turn()
    assert not task.done()
    clock.advance(3)
    with pytest.raises(TimeoutError):
        await task


async def test_a_cancellation_from_outside_stays_one(clock: ManualClock) -> None:
    task = asyncio.ensure_future(bounded(clock, 2, asyncio.Event()))
    await turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_from_outside_and_too_late_is_cancelled(clock: ManualClock) -> None:
    """Whoever cancels waits for a cancelled task; a time-out in its place would be swallowed somewhere."""
    task = asyncio.ensure_future(bounded(clock, 2, asyncio.Event()))
    await turn()
    clock.advance(3)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_an_error_of_the_block_goes_before_its_time_out(clock: ManualClock) -> None:
    async def work() -> None:
        async with Deadline(clock, 2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("while it was cancelled") from None

    task = asyncio.ensure_future(work())
    await turn()
    clock.advance(3)
    with pytest.raises(ValueError, match="while it was cancelled"):
        await task
    assert task.cancelling() == 0


async def test_a_block_that_swallows_it_goes_on_and_can_be_cancelled_again(clock: ManualClock) -> None:
    goes_on, expired = asyncio.Event(), []

    async def work() -> None:
        async with Deadline(clock, 2) as deadline:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                expired.append(deadline.expired)
        await goes_on.wait()

    task = asyncio.ensure_future(work())
    await turn()
    clock.advance(3)
    await turn()
    assert expired == [True]
    assert not task.done()
    assert task.cancelling() == 0
    goes_on.set()
    await task


async def test_the_inner_and_the_outer_are_told_apart(clock: ManualClock) -> None:
    said = []

    async def work(outer: float, inner: float) -> None:
        try:
            async with Deadline(clock, outer):
                try:
                    async with Deadline(clock, inner):
                        await asyncio.Event().wait()
                except TimeoutError:
                    said.append("inner")
                    await asyncio.Event().wait()
        except TimeoutError:
            said.append("outer")

    for outer, inner in ((5, 2), (2, 5)):
        task = asyncio.ensure_future(work(outer, inner))
        await turn()
        clock.advance(3)
        await turn()
        clock.advance(3)
        await task
    assert said == ["inner", "outer", "outer"]


async def test_both_at_the_same_moment_are_the_outer_one(clock: ManualClock) -> None:
    async def work() -> None:
        async with Deadline(clock, 2), Deadline(clock, 2):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await turn()
    clock.advance(3)
    with pytest.raises(TimeoutError):
        await task
    assert task.cancelling() == 0


async def test_it_works_by_the_real_clock_too() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(SystemClock(), 0.01):
            await asyncio.Event().wait()


def test_it_needs_a_task(clock: ManualClock) -> None:
    async def enter() -> None:
        async with Deadline(clock, 1):
            pass

    step = enter()
    with pytest.raises(RuntimeError):
        step.send(None)
