from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ostler.clock import Clock
from ostler.testing.clock import ManualClock


def test_time_stands_still_until_it_is_told_to_pass() -> None:
    clock = ManualClock()
    seen: Clock = clock
    start = seen.wall()
    assert (seen.mono(), seen.boot(), seen.wall()) == (0, 0, start)
    clock.advance(1.5)
    assert (seen.mono(), seen.boot(), seen.wall()) == (1.5, 1.5, start + timedelta(seconds=1.5))


def test_a_jump_moves_the_wall_clock_alone() -> None:
    clock = ManualClock()
    start = clock.wall()
    clock.jump(timedelta(hours=-2))
    assert (clock.mono(), clock.boot(), clock.wall()) == (0, 0, start - timedelta(hours=2))
    with pytest.raises(ValueError, match="jump"):
        clock.advance(-1)


@pytest.mark.anyio
async def test_sleepers_wake_in_the_order_in_which_they_are_due() -> None:
    clock = ManualClock()
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    tasks = [asyncio.ensure_future(sleeper(seconds)) for seconds in (3, 1, 2)]
    gone = asyncio.ensure_future(sleeper(1))
    await asyncio.sleep(0)
    gone.cancel()
    clock.advance(2)
    await asyncio.gather(tasks[1], tasks[2])
    assert woken == [1, 2]
    clock.advance(1)
    await tasks[0]
    await clock.sleep(0)
    assert woken == [1, 2, 3]
