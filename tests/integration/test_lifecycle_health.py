"""Health: how it is asked for, what it takes to change, what follows; and the samples that are taken beside it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_aids import Gate, Scene, until

from ostler.errors import AgentGoneError
from ostler.isolation import IsolationLevels
from ostler.lifecycle import LifecycleSettings
from ostler.model import (
    AgentHealthChangedEvent,
    AgentInstance,
    AgentMetricsUpdatedEvent,
    AgentState,
    AttemptOutcome,
    HealthCheckConfig,
    HealthState,
    IsolationLevel,
    ProbeType,
    RestartPolicy,
)
from ostler.testing.simulated import Misfortune, SimulatedIsolation, World

pytestmark = pytest.mark.anyio

S = AgentState
H = HealthState
SECOND = timedelta(seconds=1)
CUSTOM = HealthCheckConfig(probe=ProbeType.CUSTOM, interval=SECOND, timeout=SECOND)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def healths(scene: Scene, instance: AgentInstance) -> list[HealthState]:
    return [one.new_health for one in await scene.events(instance, AgentHealthChangedEvent)]


async def turns(scene: Scene, instance: AgentInstance, state: HealthState) -> AgentInstance:
    """Let time pass until its health is this."""

    async def there() -> bool:
        await scene.drift(1)
        return (await scene.record(instance)).health.state is state

    await until(there, what=f"it is not {state}")
    return await scene.record(instance)


# --- the heartbeat -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [IsolationLevel.NONE, IsolationLevel.THREAD])
async def test_the_heartbeat_is_the_default(scene: Scene, level: IsolationLevel) -> None:
    async with scene.open():
        instance = await scene.spawn(level)
        assert (await scene.record(instance)).health.state is H.UNKNOWN
        await scene.tick(5)
        assert (await scene.record(instance)).health.state is H.UNKNOWN  # one good answer is no health yet
        await scene.tick(6)
        record = await scene.record(instance)
        assert (record.health.state, record.health.consecutive_successes) == (H.HEALTHY, 2)
        assert record.health.checked_at is not None
        await scene.tick(60)
        assert await healths(scene, instance) == [H.HEALTHY]


async def test_one_that_blocks_misses_its_heartbeats_and_nobody_else_does(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(IsolationLevel.THREAD)
        other = await scene.spawn(IsolationLevel.THREAD)
        await ticks(scene, instance, H.HEALTHY)
        call = await scene.busy(instance, "wall")
        sick = await turns(scene, instance, H.UNHEALTHY)
        assert sick.health.details == "no answer within 3 s"
        assert (await scene.record(other)).health.state is H.HEALTHY
        assert await manager.process(other.instance_id, "hello") == "hello"
        scene.stage.wall.set()
        assert await call == "wall"
        await ticks(scene, instance, H.HEALTHY)
        assert await healths(scene, instance) == [H.HEALTHY, H.DEGRADED, H.UNHEALTHY, H.HEALTHY]


async def test_a_death_that_nobody_told_of_is_found(scene: Scene) -> None:
    class Always(random.Random):
        def random(self) -> float:
            return 0.999

    world = World(chance=Always(), luck=Misfortune(notice_lost=1.0))
    levels = IsolationLevels(scene.clock)
    levels.use(IsolationLevel.THREAD, SimulatedIsolation(scene.clock, world))
    async with scene.open(levels=levels):
        spawning = scene.begin(scene.spawn(IsolationLevel.THREAD, restart_policy=RestartPolicy.immediate()))
        while not spawning.done():
            await scene.drift(1)
        instance = spawning.result()
        (cell,) = world.alive[instance.instance_id]
        cell.die()
        await scene.drift(7)
        await until(lambda: _attempt(scene, instance, 2, scene.drift))


async def _attempt(
    scene: Scene, instance: AgentInstance, number: int, passes: Callable[[int], Awaitable[None]]
) -> bool:
    await passes(1)
    record = await scene.record(instance)
    return (record.state, record.attempt) == (S.READY, number)


# --- the agent's own word ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", [IsolationLevel.NONE, IsolationLevel.THREAD])
@pytest.mark.parametrize(
    ("answer", "details"),
    [
        (False, ""),
        ("the model is gone", "the model is gone"),
        (ValueError("no model"), "ValueError: no model"),
        ("hang", "no answer within 1 s"),
    ],
    ids=["false", "text", "raise", "hang"],
)
async def test_an_agent_that_says_it_is_unwell(scene: Scene, answer: Any, details: str, level: IsolationLevel) -> None:
    scene.stage.health = Gate() if answer == "hang" else answer
    async with scene.open() as manager:
        instance = await scene.spawn(level, health_check=CUSTOM)
        sick = await (turns if answer == "hang" else ticks)(scene, instance, H.UNHEALTHY)
        assert details in (sick.health.details or "")
        assert sick.health.details
        assert sick.state is S.READY
        assert await manager.process(instance.instance_id, "hello") == "hello"


@pytest.mark.parametrize("answer", [None, True])
async def test_an_agent_that_says_it_is_well(scene: Scene, answer: object) -> None:
    scene.stage.health = answer
    async with scene.open():
        instance = await scene.spawn(health_check=CUSTOM)
        await ticks(scene, instance, H.HEALTHY)
        assert scene.stage.looks >= 2


async def test_the_thresholds_hold_in_both_directions(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(health_check=CUSTOM.evolve(failure_threshold=3, success_threshold=2))
        await ticks(scene, instance, H.HEALTHY)
        scene.stage.health = "unwell"
        before = scene.stage.looks
        degraded = await ticks(scene, instance, H.DEGRADED)
        assert degraded.health.details == "unwell"
        await ticks(scene, instance, H.UNHEALTHY)
        assert scene.stage.looks == before + 3
        scene.stage.health = None
        await ticks(scene, instance, H.HEALTHY)
        assert scene.stage.looks == before + 5
        events = await scene.events(instance, AgentHealthChangedEvent)
        assert [(one.previous_health, one.new_health) for one in events] == [
            (H.UNKNOWN, H.HEALTHY),
            (H.HEALTHY, H.DEGRADED),
            (H.DEGRADED, H.UNHEALTHY),
            (H.UNHEALTHY, H.HEALTHY),
        ]
        assert (await manager.get_statistics()).by_health[H.HEALTHY] == 1


async def test_failures_right_after_a_start_do_not_count(scene: Scene) -> None:
    scene.stage.health = "warming up"
    async with scene.open():
        instance = await scene.spawn(health_check=CUSTOM.evolve(start_period=timedelta(seconds=30)))
        scene.clock.jump(timedelta(days=365))
        await scene.tick(28)
        assert scene.stage.looks > 20
        assert (await scene.record(instance)).health.state is H.UNKNOWN
        await scene.tick(7)
        assert (await scene.record(instance)).health.state is H.UNHEALTHY


async def test_one_that_is_suspended_is_left_alone(scene: Scene) -> None:
    async with scene.open() as manager:
        instance = await scene.spawn(health_check=CUSTOM)
        await manager.suspend(instance.instance_id)
        await scene.tick(20)
        assert scene.stage.looks == 0
        await manager.resume(instance.instance_id)
        await ticks(scene, instance, H.HEALTHY)


# --- probes from outside -----------------------------------------------------------------------------


@asynccontextmanager
async def serving(answers: list[bytes]) -> AsyncIterator[int]:
    """Says the first of these to everybody; nothing, where it is empty."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers[0]:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers[0])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_an_http_probe(scene: Scene) -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    async with serving(answers) as port, scene.open():
        check = CUSTOM.evolve(probe=ProbeType.HTTP, target=f"http://127.0.0.1:{port}/health")
        instance = await scene.spawn(health_check=check)
        await ticks(scene, instance, H.HEALTHY)
        answers[0] = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
        sick = await ticks(scene, instance, H.UNHEALTHY)
        assert sick.health.details == "HTTP status 503"


