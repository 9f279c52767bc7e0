"""Frozen in mid-work, and thawed where it was; at a level that can, which here is a made-up one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_aids import HOUR, Scene, until

from ostler.errors import AgentGoneError, ExecutionTimeoutError, InvalidOperationError
from ostler.isolation import IsolationLevels
from ostler.model import AgentInstance, AgentState, AttemptOutcome, IsolationLevel, ResourceLimits, SuspendDepth
from ostler.testing.simulated import Misfortune, SimulatedIsolation, World

pytestmark = pytest.mark.anyio

S = AgentState
LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


def made_up(scene: Scene, luck: Misfortune) -> IsolationLevels:
    """A level that can freeze, in the place of the one with threads."""
    levels = IsolationLevels(scene.clock)
    levels.use(IsolationLevel.THREAD, SimulatedIsolation(scene.clock, World(chance=Never(), luck=luck)))
    return levels


class Never(random.Random):
    """Nothing unlikely happens."""

    def random(self) -> float:
        return 0.999


@pytest.mark.parametrize("level", LEVELS)
async def test_a_level_that_cannot_freeze_says_so(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(level)
        await scene.busy(instance)
        sentence = f"the {level} level cannot freeze an agent in mid-work; hold or park it"
        with pytest.raises(InvalidOperationError, match=sentence):
            await manager.suspend(instance.instance_id, SuspendDepth.FREEZE)
        assert await scene.state(instance) is S.PROCESSING


async def test_a_frozen_one_thaws_where_it_was_and_its_time_stood_still(scene: Scene) -> None:
    levels = made_up(scene, Misfortune(call_hangs=1.0))
    limits = ResourceLimits(execution_timeout=timedelta(seconds=60))
    async with scene.open(levels=levels) as manager:
        spawning = scene.begin(scene.spawn(IsolationLevel.THREAD, resource_limits=limits))
        await until(lambda: _passes(scene, spawning.done))
        instance = spawning.result()
        call = scene.begin(manager.process(instance.instance_id, "work"))
        await scene.reaches(instance, S.PROCESSING)
        await scene.tick(40)
        frozen = await manager.suspend(instance.instance_id, SuspendDepth.FREEZE)
        assert frozen.state is S.SUSPENDED
        await scene.tick(1000, step=10)
        assert not call.done()
        with pytest.raises(InvalidOperationError, match="resume it first"):
            await manager.process(instance.instance_id, "more")
        assert (await manager.resume(instance.instance_id)).state is S.PROCESSING
        await scene.tick(15)
        assert not call.done()
        await scene.tick(10)
        with pytest.raises(ExecutionTimeoutError):
            await call
        assert (await scene.record(instance)).attempt == 1


async def test_one_that_is_frozen_at_rest_thaws_to_ready(scene: Scene) -> None:
    async with scene.open(levels=made_up(scene, Misfortune())) as manager:
        spawning = scene.begin(scene.spawn(IsolationLevel.THREAD))
        await until(lambda: _passes(scene, spawning.done))
        instance = spawning.result()
        await manager.suspend(instance.instance_id, SuspendDepth.FREEZE, resume_after=HOUR)
        scene.clock.advance(HOUR.total_seconds())
        await scene.reaches(instance, S.READY, attempt=1)


def _passes(scene: Scene, holds: Callable[[], bool]) -> bool:
    scene.clock.advance(0.01)
    return holds()


async def spawned(scene: Scene, limits: ResourceLimits | None = None) -> AgentInstance:
    spawning = scene.begin(scene.spawn(IsolationLevel.THREAD, resource_limits=limits))
    await until(lambda: _passes(scene, spawning.done))
    instance: AgentInstance = spawning.result()
    return instance


async def test_one_that_is_frozen_in_mid_work_when_the_manager_closes_is_parked(scene: Scene) -> None:
    levels = made_up(scene, Misfortune(call_hangs=1.0))
    async with scene.open(levels=levels) as manager:
        instance = await spawned(scene)
        call = scene.begin(manager.process(instance.instance_id, "work"))
        await scene.reaches(instance, S.PROCESSING)
        await scene.drift(1)
        await manager.suspend(instance.instance_id, SuspendDepth.FREEZE)
        ticking = asyncio.ensure_future(_clockwork(scene))  # its farewell goes by the clock
    ticking.cancel()
    with pytest.raises(AgentGoneError):
        await call
    async with scene.open() as manager:  # at a real level this time
        assert await scene.state(instance) is S.SUSPENDED
        (first,) = await scene.attempts(instance)
        assert first.outcome is AttemptOutcome.STOPPED
        assert (await manager.why(instance.instance_id)).verdict.startswith("it is parked")
        back = await manager.resume(instance.instance_id)
        assert (back.state, back.attempt) == (S.READY, 2)


async def test_a_frozen_one_can_be_ended_and_restarted(scene: Scene) -> None:
    async with scene.open(levels=made_up(scene, Misfortune(call_hangs=1.0))) as manager:
        ticking = asyncio.ensure_future(_clockwork(scene))
        instance = await spawned(scene)
        for verb in (manager.restart, manager.terminate):
            call = scene.begin(manager.process(instance.instance_id, "work"))
            await scene.reaches(instance, S.PROCESSING)
            await manager.suspend(instance.instance_id, SuspendDepth.FREEZE)
            await verb(instance.instance_id)
            with pytest.raises(AgentGoneError):
                await call
        assert await scene.state(instance) is S.TERMINATED
        assert not await manager.get_waits(instance.instance_id)
        ticking.cancel()


async def _clockwork(scene: Scene) -> None:
    while True:
        scene.clock.advance(0.01)
        await asyncio.sleep(0.001)
