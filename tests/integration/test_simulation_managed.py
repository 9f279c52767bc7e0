"""Managed brains: instances of Ostler that decide for agents, at every level, over failures, resumes and kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from simulation_agents import Thinker
from simulation_scenes import SETTINGS, Doing, silent

import ostler
from ostler import AgentLifecycleManager, AgentState, GetInstancesFilter, IsolationLevel, LifecycleSettings
from ostler.errors import ConflictError, InvalidOperationError
from ostler.simulation import (
    AgentGroup,
    Managed,
    OnFailure,
    Scenario,
    SimulationOrchestrator,
    SimulationState,
    begin_run,
    compare_run,
    replay,
    resume_run,
)
from ostler.simulation.brains import ManagedKind
from ostler.store.store import Store

pytestmark = pytest.mark.anyio

LEVELS = [IsolationLevel.NONE, IsolationLevel.THREAD, IsolationLevel.PROCESS]
THREAD, PROCESS = LEVELS[1:]
SOON = timedelta(milliseconds=400)
KEEP = {"on_error": OnFailure.KEEP, "on_timeout": OnFailure.KEEP, "decision_timeout": SOON}


def nothing(_: SimulationState) -> None:
    """Decisions are only looked at."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
async def manager(home: Path) -> AsyncIterator[AgentLifecycleManager]:
    async with ostler.open(home) as manager:
        yield manager
        assert await active(manager) == []


async def active(manager: AgentLifecycleManager) -> list[str]:
    return sorted(str(one.name) for one in await manager.get_active_instances(GetInstancesFilter(tag="simulation")))


async def gone(pid: int) -> None:
    for _ in range(5000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"process {pid} is still there")


def population(manager: AgentLifecycleManager, **settings: Any) -> SimulationOrchestrator:
    state = SimulationState(global_state={"prices": [1]})
    chosen = SETTINGS.evolve(**{**KEEP, "decision_timeout": timedelta(seconds=20), **settings})
    return SimulationOrchestrator(state, engine=Doing(nothing), settings=chosen, manager=manager)


# --- in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_a_managed_brain_is_spawned_asked_and_ended(
    manager: AgentLifecycleManager, level: IsolationLevel
) -> None:
    async with population(manager) as run:
        run.add_agent("ada", Managed(Thinker, level, {"mood": "fine"}, {"tags": ("mine",)}), {})
        run.add_agent("bo", Managed(Thinker, level), {})
        run.add_agent("cy", lambda view: {"seen": view.turn}, {})
        first = (await run.play_turn()).decisions
        assert (first["ada"]["name"], first["ada"]["mood"], first["bo"]["mood"]) == ("ada", "fine", None)
        assert first["ada"]["known_as"] == [str(run.run_id), 1]
        assert (first["ada"]["pid"] != os.getpid()) is (level is PROCESS)
        assert first["cy"] == {"seen": 1}
        assert await active(manager) == ["ada", "bo"]
        run.remove_agent("ada")
        second = (await run.play_turn()).decisions
        assert (list(second), second["bo"]["asked"]) == (["bo", "cy"], 2)
        for _ in range(500):
            if await active(manager) == ["bo"]:
                break
            await asyncio.sleep(0.01)
        assert await active(manager) == ["bo"]
    assert await active(manager) == []
    if level is PROCESS:
        await gone(first["ada"]["pid"])
        await gone(first["bo"]["pid"])


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_one_that_raises_hangs_or_mumbles_fails_alone(
    manager: AgentLifecycleManager, level: IsolationLevel
) -> None:
    async with population(manager, decision_timeout=timedelta(seconds=1)) as run:
        for act in ("err", "hang", "mumble", "spoil", "decide"):
            run.add_agent(act, Managed(Thinker, level), {"do": {"1": act}})
        report = await run.play_turn()
        assert sorted(report.decisions) == ["decide", "spoil"]
        failures = report.failures
        assert (failures["err"].error_type, failures["err"].timed_out) == ("ValueError", False)
        assert "not my day" in failures["err"].message
        assert (failures["hang"].error_type, failures["hang"].timed_out) == ("TimeoutError", True)
        assert not failures["mumble"].timed_out
        assert run.state.global_state == {"prices": [1]}, "the state is not its to change"
        again = (await run.play_turn()).decisions
        assert {name: again[name]["asked"] for name in again} == {
            "err": 2,
            "hang": 1,  # it was replaced by a new one
            "mumble": 2,
            "spoil": 2,
            "decide": 2,
        }


