"""Many starts at once: the urgent ones come first, and whoever hangs keeps nobody from starting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lifecycle_aids import until
from lifecycle_haven import Managers

from ostler.model import AgentPriority, AgentState, IsolationLevel, TerminationOptions

pytestmark = pytest.mark.anyio

P = IsolationLevel.PROCESS
CROWD, AT_ONCE = 30, 8


@pytest.fixture
def scene(tmp_path: Any) -> Managers:
    return Managers(home=tmp_path)


async def test_an_urgent_start_goes_before_those_that_wait(scene: Managers) -> None:
    ready: list[AgentPriority] = []

    async def start(priority: AgentPriority) -> None:
        await scene.spawn(P, priority=priority)
        ready.append(priority)

    scene.haven.birth = asyncio.Event()
    async with scene.open() as manager:
        stile = manager._house.starting  # noqa: SLF001 - tests may look inside
        starts = [scene.begin(start(AgentPriority.LOW)) for _ in range(CROWD)]
        await until(lambda: stile.waiting == CROWD - AT_ONCE)
        starts.append(scene.begin(start(AgentPriority.CRITICAL)))
        await until(lambda: stile.waiting == CROWD - AT_ONCE + 1)
        scene.haven.birth.set()
        await asyncio.gather(*starts)
        assert ready.index(AgentPriority.CRITICAL) <= 2 * AT_ONCE
        assert stile.waiting == 0


async def test_starts_that_hang_keep_nobody_from_starting(scene: Managers) -> None:
    scene.haven.birth = asyncio.Event()
    async with scene.open() as manager:
        stile = manager._house.starting  # noqa: SLF001 - tests may look inside
        hanging = [scene.begin(scene.spawn(P)) for _ in range(AT_ONCE)]
        other = scene.begin(scene.spawn(P))
        await until(lambda: stile.waiting == 1)
        scene.clock.advance(0.25)
        await until(lambda: stile.waiting == 0)
        scene.haven.birth.set()
        await asyncio.gather(*hanging, other)


async def test_one_that_waits_for_its_turn_can_be_terminated(scene: Managers) -> None:
    scene.haven.birth = asyncio.Event()
    async with scene.open() as manager:
        house = manager._house  # noqa: SLF001 - tests may look inside
        first = [scene.begin(scene.spawn(P)) for _ in range(AT_ONCE)]
        await until(lambda: len(house.lives) == AT_ONCE)
        late = scene.begin(scene.spawn(P))
        await until(lambda: house.starting.waiting == 1)
        *_, one = house.lives.values()
        assert (await manager.terminate(one.instance_id, TerminationOptions.immediate())).success
        assert house.starting.waiting == 0
        await asyncio.wait([late])
        assert late.exception() is not None
        assert (await scene.record(one.record)).state is AgentState.TERMINATED
        scene.haven.birth.set()
        await asyncio.gather(*first)