async def test_a_tcp_probe(scene: Scene) -> None:
    async with scene.open():
        async with serving([b""]) as port:
            check = CUSTOM.evolve(probe=ProbeType.TCP, target=f"127.0.0.1:{port}")
            instance = await scene.spawn(health_check=check)
            await ticks(scene, instance, H.HEALTHY)
        await ticks(scene, instance, H.UNHEALTHY)


async def test_a_command_probe(scene: Scene, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    program = f"import os, sys; sys.exit(os.path.exists({str(sick)!r}))"
    check = CUSTOM.evolve(probe=ProbeType.COMMAND, target=f'{sys.executable} -c "{program}"', failure_threshold=1)
    async with scene.open():
        instance = await scene.spawn(health_check=check)
        await ticks(scene, instance, H.HEALTHY)
        sick.touch()
        await ticks(scene, instance, H.UNHEALTHY)


async def ticks(scene: Scene, instance: AgentInstance, state: HealthState) -> AgentInstance:
    """The same as `turns`, where a look takes real time: each is waited for."""

    async def there() -> bool:
        await scene.tick(1)
        return (await scene.record(instance)).health.state is state

    await until(there, what=f"it is not {state}")
    return await scene.record(instance)


# --- what follows ------------------------------------------------------------------------------------


async def test_one_that_is_unhealthy_is_restarted_where_a_policy_says_so(scene: Scene) -> None:
    async with scene.open():
        stays = await scene.spawn(health_check=CUSTOM)
        never = await scene.spawn(health_check=CUSTOM, restart_policy=RestartPolicy.none())
        comes = await scene.spawn(health_check=CUSTOM, restart_policy=RestartPolicy.immediate())
        await ticks(scene, comes, H.HEALTHY)
        call = await scene.busy(comes)
        scene.stage.health = "unwell"
        await until(lambda: _attempt(scene, comes, 2, scene.tick))
        scene.stage.health = None
        with pytest.raises(AgentGoneError):
            await call
        first, *_ = await scene.attempts(comes)
        assert (first.outcome, first.detail) == (AttemptOutcome.STOPPED, "unhealthy: unwell")
        for one in (stays, never):
            record = await scene.record(one)
            assert (record.state, record.attempt) == (S.READY, 1)
        back = await ticks(scene, comes, H.HEALTHY)
        assert (back.restart_count, back.lifetime_restarts) == (0, 1)


# --- samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [timedelta(seconds=5), timedelta(minutes=10)])
async def test_samples_are_taken_every_five_seconds_and_kept_when_they_say_something_new(
    scene: Scene, interval: timedelta
) -> None:
    check = HealthCheckConfig(interval=interval)
    async with scene.open() as manager:
        instance = await scene.spawn(health_check=check)
        await scene.tick(12)
        first = await scene.events(instance, AgentMetricsUpdatedEvent)
        assert len(first) == 1
        await scene.tick(60)
        assert await scene.events(instance, AgentMetricsUpdatedEvent) == first  # an idle one has nothing to tell
        await manager.process(instance.instance_id, {"tokens": 42})
        await scene.tick(11)
        second = await scene.events(instance, AgentMetricsUpdatedEvent)
        assert len(second) == 2
        metrics = second[1].metrics
        assert (metrics.completed_tasks, metrics.tokens_used, metrics.open_tasks) == (1, 42, 0)
        assert metrics.memory_bytes > 0
        assert metrics.memory_is_shared
        assert (await scene.record(instance)).metrics == metrics
        call = await scene.busy(instance)
        await scene.tick(11)
        assert (await scene.record(instance)).metrics.open_tasks == 1  # type: ignore[union-attr]  # it has been measured
        scene.stage.gate.open()
        await call


async def test_the_interval_of_samples_can_be_set(scene: Scene) -> None:
    scene.settings = LifecycleSettings(metrics_interval=SECOND, close_grace=timedelta(0))
    async with scene.open() as manager:
        instance = await scene.spawn(health_check=CUSTOM)
        for number in range(1, 6):
            await manager.process(instance.instance_id, {"tokens": 1})
            await scene.tick(2)
            assert len(await scene.events(instance, AgentMetricsUpdatedEvent)) >= number
