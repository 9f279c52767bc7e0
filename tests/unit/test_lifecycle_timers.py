"""Durable waits that ring once, by a clock that does not jump."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from ostler.lifecycle.timers import Timers
from ostler.model import HOME_WORKSPACE_ID, Wait, WaitKind
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

HOUR, YEAR = timedelta(hours=1), timedelta(days=365)


class Bell:
    """Timers that remember what rang."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.rang: list[int] = []

    def start(self) -> None:
        self.timers.start(lambda wait: self.rang.append(wait.wait_id.int))

    def wait(self, number: int, due: timedelta | None = None) -> Wait:
        now = self.clock.wall()
        return Wait(
            wait_id=UUID(int=number),
            workspace_id=HOME_WORKSPACE_ID,
            kind=WaitKind.RESUME,
            created_at=now,
            due_at=None if due is None else now + due,
        )

    async def passes(self, length: timedelta, steps: int = 1) -> None:
        """In steps, as a clock does: a timer that rings may set another."""
        for _ in range(steps):
            self.clock.advance(length.total_seconds() / steps)
            for _ in range(3):
                await asyncio.sleep(0)


@pytest.fixture
async def bell() -> Bell:
    return Bell()


async def test_each_rings_once_when_it_is_due(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(2), 2 * HOUR)
    bell.timers.add(bell.wait(1), HOUR)
    await bell.passes(HOUR - timedelta(seconds=1), steps=120)
    assert bell.rang == []
    assert bell.timers.remaining(UUID(int=1)) == timedelta(seconds=1)
    await bell.passes(timedelta(seconds=1))
    assert bell.rang == [1]
    await bell.passes(10 * HOUR, steps=600)
    assert bell.rang == [1, 2]
    assert len(bell.timers) == 0
    assert bell.timers.remaining(UUID(int=1)) is None


async def test_what_is_due_at_once_rings_at_once(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(1), timedelta(0))
    bell.timers.add(bell.wait(2), -HOUR)
    await bell.passes(timedelta(0))
    assert sorted(bell.rang) == [1, 2]


async def test_nothing_rings_before_the_start(bell: Bell) -> None:
    bell.timers.add(bell.wait(1), timedelta(seconds=1))
    bell.timers.add(bell.wait(2), HOUR)
    await bell.passes(timedelta(minutes=1))
    assert bell.rang == []
    bell.start()
    await bell.passes(timedelta(0))
    assert bell.rang == [1]
    assert bell.timers.remaining(UUID(int=2)) == HOUR - timedelta(minutes=1)


async def test_one_that_is_set_again_rings_at_the_new_time_only(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(1), HOUR)
    bell.timers.add(bell.wait(1), 2 * HOUR)
    await bell.passes(HOUR, steps=60)
    assert bell.rang == []
    await bell.passes(HOUR, steps=60)
    assert bell.rang == [1]


async def test_one_that_was_dropped_does_not_ring(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(1), HOUR)
    bell.timers.drop(UUID(int=1))
    bell.timers.drop(UUID(int=1))
    await bell.passes(2 * HOUR, steps=120)
    assert bell.rang == []


async def test_none_rings_after_the_end(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(1), HOUR)
    bell.timers.close()
    bell.timers.add(bell.wait(2), HOUR)
    await bell.passes(2 * HOUR, steps=120)
    assert bell.rang == []


async def test_the_wall_clock_may_do_what_it_likes(bell: Bell) -> None:
    bell.start()
    bell.timers.add(bell.wait(1, HOUR), HOUR)
    bell.clock.jump(YEAR)
    await bell.passes(HOUR / 2, steps=30)
    assert bell.rang == []
    bell.clock.jump(-3 * YEAR)
    await bell.passes(HOUR / 2, steps=30)
    assert bell.rang == [1]


@pytest.mark.parametrize(
    ("jump", "left"),
    [
        (timedelta(0), HOUR),
        (HOUR / 2, HOUR / 2),
        (YEAR, timedelta(0)),
        (-YEAR, HOUR),  # set back since: never longer than it was meant to be
    ],
)
async def test_one_that_is_found_again_has_what_is_left(bell: Bell, jump: timedelta, left: timedelta) -> None:
    wait = bell.wait(1, HOUR)
    bell.clock.jump(jump)
    bell.timers.found(wait)
    assert bell.timers.remaining(wait.wait_id) == left
    bell.start()
    await bell.passes(left, steps=60)
    assert bell.rang == [1]


async def test_one_without_an_end_is_not_watched(bell: Bell) -> None:
    bell.timers.found(bell.wait(1))
    assert len(bell.timers) == 0


async def test_a_machine_that_slept_rings_within_a_minute_of_waking(bell: Bell) -> None:
    """The timers of a loop stand still while it sleeps; the boot clock does not."""
    slept = 0.0

    class Sleeper(ManualClock):
        def boot(self) -> float:
            return self.mono() + slept

    clock = bell.clock = Sleeper()
    bell.timers = Timers(clock)
    bell.start()
    bell.timers.add(bell.wait(1), HOUR)
    await bell.passes(timedelta(seconds=30))
    slept = HOUR.total_seconds()
    await bell.passes(timedelta(seconds=30))
    assert bell.rang == [1]
