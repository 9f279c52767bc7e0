"""What brains, engines and callers may not do, and what becomes of the run when they try."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from simulation_scenes import economy

from ostler.errors import InvalidOperationError, SimulationError
from ostler.simulation import OnFailure, OnIdle, SimulationOrchestrator, SimulationSettings, begin_run, state_at
from ostler.testing.memory import memory_store

pytestmark = pytest.mark.anyio


class Engine:
    def __init__(self, act: Callable[[Any, Any, Any], Any]) -> None:
        self.update = act


def filled(brain: Any, *, engine: Any = None, count: int = 1, **settings: Any) -> SimulationOrchestrator:
    run = SimulationOrchestrator(engine=engine, settings=SimulationSettings(**settings))
    for _ in range(count):
        run.add_agent("one", brain, {"coins": 1})
    return run


def one(_view: Any) -> int:
    return 1


@pytest.mark.parametrize(
    "act",
    [
        lambda view: view.state.update(coins=2),
        lambda view: view.state.__setitem__("coins", 2),
        lambda view: view.global_state.__setitem__("all", 2),
        lambda view: view.state_of("one").__setitem__("coins", 2),
        lambda view: setattr(view, "state", {"coins": 2}),
    ],
)
async def test_a_brain_cannot_write_what_all_decide_upon(act: Callable[[Any], None]) -> None:
    async with filled(act) as run:
        report = await run.play_turn()
        assert report.failures["one"].error_type in {"TypeError", "AttributeError"}
        assert dict(run.state.states) == {"one": {"coins": 1}}
        assert run.state.global_state == {}


async def test_a_brain_that_still_thinks_is_not_asked_again_and_nobody_else_suffers() -> None:
    release, inside = threading.Event(), []

    def slow(_view: Any) -> int:
        inside.append(threading.current_thread())
        release.wait()
        return 1

    settings: dict[str, Any] = {
        "decision_timeout": timedelta(milliseconds=200),
        "concurrency": 2,
        "retries": 1,
        "on_timeout": OnFailure.KEEP,
        "on_error": OnFailure.REMOVE,
    }
    async with filled(one, count=2, **settings) as run:
        run.add_agent("slow", slow, {})
        try:
            for _ in range(4):
                report = await run.play_turn()
                assert list(report.decisions) == ["one", "one_1"]
                assert list(report.failures) == ["slow"]
            assert len(inside) == 1
            assert "still thinks" in report.failures["slow"].message
        finally:
            release.set()
        inside[0].join()
        report = await run.play_turn()
        assert list(report.decisions) == ["one", "one_1", "slow"]


async def test_one_that_was_not_asked_for_want_of_places_is_kept() -> None:
    release = threading.Event()

    def slow(_view: Any) -> int:
        release.wait()
        return 1

    settings: dict[str, Any] = {
        "decision_timeout": timedelta(milliseconds=200),
        "concurrency": 1,
        "on_error": OnFailure.REMOVE,
    }
    async with filled(slow, **settings) as run:
        run.add_agent("good", one, {})
        try:
            report = await run.play_turn()
        finally:
            release.set()
        assert report.failures["one"].became == "paused"
        assert (report.failures["good"].became, report.failures["good"].error_type) == ("kept", "TooManyHungError")
        assert list(run.get_active_agents()) == ["good"]


@pytest.mark.parametrize("brain", [one, lambda _view: {"a": 1}], ids=["in the lane", "beside it"])
async def test_an_engine_may_raise_anything(brain: Any) -> None:
    async with filled(brain, engine=Engine(lambda *_: next(iter(())))) as run:
        with pytest.raises(SimulationError, match=r"the engine failed in turn 1: .*StopIteration"):
            await run.play_turn()


async def test_an_engine_says_whose_decision_it_could_not_use() -> None:
    engine = Engine(lambda *_: {"one_1": "it is broke"})
    async with filled(one, engine=engine, count=3) as run:
        report = await run.play_turn()
        failure = report.failures["one_1"]
        assert (failure.error_type, failure.message, failure.became) == (
            "RefusedDecisionError",
            "it is broke",
            "paused",
        )
        assert list(run.get_active_agents()) == ["one", "one_2"]


def _turn_on(state: Any, *_: Any) -> None:
    state.turn = 99


def _rename(state: Any, *_: Any) -> None:
    state.members["one"].name = "another"


@pytest.mark.parametrize(("act", "said"), [(_turn_on, "the count of turns"), (_rename, "the name of an agent")])
async def test_an_engine_changes_neither_turns_nor_names(act: Any, said: str) -> None:
    async with filled(one, engine=Engine(act)) as run:
        with pytest.raises(SimulationError, match=said):
            await run.play_turn()


async def test_who_is_paused_stands_in_the_order_of_coming() -> None:
    async with filled(one, count=20) as run:
        names = list(run.state.agents)
        for place, name in enumerate(reversed(names)):
            run.pause_agent(name, place % 3 + 1)
        assert list(run.state.paused_agents) == names
        assert list(run.state.auto_resume) == names


async def test_chance_of_the_world_is_not_that_of_an_agent() -> None:
    drawn: list[float] = []

    def act(state: Any, decisions: Any, world: Any) -> None:
        number = state.members["one"].number
        drawn.extend((decisions["one"], world.chance(number).random(), world.chance("1/2").random()))
        drawn.append(world.chance(1, 2).random())

    async with filled(lambda view: view.random.random(), engine=Engine(act)) as run:
        await run.play_turn()
    assert len(set(drawn)) == 4


async def test_a_decision_with_a_field_of_that_name_is_a_decision() -> None:
    async with filled(lambda _view: {"requests": 3}) as run:
        report = await run.play_turn()
        assert dict(report.decisions) == {"one": {"requests": 3}}


async def test_a_wish_that_names_nobody_means_whoever_has_it() -> None:
    async with filled(lambda _view: {"requests": [{"operation": "pause_agent", "auto_resume_turns": 2}]}) as run:
        await run.play_turn()
        assert run.state.auto_resume == {"one": 2}


async def test_a_wish_for_somebody_without_a_brain_says_what_to_give() -> None:
    async with filled(lambda view: view.add_agent("child")) as run:
        report = await run.play_turn()
        assert report.operations[-1].reason == "it has no brain; give one, or a kind of the run's brains (none)"


async def test_closing_ends_a_run_that_waits() -> None:
    run = filled(one, on_idle=OnIdle.WAIT)
    run.pause_agent("one")
    waiting = asyncio.create_task(run.run(1))
    await asyncio.sleep(0)
    await run.close()
    with pytest.raises(InvalidOperationError, match="closed"):
        await waiting


async def test_whoever_holds_the_turns_back_cannot_play_one() -> None:
    async with filled(one) as run:
        async with run.between_turns():
            with pytest.raises(InvalidOperationError, match="leave that first"):
                await run.run(1)
        await run.run(1)


async def test_what_was_done_from_outside_is_kept_before_a_run_ends_for_want_of_agents() -> None:
    async with memory_store() as store:
        async with begin_run(store, economy()) as run:
            await run.run(2)
            for name in list(run.state.agents):
                run.remove_agent(name)
            report = await run.run(5)
            assert (report.turn, report.ended) == (3, "nobody is active")
        assert not (await state_at(store, run.run_id, 3)).agents
