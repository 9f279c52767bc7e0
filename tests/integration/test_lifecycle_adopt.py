"""Agents that outlive their manager: left alone, found again, taken up where they are, and never asked twice."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from lifecycle_aids import HOUR, WORKER, until
from lifecycle_haven import Managers

from ostler.agents import AgentRegistry, CommandSpec
from ostler.errors import AgentGoneError, AgentNotFoundError, InvalidOperationError
from ostler.isolation.base import Verb
from ostler.lifecycle import LifecycleSettings
from ostler.model import (
    AgentPriority,
    AgentSpawnOptions,
    AgentState,
    AttemptOutcome,
    IsolationLevel,
    ResourceLimits,
    RestartPolicy,
    SpawnRequest,
)
from ostler.store import Seams, open_store
from ostler.store.commands import MoveInstance, ReserveInstance
from ostler.testing import invariant_faults

pytestmark = pytest.mark.anyio

S, P = AgentState, IsolationLevel.PROCESS


@pytest.fixture
def scene(tmp_path: Any) -> Managers:
    return Managers(home=tmp_path)


# --- left alone and taken up -------------------------------------------------------------------------


async def test_what_lives_is_taken_up_as_it_is(scene: Managers) -> None:
    async with scene.open():
        idle, busy, held = [await scene.spawn(P) for _ in range(3)]
        await scene.ask(busy, "work")
        await scene.manager.suspend(held.instance_id)
        before = [await scene.record(one) for one in (idle, busy, held)]
    assert not any(soul.dead or soul.stops for soul in scene.haven.souls.values())
    async with scene.open() as manager:
        assert [await scene.record(one) for one in (idle, busy, held)] == before
        assert [one.state for one in before] == [S.READY, S.PROCESSING, S.SUSPENDED]
        assert await manager.process(idle.instance_id, "hello") == "hello"
        scene.soul(busy).finish.set()
        await scene.reaches(busy, S.WAITING)
        assert (await manager.resume(held.instance_id)).attempt == 1
        assert len(scene.haven.souls) == 3
        assert scene.haven.kept == set(scene.haven.souls)
        assert not list(await invariant_faults(manager.store, scene.clock.wall()))
        for one in (idle, busy, held):
            assert (await manager.terminate(one.instance_id)).success
    assert all(soul.dead for soul in scene.haven.souls.values())


async def test_adoption_is_logged(scene: Managers, caplog: pytest.LogCaptureFixture) -> None:
    async with scene.open():
        one = await scene.spawn(P)
    with caplog.at_level(logging.INFO, "ostler.lifecycle"):
        async with scene.open():
            pass
    assert f"Agent recovered. InstanceId: {one.instance_id}, Outcome: adopted" in caplog.text


async def test_without_the_setting_they_end_with_the_manager(scene: Managers) -> None:
    scene.settings = LifecycleSettings(close_grace=timedelta(0))
    async with scene.open():
        one = await scene.spawn(P)
    assert scene.soul(one).dead
    async with scene.open():
        assert await scene.state(one) is S.TERMINATED


async def test_what_lived_is_found_also_when_it_is_no_longer_to_live_on(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
    scene.settings, scene.haven.outlives = LifecycleSettings(close_grace=timedelta(0)), False
    async with scene.open() as manager:
        assert await manager.process(one.instance_id, "still here") == "still here"
    assert scene.soul(one).dead


async def test_a_start_that_is_under_way_when_the_manager_closes_is_left_too(scene: Managers) -> None:
    scene.settings = scene.settings.evolve(close_grace=timedelta(seconds=10))
    scene.haven.birth = asyncio.Event()
    async with scene.open():
        spawning = scene.begin(scene.spawn(P))
        one = await scene.only()
        asyncio.get_running_loop().call_later(0.05, scene.haven.birth.set)
    assert (await spawning).state is S.READY
    async with scene.open():
        assert await scene.state(one) is S.READY
    assert not scene.soul(one).stops


async def test_whoever_waits_for_an_answer_is_told_to_ask_the_next(scene: Managers) -> None:
    async with scene.open() as manager:
        limits = ResourceLimits(max_concurrent_tasks=1)
        one = await scene.spawn(P, resource_limits=limits)
        asked = await scene.ask(one, "work")
        queued = scene.begin(manager.process(one.instance_id, "later"))
        await asyncio.sleep(0)
    for task in (asked, queued):
        with pytest.raises(AgentGoneError, match="lives on"):
            await task
    assert scene.soul(one).requests == ["work"]
    assert not next(iter(scene.soul(one).calls.values()))[1].done()


async def test_who_loses_the_home_lets_go_and_does_not_stop(scene: Managers) -> None:
    async with scene.open() as manager:
        one, here = await scene.spawn(P), await scene.spawn(IsolationLevel.NONE)
        call = await scene.ask(one, "work")
        house = manager._house  # noqa: SLF001 - tests may look inside
        async with open_store(scene.home, Seams(clock=scene.clock)) as heir:
            await heir.take_lease("heir", ttl=HOUR, steal=True)
            scene.clock.advance(10)  # a third of the lease: the next renewal
            await until(lambda: house.shut is not None)
            with pytest.raises(AgentGoneError, match="lives on"):
                await call
            await until(lambda: house.lives[here.instance_id].cell is None)
            await heir.release_lease()
    assert not scene.soul(one).stops
    async with scene.open():
        assert await scene.state(one) is S.PROCESSING
        scene.soul(one).finish.set()
        await scene.reaches(one, S.WAITING, attempt=1)


async def test_many_deaths_at_once_come_back_one_by_one_the_important_first(scene: Managers) -> None:
    scene.settings = scene.settings.evolve(restarts_at_once=1, restarts_per_second=20)
    back = RestartPolicy.immediate()
    async with scene.open():
        many = [await scene.spawn(P, restart_policy=back) for _ in range(40)]
        first = [await scene.spawn(P, restart_policy=back, priority=AgentPriority.CRITICAL) for _ in range(5)]
        for one in (*many, *first):
            scene.soul(one).end(AttemptOutcome.SIGNAL)
        for round_ in range(1, 4):
            again = min(20 * round_, 45)
            await until(lambda count=again: len(scene.haven.souls) == 45 + count)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            await scene.calm()
            assert len(scene.haven.souls) == 45 + again
            scene.clock.advance(1)
        order = [name[0] for name in scene.haven.souls if name[1] == 2]
        # One of the others was through before the important ones had come.
        assert {one.instance_id for one in first} <= set(order[:7])
        for one in (*many, *first):
            await scene.reaches(one, S.READY, attempt=2)


# --- the record is corrected where it must be --------------------------------------------------------


async def test_what_died_while_nobody_looked_is_told_truly(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
        back = await scene.spawn(P, restart_policy=RestartPolicy.immediate())
        held = await scene.spawn(P)
        await scene.manager.suspend(held.instance_id)
    scene.soul(one).end(AttemptOutcome.OOM, "it used more memory than it may")
    scene.soul(back).end(AttemptOutcome.EXIT_CODE, "exit code 3")
    scene.soul(held).end(AttemptOutcome.SIGNAL, "killed by SIGSEGV")
    async with scene.open():
        for instance in (one, held):
            assert await scene.state(instance) is S.FAILED
        assert (await scene.record(one)).error_message == "it used more memory than it may"
        (only,) = await scene.attempts(one)
        assert (only.outcome, only.detail) == (AttemptOutcome.OOM, "it used more memory than it may")
        await scene.reaches(back, S.READY, attempt=2)
        assert [each.outcome for each in await scene.attempts(back)] == [AttemptOutcome.EXIT_CODE, None]
        assert not await scene.manager.get_waits(held.instance_id)


async def test_what_cannot_be_found_is_lost(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
        held = await scene.spawn(P)
        await scene.manager.suspend(held.instance_id)
    scene.haven.souls.clear()
    async with scene.open() as manager:
        assert (await scene.record(one)).error_message == "nobody has seen it"
        (only,) = await scene.attempts(held)
        assert only.outcome is AttemptOutcome.LOST
        assert (await manager.resume(held.instance_id)).attempt == 2


async def test_the_half_started_ends_and_the_half_ended_too(scene: Managers) -> None:
    async with scene.open() as manager:
        definition = manager.registry.find(WORKER).id
        leaving = await scene.spawn(P)
    async with scene.open() as manager:  # as a manager leaves it that dies in between
        request = SpawnRequest(agent_definition_id=definition, options=AgentSpawnOptions(isolation_level=P))
        coming = await manager.store.commit(ReserveInstance(request=request))
        scene.haven.soul(coming.instance_id)
        await manager.store.commit(MoveInstance(instance_id=leaving.instance_id, to=S.TERMINATING))
        manager._house.lives[leaving.instance_id].left = True  # noqa: SLF001 - tests may look inside
    async with scene.open() as manager:
        assert (await scene.state(coming), await scene.state(leaving)) == (S.FAILED, S.TERMINATED)
        for one in (coming, leaving):
            assert scene.soul(one).stops == 1
            (only,) = await scene.attempts(one)
            assert only.outcome is AttemptOutcome.STOPPED
            assert "its manager has ended while it was being" in str(only.detail)
        assert not list(await invariant_faults(manager.store, scene.clock.wall()))


async def test_one_that_was_being_shut_down_is_not_taken_for_whole(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P, restart_policy=RestartPolicy.immediate())
    scene.soul(one).calls[uuid4()] = (Verb.SHUTDOWN, asyncio.ensure_future(asyncio.sleep(0)))
    async with scene.open():
        await scene.reaches(one, S.READY, attempt=2)
    assert scene.soul(one).stops == 1


async def test_a_record_that_says_it_works_when_it_does_not_is_put_right(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
        await scene.ask(one, "work")
    scene.soul(one).calls.clear()  # the answer was heard, and its hearer died
    async with scene.open():
        assert await scene.state(one) is S.WAITING
        assert await scene.moves(one) == [S.READY, S.PROCESSING, S.WAITING]


async def test_what_nobody_knows_is_ended_before_anything_is_started(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
    nobody = scene.haven.soul(uuid4())
    async with scene.open():
        assert scene.haven.swept == [nobody.name]
    assert not scene.soul(one).dead


async def test_hundreds_are_taken_up_at_once(scene: Managers) -> None:
    async with scene.open():
        await asyncio.gather(*(scene.spawn(P) for _ in range(300)))
    began = asyncio.get_running_loop().time()
    async with scene.open() as manager:
        assert asyncio.get_running_loop().time() - began < 5
        assert len(manager._house.lives) == 300  # noqa: SLF001 - tests may look inside


# --- definitions that are not registered here --------------------------------------------------------


async def test_one_whose_class_is_not_registered_yet_lives_on_and_answers(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P, restart_policy=RestartPolicy.immediate())
        held = await scene.spawn(P)
        await scene.manager.suspend(held.instance_id)
    registry = AgentRegistry()
    async with scene.open(registry=registry) as manager:
        assert not scene.soul(one).dead
        assert await manager.process(one.instance_id, "hello") == "hello"
        assert (await manager.resume(held.instance_id)).state is S.READY
        with pytest.raises(AgentNotFoundError):
            await manager.restart(one.instance_id)
        assert not scene.soul(one).dead
        scene.soul(one).end(AttemptOutcome.SIGNAL, "killed by SIGKILL")
        await scene.reaches(one, S.FAILED)
        await scene.calm()
        assert await scene.state(one) is S.FAILED  # it waits for its definition
        scene.register(registry)
        await scene.reaches(one, S.READY, attempt=2)


async def test_a_command_is_asked_again_when_its_definition_is_known(scene: Managers) -> None:
    name = uuid4()
    registry = AgentRegistry()
    known = registry.register(CommandSpec(argv=("echo",)), name="tool")
    async with scene.open(registry=registry) as manager:
        request = SpawnRequest(agent_definition_id=known.id, options=AgentSpawnOptions(isolation_level=P))
        one = await manager.spawn(request)
        await scene.ask(one, "work", name)
    registry = AgentRegistry()
    async with scene.open(registry=registry) as manager:
        assert await scene.state(one) is S.PROCESSING
        with pytest.raises(InvalidOperationError, match="its definition tool is not registered here"):
            await manager.process(one.instance_id, "more")
        hand = scene.soul(one).hand
        assert hand is not None
        hand.let_go()  # the haven lets only one have a hand on it
        registry.register(CommandSpec(argv=("echo",)), name="tool")
        scene.soul(one).finish.set()
        assert await manager.process(one.instance_id, "work", request_id=name) == "work"
        await scene.reaches(one, S.WAITING)
        assert await manager.process(one.instance_id, "more") == "more"
