"""Clean-up hooks: all of them run, and none of them for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor
from datetime import timedelta

import pytest
from runner_ground import Plain, clock, pool, raising, runner, turns, workers

from ostler.testing.clock import ManualClock

__all__ = ["clock", "pool", "workers"]

pytestmark = pytest.mark.anyio


async def test_hooks_run_last_first_and_one_that_fails_does_not_stop_the_rest(
    clock: ManualClock, workers: Executor | None
) -> None:
    it, ran = runner(Plain, clock, workers), []

    async def late() -> None:
        await asyncio.sleep(0)
        ran.append("async")

    it.context.add_cleanup(lambda: ran.append("first"))
    it.context.add_cleanup(lambda: raising(OSError("no disk")), name="save")
    it.context.add_cleanup(lambda: raising(SystemExit(1)), name="exit")
    it.context.add_cleanup(lambda: raising(asyncio.CancelledError()), name="cancel")
    it.context.add_cleanup(late)
    it.context.add_cleanup(lambda: ran.append("last"))
    assert await it.run("cleanup") == [
        "clean-up cancel failed: CancelledError",
        "clean-up exit failed: SystemExit: 1",
        "clean-up save failed: OSError: no disk",
    ]
    assert ran == ["last", "async", "first"]
    assert await it.run("cleanup") == []


async def test_a_late_hook_is_cancelled_and_reported(clock: ManualClock) -> None:
    it, ran = runner(Plain, clock), []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ran.append("cancelled")

    it.context.add_cleanup(lambda: ran.append("next"))
    it.context.add_cleanup(hang, name="hang", timeout=timedelta(seconds=3))
    task = asyncio.create_task(it.run("cleanup"))
    await turns()
    assert not ran
    clock.advance(3)
    assert await task == ["clean-up hang took longer than 3 s"]
    assert ran == ["cancelled", "next"]


async def test_a_hook_that_does_not_even_react_is_left_behind(clock: ManualClock) -> None:
    it, release = runner(Plain, clock), asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    it.context.add_cleanup(stubborn, name="stubborn", timeout=timedelta(seconds=1))
    task = asyncio.create_task(it.run("cleanup"))
    for _ in range(2):
        await turns()
        clock.advance(1)
    assert await task == ["clean-up stubborn took longer than 1 s"]
    release.set()
    await turns()


async def test_a_plain_hook_that_blocks_its_thread_is_left_behind(clock: ManualClock, pool: Executor) -> None:
    it, started, go_on = runner(Plain, clock, pool), threading.Event(), threading.Event()
    seen: list[bool] = []

    def block() -> None:
        started.set()
        go_on.wait(60)
        seen.append(it.context.cancelled)

    it.context.add_cleanup(block, name="block", timeout=timedelta(seconds=1))
    task = asyncio.create_task(it.run("cleanup"))
    await asyncio.to_thread(started.wait, 60)
    clock.advance(1)
    assert await task == ["clean-up block took longer than 1 s"]
    go_on.set()
    pool.shutdown()
    assert seen == [True], "it can still see that it was given up"


async def test_cancelling_the_clean_up_ends_the_hook_that_runs(clock: ManualClock) -> None:
    it, ended = runner(Plain, clock), []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    it.context.add_cleanup(hang)
    task = asyncio.create_task(it.run("cleanup"))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert ended == [1]
