"""Turns in a row, played by the thread of the brains: nobody can tell them from turns played one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from ostler.errors import SimulationError
from ostler.simulation import PauseTracker, SimulationOrchestrator, SimulationSettings
from ostler.simulation.manager import LifecycleManager

pytestmark = pytest.mark.anyio


class Restless:
    """Now and then fails, pauses, leaves or brings up another."""

    def decide(self, view: Any) -> Any:
        drawn = view.random.random()
        if drawn < 0.01:
            raise RuntimeError("oops")
        if drawn < 0.02:
            view.pause_agent(auto_resume_turns=3)
        elif drawn < 0.03:
            view.add_agent("child", Restless(), {"gold": 0.0})
        elif drawn < 0.035:
            view.remove_agent()
        return drawn if drawn < 0.98 else {"a": drawn}


class Mine:
    def update(self, state: Any, decisions: Any, world: Any) -> None:
        for member, decision in decisions.pairs():
            member.state["gold"] += decision if isinstance(decision, float) else 0.0
        state.global_state["drawn"] = world.chance("mine").random()
        state.global_state["turns"] = [*state.global_state.get("turns", []), state.turn]


def population(seed: int, brain: Any = Restless, engine: Any = None) -> SimulationOrchestrator:
    settings = SimulationSettings(seed=seed, max_agents=200, failure_pause_turns=2)
    run = SimulationOrchestrator(engine=engine or Mine(), settings=settings)
    for _ in range(5):
        run.add_agent("one", brain(), {"gold": 0.0})
    return run


def seen(run: SimulationOrchestrator) -> Any:
    state = run.state
    numbers = {name: member.number for name, member in state.members.items()}
    return (
        dict(state.states),
        dict(state.auto_resume),
        list(state.paused_agents),
        numbers,
        state.global_state,
        state.turn,
    )


@pytest.mark.parametrize("seed", range(8))
async def test_turns_in_a_row_are_those_played_one_by_one(seed: int) -> None:
    async with population(seed) as fast, population(seed) as slow:
        report = await fast.run(150)
        failed = 0
        while slow.state.turn < report.turn:
            failed += len((await slow.play_turn()).failures)
        assert seen(fast) == seen(slow)
        assert (report.played, report.failed) == (report.turn, failed)
        assert fast.check_invariants()


class Calm:
    def decide(self, _view: Any) -> float:
        return 1.0


async def test_exactly_as_many_turns_are_played_as_were_asked_for() -> None:
    async with population(1, Calm) as run:
        for turns in (1, 2, 100, 3):
            before = run.state.turn
            report = await run.run(turns)
            assert (report.played, run.state.turn) == (turns, before + turns)
        assert run.state.global_state["turns"] == list(range(1, 107))
        assert {state["gold"] for state in run.state.states.values()} == {106.0}


async def test_whoever_wants_to_hear_of_every_turn_does() -> None:
    async with population(1, Calm) as run:
        heard: list[int] = []
        await run.run(50, on_turn=lambda report: heard.append(report.turn))
        assert heard == list(range(1, 51))


async def test_a_counter_that_runs_out_in_between_is_heard_in_its_turn() -> None:
    asked: list[tuple[str, int]] = []

    class Noting:
        def decide(self, view: Any) -> float:
            asked.append((view.name, view.turn))
            return 1.0

    async with population(1, Noting) as run:
        run.pause_agent("one", 7)
        await run.run(20)
        assert [turn for name, turn in asked if name == "one"] == list(range(7, 21))


async def test_an_engine_that_fails_in_between_is_told_with_its_turn() -> None:
    class Brittle(Mine):
        def update(self, state: Any, decisions: Any, world: Any) -> None:
            if state.turn == 40:
                raise ValueError("worn out")
            super().update(state, decisions, world)

    async with population(1, Calm, Brittle()) as run:
        with pytest.raises(SimulationError, match="the engine failed in turn 40: ValueError: worn out"):
            await run.run(100)
        assert run.state.global_state["turns"] == list(range(1, 40))


async def test_one_that_hangs_in_between_is_given_up_on_in_its_turn() -> None:
    release = threading.Event()

    class Hanging:
        def decide(self, view: Any) -> float:
            if view.turn == 30 and view.name == "one_2":
                release.wait()
            return 1.0

    settings = SimulationSettings(decision_timeout=timedelta(milliseconds=150))
    async with SimulationOrchestrator(engine=Mine(), settings=settings) as short:
        for _ in range(5):
            short.add_agent("one", Hanging(), {"gold": 0.0})
        try:
            report = await short.run(60)
        finally:
            release.set()
        assert (report.played, report.failed) == (60, 1)
        assert report.first_failures[0].startswith("one_2 in turn 30, paused: no answer within")
        assert short.state.states["one"]["gold"] == 60.0
        assert short.state.states["one_2"]["gold"] == 29.0


async def test_others_on_the_loop_are_not_starved() -> None:
    async with population(1, Calm) as run:
        playing = asyncio.create_task(run.run(10_000_000))
        try:
            waits = []
            for _ in range(20):
                begun = time.monotonic()
                await asyncio.sleep(0)
                waits.append(time.monotonic() - begun)
            assert sorted(waits)[10] < 0.1
        finally:
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing


async def test_a_tracker_of_ones_own_is_asked_in_every_turn() -> None:
    class Counting(PauseTracker):
        counted = 0

        def count_down(self, state: Any) -> list[str]:
            Counting.counted += 1
            return super().count_down(state)

    manager = LifecycleManager(pause_tracker=Counting())
    async with SimulationOrchestrator(engine=Mine(), lifecycle_manager=manager) as run:
        run.add_agent("one", Calm(), {"gold": 0.0})
        await run.run(25)
    assert Counting.counted == 25
