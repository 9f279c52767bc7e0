from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ostler.seams import SystemClock
from ostler.simulation.asking import Asking, Question
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World

pytestmark = pytest.mark.anyio


def _question() -> Question:
    return (lambda _: 1, AgentView(Member("one", 1, None, {}), World(SimulationState(), 1, {})))


async def test_others_on_the_loop_get_their_chance_between_quick_turns() -> None:
    asking = Asking(clock=SystemClock(), timeout=timedelta(seconds=30), concurrency=4)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(tick())
    for _ in range(64):
        assert await asking.ask_plain([_question()]) == [1]
    assert ticks >= 4
    other.cancel()
    await asking.close()


async def test_the_answers_tell_which_types_are_among_them() -> None:
    asking = Asking(clock=SystemClock(), timeout=timedelta(seconds=30), concurrency=4)
    view = _question()[1]

    async def later() -> bytes:
        return b""

    def wrong(_: AgentView) -> None:
        raise ValueError

    answers = await asking.ask_plain(
        [(lambda _: 1, view), (lambda _: "", view), (lambda _: later(), view), (wrong, view)]
    )
    assert answers.kinds == set(map(type, answers))
    await asking.close()