async def test_a_managed_brain_may_ask_for_changes(manager: AgentLifecycleManager) -> None:
    async with population(manager) as run:
        run.add_agent("ada", Managed(Thinker, THREAD), {"do": {"1": "ask_for"}})
        run.add_agent("bo", silent, {})
        report = await run.play_turn()
        assert report.decisions["ada"] == 1
        assert (list(run.state.agents), run.state.auto_resume) == (["ada"], {"ada": 2})
        assert await active(manager) == ["ada"], "a paused agent keeps its instance"
        await run.run(2)
        assert await active(manager) == ["ada"]


async def test_a_process_that_blocks_does_not_hold_up_the_turn_and_is_replaced(
    manager: AgentLifecycleManager,
) -> None:
    async with population(manager, decision_timeout=SOON) as run:
        run.add_agent("ada", Managed(Thinker, PROCESS), {"do": {"2": "block"}})
        first = (await run.play_turn()).decisions["ada"]
        began = asyncio.get_running_loop().time()
        assert (await run.play_turn()).failures["ada"].timed_out
        third = (await run.play_turn()).decisions["ada"]
        assert asyncio.get_running_loop().time() - began < 5
        assert (third["pid"] != first["pid"], third["asked"]) == (True, 1)
    await gone(first["pid"])


async def test_one_that_dies_in_its_turn_or_between_turns_is_replaced(manager: AgentLifecycleManager) -> None:
    async with population(manager) as run:
        run.add_agent("ada", Managed(Thinker, PROCESS), {"do": {"2": "drop"}})
        run.add_agent("bo", Managed(Thinker, PROCESS), {})
        first = (await run.play_turn()).decisions
        assert (await run.play_turn()).failures["ada"].error_type == "AgentGoneError"
        third = (await run.play_turn()).decisions
        assert (third["ada"]["asked"], third["bo"]["asked"]) == (1, 3)
        os.kill(first["bo"]["pid"], signal.SIGKILL)
        while "bo" in await active(manager):  # noqa: ASYNC110 - its death is seen soon
            await asyncio.sleep(0.005)
        assert (await run.play_turn()).decisions["bo"]["asked"] == 1


async def test_one_that_does_not_start_is_told_and_tried_again(manager: AgentLifecycleManager, tmp_path: Path) -> None:
    rain = tmp_path / "rain"
    rain.touch()
    async with population(manager) as run:
        run.add_agent("ada", Managed(Thinker, THREAD, {"rain": str(rain)}), {})
        run.add_agent("lost", Managed("no.such.definition", THREAD), {})
        run.add_agent("bo", Managed(Thinker, THREAD), {})
        report = await run.play_turn()
        assert "it rains" in report.failures["ada"].message
        assert report.failures["lost"].error_type == "AgentNotFoundError"
        assert list(report.decisions) == ["bo"]
        rain.unlink()
        assert list((await run.play_turn()).decisions) == ["ada", "bo"]


async def test_another_brain_for_the_same_agent_takes_the_place_of_the_first(manager: AgentLifecycleManager) -> None:
    async with population(manager) as run:
        run.add_agent("ada", Managed(Thinker, THREAD, {"mood": "glad"}), {})
        await run.play_turn()
        run.state.agents["ada"] = Managed(Thinker, THREAD, {"mood": "grim"})
        assert (await run.play_turn()).decisions["ada"]["mood"] == "grim"


# --- kept runs ---------------------------------------------------------------------------------------


def thinkers(level: IsolationLevel = THREAD, turns: int = 6, **settings: Any) -> Scenario:
    return Scenario(
        name="thinkers",
        brains={"thinker": ManagedKind(Thinker, level)},
        agents=(
            AgentGroup(name="ada", kind="thinker", params={"mood": "fine"}, initial_state={"do": {"3": "hang"}}),
            AgentGroup(name="bo", kind="thinker"),
        ),
        engine=lambda: Doing(nothing),
        turns=turns,
        settings=SETTINGS.evolve(**{**KEEP, **settings}),
    )


