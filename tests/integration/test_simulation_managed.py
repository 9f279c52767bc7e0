"""Brains that live as instances of a manager: housed, asked, replaced, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from lifecycle_ground import opened
from simulation_agents import Sleepyhead, Stubborn, Thinker
from simulation_ground import LEVELS, NONE, PROCESS, SOON, THREAD, Play, gone

import ostler
from ostler import (
    AgentLifecycleManager,
    AgentSpawnOptions,
    AgentState,
    IsolationLevel,
    RestartPolicy,
)
from ostler.simulation import Around, SimulationOrchestrator
from ostler.simulation.answers import Failed
from ostler.simulation.brains import Managed
from ostler.simulation.view import AgentView
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
async def manager(home: Path) -> AsyncIterator[AgentLifecycleManager]:
    async with ostler.open(home) as manager:
        yield manager


@pytest.fixture
async def play(manager: AgentLifecycleManager) -> AsyncIterator[Play]:
    play = Play(manager)
    yield play
    await play.stable.close()
    assert await manager.get_active_instances() == []


@pytest.fixture
def rain() -> Iterator[None]:
    Sleepyhead.raining.set()
    yield
    Sleepyhead.raining.clear()


# --- housed and asked -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_a_managed_brain_is_spawned_asked_and_ended(play: Play, level: IsolationLevel) -> None:
    ada = play.add("ada", level, context={"mood": "fine"}, options=AgentSpawnOptions(tags=("mine",)))
    bo = play.add("bo", level)
    assert await play.house() == {}
    record = await play.record(ada)
    assert (record.name, set(record.tags)) == ("ada", {"mine", "simulation"})
    first, second = await asyncio.gather(play.ask(ada), play.ask(bo))
    assert (first["name"], first["turn"], first["known_as"], first["mood"]) == ("ada", 1, ["ada", ada.number], "fine")
    assert (second["name"], second["run"]) == ("bo", str(play.run_id))
    assert (first["pid"] != os.getpid()) is (level is PROCESS)

    await play.stable.retire([ada.number, 4711])
    assert list(play.stable.instances()) == [bo.number]
    ended = await play.manager.get_instance(record.instance_id)
    assert ended is not None
    assert ended.state is AgentState.TERMINATED
    if level is PROCESS:
        await gone(first["pid"])
    assert (await play.ask(bo))["asked"] == 2


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_one_that_raises_or_hangs_fails_alone(play: Play, level: IsolationLevel) -> None:
    erring, hanging, fine = (play.add(name, level) for name in ("erring", "hanging", "fine"))
    await play.house()
    view = AgentView(hanging, play.world)
    hanging.state["do"] = "hang"
    failed, late, answer = await asyncio.gather(
        play.ask(erring, "err"), play.stable.ask(hanging, view, SOON), play.ask(fine)
    )
    assert failed == Failed(timed_out=False, error_type="ValueError", message="ValueError: not my day")
    assert isinstance(late, Failed)
    assert (late.timed_out, late.error_type) == (True, "TimeoutError")
    assert view.closed
    assert answer["name"] == "fine"
    assert [(await play.ask(one))["asked"] for one in (erring, hanging, fine)] == [2, 2, 2]


async def test_one_that_cannot_be_called_off_does_not_hold_up_the_turn(play: Play) -> None:
    stubborn = play.add("stubborn", THREAD, Stubborn)
    await play.house()
    Stubborn.released.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        assert (await play.ask(stubborn, "hang", SOON)).timed_out
        # It thinks of one turn at a time.
        assert (await play.ask(stubborn, limit=SOON)).timed_out
        assert loop.time() - began < 3
    finally:
        Stubborn.released.set()
    assert (await play.ask(stubborn))["asked"] == 2


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_a_decision_must_be_json_and_the_state_is_not_its_to_change(play: Play, level: IsolationLevel) -> None:
    ada = play.add("ada", level)
    await play.house()
    failed = await play.ask(ada, "mumble")
    assert isinstance(failed, Failed)
    assert not failed.timed_out
    assert "JSON" in failed.message
    assert await play.ask(ada, "spoil") == [1, 2]
    assert (ada.state, play.state.global_state) == ({"do": "spoil"}, {"prices": [1]})


async def test_a_caller_who_gives_up_calls_it_off(play: Play) -> None:
    ada = play.add("ada", THREAD)
    await play.house()
    asking = asyncio.create_task(play.ask(ada, "hang"))
    await play.comes_to(play.stable.instances()[ada.number], AgentState.PROCESSING)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert (await play.ask(ada))["name"] == "ada"


async def test_one_that_somebody_has_suspended_says_so(play: Play) -> None:
    ada = play.add("ada", THREAD)
    await play.house()
    instance_id = play.stable.instances()[ada.number]
    await play.manager.suspend(instance_id)
    failed = await play.ask(ada)
    assert "is suspended" in failed.message
    assert not failed.timed_out
    assert await play.house() == {}, "it is there, and somebody's to resume"
    await play.manager.resume(instance_id)
    assert (await play.ask(ada))["name"] == "ada"


async def test_plain_brains_need_no_manager(play: Play) -> None:
    def decide(_view: AgentView) -> str:
        return "here"

    plain = play.state.admit("plain", decide, {})
    assert await play.house() == {}
    assert play.stable.instances() == {}
    failed = await play.ask(plain)
    assert "no instance" in failed.message


# --- definitions and failed starts ------------------------------------------------------------------


async def test_a_definition_is_registered_once_or_used_as_it_is(play: Play) -> None:
    registry = play.manager.registry
    known = registry.register(Sleepyhead, name="sleepy", description="as its owner wants it")
    for name in ("ada", "bo"):
        play.add(name, NONE)
    cy = play.add("cy", NONE, Sleepyhead)
    dee = play.state.admit("dee", Managed(definition=known.id, isolation=NONE), {})
    assert await play.house() == {}
    assert [one.name for one in registry.list()] == ["simulation_agents.Thinker", "sleepy"]
    assert [(await play.record(one)).definition_id for one in (cy, dee)] == [known.id, known.id]


@pytest.mark.usefixtures("rain")
async def test_one_that_does_not_start_is_told_and_tried_again(play: Play) -> None:
    sleepy, fine = play.add("sleepy", THREAD, Sleepyhead), play.add("fine", THREAD)
    lost = play.state.admit("lost", Managed(definition=uuid4(), isolation=NONE), {})
    failures = await play.house()
    assert set(failures) == {sleepy.number, lost.number}
    assert "it rains" in failures[sleepy.number].message
    assert failures[lost.number].error_type == "AgentNotFoundError"
    assert await play.ask(sleepy) == failures[sleepy.number]
    assert (await play.ask(fine))["name"] == "fine"
    assert "it rains" in (await play.house())[sleepy.number].message
    Sleepyhead.raining.clear()
    assert set(await play.house()) == {lost.number}
    assert (await play.ask(sleepy))["name"] == "sleepy"


async def test_another_brain_for_the_same_agent_takes_the_place_of_the_first(play: Play) -> None:
    ada = play.add("ada", THREAD, context={"mood": "glad"})
    await play.house()
    before = await play.record(ada)
    play.state.agents["ada"] = Managed(definition=Thinker, isolation=THREAD, context={"mood": "grim"})
    assert await play.house() == {}
    assert (await play.ask(ada))["mood"] == "grim"
    ended = await play.manager.get_instance(before.instance_id)
    assert ended is not None
    assert ended.state is AgentState.TERMINATED


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "how"), [(THREAD, "fall"), (PROCESS, "drop")], ids=str)
async def test_one_that_dies_in_its_turn_is_replaced_for_the_next(play: Play, level: IsolationLevel, how: str) -> None:
    ada = play.add("ada", level)
    await play.house()
    ids = set()
    for _ in range(3):
        ids.add(play.stable.instances()[ada.number])
        failed = await play.ask(ada, how)
        assert isinstance(failed, Failed)
        assert failed.error_type == "AgentGoneError"
        assert await play.house() == {}
        assert (await play.ask(ada))["asked"] == 1
    assert len(ids) == 3


async def test_one_that_is_killed_between_turns_is_replaced(play: Play) -> None:
    ada, bo = play.add("ada", PROCESS), play.add("bo", PROCESS)
    await play.house()
    first, other = await play.ask(ada), await play.ask(bo)
    before = play.stable.instances()
    os.kill(first["pid"], signal.SIGKILL)
    await play.comes_to(before[ada.number], AgentState.FAILED)
    assert await play.house() == {}
    after = play.stable.instances()
    assert (after[ada.number] != before[ada.number], after[bo.number] == before[bo.number]) == (True, True)
    assert (await play.ask(ada))["pid"] != first["pid"]
    assert (await play.ask(bo))["pid"] == other["pid"]


async def test_one_that_somebody_has_terminated_is_replaced(play: Play) -> None:
    ada = play.add("ada", THREAD)
    await play.house()
    await play.manager.terminate(play.stable.instances()[ada.number])
    assert isinstance(await play.ask(ada), Failed)
    assert await play.house() == {}
    assert (await play.ask(ada))["asked"] == 1


async def test_one_on_its_way_back_is_waited_for(home: Path, clock: ManualClock) -> None:
    patient = AgentSpawnOptions(restart_policy=RestartPolicy(initial_delay=timedelta(seconds=10), use_jitter=False))
    async with opened(home, clock) as manager:
        play = Play(manager, clock=clock)
        ada = play.add("ada", THREAD, options=patient)
        await play.house()
        before = play.stable.instances()
        assert (await play.ask(ada, "fall")).error_type == "AgentGoneError"
        assert await play.house() == {}
        assert play.stable.instances() == before
        asking = asyncio.create_task(play.ask(ada, limit=timedelta(minutes=5)))
        while not asking.done():
            await asyncio.sleep(0.005)
            clock.advance(1)
        assert (await asking)["asked"] == 1
        assert (await play.record(ada)).attempt == 2
        await play.stable.close()


# --- in a population -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_a_population_in_memory_spawns_and_retires_them_itself(
    manager: AgentLifecycleManager, level: IsolationLevel
) -> None:
    thinker = Managed(definition=Thinker, isolation=level)
    async with SimulationOrchestrator(around=Around(manager=manager)) as run:
        run.add_agent("ada", thinker, {})
        run.add_agent("bo", thinker, {})
        run.add_agent("cy", lambda view: {"seen": view.turn}, {})
        report = await run.play_turn()
        assert [report.decisions[name].get("name") for name in ("ada", "bo")] == ["ada", "bo"]
        assert report.decisions["cy"] == {"seen": 1}
        assert {one.name for one in await manager.get_active_instances()} == {"ada", "bo"}
        run.remove_agent("ada")
        await run.play_turn()
        assert {one.name for one in await manager.get_active_instances()} == {"bo"}
    assert await manager.get_active_instances() == []
