"""Requests and waits of agents that outlive their manager: each is done once, and answered by whoever asks."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from lifecycle_aids import HOUR, until
from lifecycle_haven import Managers

from ostler.isolation.base import Verb
from ostler.lifecycle import AgentLifecycleManager
from ostler.lifecycle.leaving import let_go
from ostler.model import (
    AgentInstance,
    AgentState,
    IsolationLevel,
    ResourceLimits,
    SuspendDepth,
    WaitKind,
)

pytestmark = pytest.mark.anyio

S, P = AgentState, IsolationLevel.PROCESS


@pytest.fixture
def scene(tmp_path: Any) -> Managers:
    return Managers(home=tmp_path)


# --- requests ----------------------------------------------------------------------------------------


async def test_a_request_that_was_under_way_is_joined_by_its_name(scene: Managers) -> None:
    name = uuid4()
    async with scene.open():
        one = await scene.spawn(P)
        await scene.ask(one, "work", name)
    async with scene.open() as manager:
        askers = [scene.begin(manager.process(one.instance_id, "work", request_id=name)) for _ in range(3)]
        await scene.calm()
        scene.soul(one).finish.set()
        assert await asyncio.gather(*askers) == ["work"] * 3
        await scene.reaches(one, S.WAITING)
        assert await manager.process(one.instance_id, "else", request_id=name) == "work"
    assert scene.soul(one).requests == ["work"]


async def test_the_answer_to_a_request_that_ended_since_is_there(scene: Managers) -> None:
    good, bad = uuid4(), uuid4()
    async with scene.open() as manager:
        one = await scene.spawn(P)
        await scene.ask(one, "work", good)
    failing = asyncio.ensure_future(scene.soul(one).do(bad, Verb.PROCESS, "fail"))
    scene.soul(one).calls[bad] = (Verb.PROCESS, failing)
    scene.soul(one).finish.set()
    async with scene.open() as manager:
        assert await manager.process(one.instance_id, "work", request_id=good) == "work"
        for _ in range(2):
            with pytest.raises(Exception, match="as told"):
                await manager.process(one.instance_id, "fail", request_id=bad)
    assert scene.soul(one).requests == ["work", "fail"]


async def test_a_request_that_is_taken_up_has_a_limit_of_its_own(scene: Managers) -> None:
    limits = ResourceLimits(execution_timeout=timedelta(seconds=60))
    name = uuid4()
    async with scene.open():
        one = await scene.spawn(P, resource_limits=limits)
        await scene.ask(one, "work", name)
        scene.clock.advance(50)
    async with scene.open() as manager:
        joined = scene.begin(manager.process(one.instance_id, "work", request_id=name))
        await scene.tick(59)
        assert not joined.done()
        await scene.tick(2)
        with pytest.raises(Exception, match="longer than 60 s"):
            await joined
        await scene.reaches(one, S.WAITING)


async def test_in_a_life_without_a_crash_a_name_counts_as_well(scene: Managers) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P, resource_limits=ResourceLimits(max_concurrent_tasks=1))
        name, other = uuid4(), uuid4()
        first = await scene.ask(one, "work", name)
        second = scene.begin(manager.process(one.instance_id, "work", request_id=name))
        with pytest.raises(Exception, match="which is all it accepts"):
            await manager.process(one.instance_id, "echo", wait=False, request_id=other)
        scene.soul(one).finish.set()
        assert [await first, await second] == ["work", "work"]
        assert await manager.process(one.instance_id, "echo", request_id=other) == "echo"  # it never ran before
        for number in range(100):
            await manager.process(one.instance_id, number, request_id=UUID(int=number))
        assert scene.soul(one).requests[:2] == ["work", "echo"]
        await manager.process(one.instance_id, "again", request_id=name)  # forgotten by now
        assert scene.soul(one).requests[-1] == "again"
        with pytest.raises(Exception, match="request_id must be a UUID"):
            await manager.process(one.instance_id, "echo", request_id="no")  # type: ignore[arg-type]  # wrong on purpose


async def test_the_last_who_gives_up_calls_it_off(scene: Managers) -> None:
    async with scene.open() as manager:
        one = await scene.spawn(P)
        name = uuid4()
        first = await scene.ask(one, "work", name)
        second = scene.begin(manager.process(one.instance_id, "work", request_id=name))
        await scene.calm()
        first.cancel()
        await asyncio.wait([first])
        assert await scene.state(one) is S.PROCESSING
        second.cancel()
        await scene.reaches(one, S.WAITING)
        third = await scene.ask(one, "work", name)
        scene.soul(one).finish.set()
        assert await third == "work"


async def test_one_that_is_frozen_stays_frozen_and_goes_on_when_it_is_thawed(scene: Managers) -> None:
    limits, name = ResourceLimits(execution_timeout=timedelta(seconds=60)), uuid4()
    async with scene.open() as manager:
        one = await scene.spawn(P, resource_limits=limits)
        await scene.ask(one, "work", name)
        await manager.suspend(one.instance_id, SuspendDepth.FREEZE, resume_after=HOUR)
    async with scene.open() as manager:
        assert scene.soul(one).frozen
        assert await scene.state(one) is S.SUSPENDED
        joined = scene.begin(manager.process(one.instance_id, "work", request_id=name))
        await scene.tick(600, step=10)
        assert not joined.done()
        scene.clock.advance(3000)
        await scene.reaches(one, S.PROCESSING, attempt=1)
        assert not scene.soul(one).frozen
        await scene.tick(59)
        assert not joined.done()
        scene.soul(one).finish.set()
        assert await joined == "work"


async def test_one_whose_thaw_was_cut_off_is_thawed(scene: Managers) -> None:
    async with scene.open():
        one = await scene.spawn(P)
    scene.soul(one).frozen = True
    async with scene.open():
        assert not scene.soul(one).frozen


# --- waits -------------------------------------------------------------------------------------------


async def test_a_wait_goes_on_under_the_next_manager(scene: Managers) -> None:
    name = uuid4()
    async with scene.open() as manager:
        one = await scene.spawn(P)
        await scene.ask(one, "ask", name)
        await scene.reaches(one, S.WAITING)
        (wait,) = await manager.get_waits(one.instance_id)
        assert (wait.detail or {})["ask_id"] == str(next(iter(scene.soul(one).asks)))
        scene.clock.advance(600)
    async with scene.open() as manager:
        assert await manager.get_waits(one.instance_id) == [wait]
        assert await scene.state(one) is S.WAITING
        joined = scene.begin(manager.process(one.instance_id, "ask", request_id=name))
        await scene.tick(120, step=10)
        await manager.answer(wait.wait_id, "done", {"colour": "red"})
        assert await joined == ["done", {"colour": "red"}]
        assert not await manager.get_waits(one.instance_id)


async def test_a_wait_that_was_answered_in_the_last_moment_has_its_answer(scene: Managers) -> None:
    name = uuid4()
    async with scene.open() as manager:
        one = await scene.spawn(P)
        await scene.ask(one, "ask", name)
        await until(lambda: bool(manager._house.lives[one.instance_id].waits))  # noqa: SLF001 - tests may look inside
        await scene.reaches(one, S.WAITING)
        (wait,) = await manager.get_waits(one.instance_id)
        let_go(manager._house.lives[one.instance_id])  # noqa: SLF001 - it does not hear the answer any more
        await manager.answer(wait.wait_id, "done", {"colour": "blue"})
    async with scene.open() as manager:
        assert await manager.process(one.instance_id, "ask", request_id=name) == ["done", {"colour": "blue"}]


async def test_a_wait_ends_in_its_own_time_whoever_manages(scene: Managers) -> None:
    name = uuid4()
    async with scene.open():
        one = await scene.spawn(P)
        await scene.ask(one, "ask", name)
        await scene.reaches(one, S.WAITING)
        scene.clock.advance(3000)
    async with scene.open() as manager:
        joined = scene.begin(manager.process(one.instance_id, "ask", request_id=name))
        await scene.tick(590, step=10)
        assert not joined.done()
        await scene.tick(20, step=10)
        assert await joined == ["timeout", {}]


async def test_a_wait_that_is_not_asked_for_again_ends(scene: Managers) -> None:
    async with scene.open() as manager:
        one, other = await scene.spawn(P), await scene.spawn(P)
        for instance in (one, other):
            await scene.ask(instance, "ask")
            await scene.reaches(instance, S.WAITING)
    for instance in (one, other):
        scene.soul(instance).asks.clear()
        scene.soul(instance).calls.clear()
    async with scene.open() as manager:
        assert [wait.kind for wait in await manager.get_waits(one.instance_id)] == [WaitKind.AGENT]
        await manager.terminate(other.instance_id)
        await until(lambda: _none(manager, other))
        await scene.tick(61)
        await until(lambda: _none(manager, one))


async def _none(manager: AgentLifecycleManager, one: AgentInstance) -> bool:
    return not await manager.store.open_waits(instance_id=one.instance_id)