async def test_managed_brains_without_a_manager_are_told_before_anything_is_written(home: Path) -> None:
    async with Store(home) as store:
        with pytest.raises(InvalidOperationError, match="there is no lifecycle manager"):
            async with begin_run(store, thinkers()):
                pytest.fail("began")


async def test_a_kept_run_with_managed_brains_is_played_resumed_and_checked(manager: AgentLifecycleManager) -> None:
    async with begin_run(manager.store, thinkers(), manager=manager) as run:
        await run.run(2)
    assert await active(manager) == []
    async with resume_run(manager.store, run.run_id, thinkers(), manager=manager) as again:
        await again.finish()
    turns = [one async for one in replay(manager.store, run.run_id)]
    assert [list(turn.failures) for turn in turns] == [[], [], [], ["ada"], [], [], []]
    assert [turn.decisions["bo"]["asked"] for turn in turns[1:]] == [1, 2, 1, 2, 3, 4]
    found = await compare_run(manager.store, run.run_id, thinkers(), manager=manager)
    assert found.differs_at == 1, "it tells its run, which is another one"
    assert await active(manager) == []


async def test_a_plain_run_is_played_beside_a_manager(manager: AgentLifecycleManager, home: Path) -> None:
    plain = Scenario(name="x", brains={"s": lambda: silent}, agents=(AgentGroup(name="s", kind="s"),))
    async with Store(home) as store:
        async with begin_run(store, plain) as run:
            await run.finish(3)
        async with resume_run(store, run.run_id, plain) as run:
            await run.finish()
        assert run.record.turn == 10
    assert manager.store.lease is not None


async def test_turns_of_managed_brains_count_only_for_the_owner(home: Path) -> None:
    async with ostler.open(home) as manager, begin_run(manager.store, thinkers(), manager=manager) as run:
        await run.run(1)
        async with Store(home) as other:
            await other.take_lease("a newer owner", ttl=timedelta(minutes=1), steal=True)
            with pytest.raises(ConflictError):
                await run.run(1)
            await other.release_lease()
        assert run.record.turn == 1


async def test_a_manager_that_is_closed_ends_the_turn_and_does_not_blame_the_agents(home: Path) -> None:
    async with ostler.open(home) as manager:
        run_context = begin_run(manager.store, thinkers(), manager=manager)
        run = await run_context.__aenter__()
        await run.run(1)
    with pytest.raises(ostler.OstlerError):
        await run.run(1)
    assert run.record.turn == 1
    await run_context.__aexit__(None, None, None)


async def test_a_run_that_goes_on_uses_idle_instances_and_replaces_the_others(home: Path) -> None:
    """As after a kill: the first program leaves its agents alive, one idle, one busy and one being ended."""
    scenario = thinkers(PROCESS, decision_timeout=timedelta(seconds=20))
    async with ostler.open(home, settings=LifecycleSettings(outlive=timedelta(minutes=1))) as manager:
        run_context = begin_run(manager.store, scenario, manager=manager)
        run = await run_context.__aenter__()
        first = (await run.play_turn()).decisions
        ids = {one.name: one.instance_id for one in await manager.get_active_instances()}
        busy = asyncio.create_task(manager.process(ids["ada"], {"state": {"do": {"9": "hang"}}, "turn": 9}))
        while (await manager.handle(ids["ada"]).record()).state is not AgentState.PROCESSING:  # noqa: ASYNC110 - soon
            await asyncio.sleep(0.005)
        manager.keep_agents = True
    busy.cancel()
    await asyncio.wait([busy])
    async with ostler.open(home) as manager:
        async with resume_run(manager.store, run.run_id, scenario, manager=manager) as again:
            second = (await again.play_turn()).decisions
            assert second["bo"]["pid"] == first["bo"]["pid"], "it was idle"
            assert second["bo"]["asked"] == 2
            assert second["ada"]["pid"] != first["ada"]["pid"], "it was busy"
            assert second["ada"]["asked"] == 1
        assert await active(manager) == []
    for one in first.values():
        await gone(one["pid"])
