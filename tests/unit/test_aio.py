"""Waiting that outlives a cancellation, and waiting for the first of several."""

from __future__ import annotations

import asyncio

import pytest

from ostler.aio import finish, first_of, wait_ignoring_cancel

pytestmark = pytest.mark.anyio


async def test_work_is_finished_although_its_caller_is_cancelled_twice() -> None:
    begun, release, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await release.wait()
        finished.set()

    caller = asyncio.ensure_future(finish(work()))
    await begun.wait()
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert finished.is_set()


async def test_an_error_of_the_work_goes_before_the_cancellation() -> None:
    release = asyncio.Event()

    async def work() -> None:
        await release.wait()
        raise ValueError("full disk")

    caller = asyncio.ensure_future(finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(ValueError, match="full disk"):
        await caller


async def test_a_wait_that_ignores_cancelling_ends_with_the_first() -> None:
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    waiting = asyncio.ensure_future(wait_ignoring_cancel(first, second))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    second.set_result(None)
    await waiting


async def test_the_first_of_several_cancels_the_other_coroutines_and_leaves_futures() -> None:
    event, future = asyncio.Event(), asyncio.get_running_loop().create_future()
    cancelled: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    event.set()
    await first_of(event.wait(), slow(), future)
    assert cancelled == [True]
    assert not future.done()


async def test_the_first_of_several_raises_the_error_of_a_coroutine() -> None:
    async def broken() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await first_of(broken(), asyncio.get_running_loop().create_future())
