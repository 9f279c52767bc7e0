"""Turns: who is asked, and in which order their answers count."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from simulation_scenes import Diary, in_turn, playing

import ostler
from ostler.simulation import AgentView

pytestmark = pytest.mark.anyio


# --- who is asked -------------------------------------------------------------------------------


async def test_whoever_goes_on_by_itself_does_so_before_anybody_is_asked() -> None:
    diary = Diary()
    async with playing({"ada": diary.brain(), "bo": diary.brain(), "cy": diary.brain()}) as play:
        play.pause_agent("ada", 1)
        play.pause_agent("bo", 2)
        play.pause_agent("cy")
        first, second = await play.play_turn(), await play.play_turn()
    assert (first.turn, first.resumed, list(first.decisions)) == (1, ("ada",), ["ada"])
    assert (second.turn, second.resumed, list(second.decisions)) == (2, ("bo",), ["ada", "bo"])
    assert diary.asked == [(1, "ada"), *[(2, name) for name in ("ada", "bo")]]


async def test_one_that_is_paused_is_never_asked() -> None:
    diary = Diary()
    async with playing({"ada": diary.brain(), "bo": diary.brain()}) as play:
        await play.play_turn()
        play.pause_agent("bo")
        for _ in range(3):
            assert list((await play.play_turn()).decisions) == ["ada"]
        play.resume_agent("bo")
        await play.play_turn()
    assert [turn for turn, name in diary.asked if name == "bo"] == [1, 5]


async def test_one_that_is_paused_by_another_is_asked_no_more() -> None:
    diary = Diary()
    brains = {"ada": diary.brain(in_turn({1: lambda view: view.pause_agent("bo", 2)})), "bo": diary.brain()}
    async with playing(brains) as play:
        await play.run(4)
    assert [diary.names(turn) for turn in (1, 2, 3, 4)] == [{"ada", "bo"}, {"ada"}, {"ada", "bo"}, {"ada", "bo"}]


async def test_whoever_joins_is_asked_from_the_next_turn_on() -> None:
    diary = Diary()
    brains = {"ada": diary.brain(in_turn({1: lambda view: view.add_agent("kid", diary.brain())}))}
    async with playing(brains) as play:
        await play.run(2)
    assert diary.asked == [(1, "ada"), (2, "ada"), (2, "kid")]


# --- the order of decisions ---------------------------------------------------------------------


async def test_decisions_stand_in_the_order_of_coming_whoever_answers_first() -> None:
    """Each waits until the one after it has answered, so they answer in the reverse order."""
    names = [f"agent{number}" for number in range(6)]
    done = {name: threading.Event() for name in names}

    def after(name: str) -> threading.Event | None:
        place = names.index(name) + 1
        return done[names[place]] if place < len(names) else None

    order: list[str] = []

    def plain(view: AgentView) -> str:
        if (wait := after(view.name)) is not None:
            assert wait.wait(30)
        order.append(view.name)
        done[view.name].set()
        return view.name

    async def later(view: AgentView) -> str:
        if (wait := after(view.name)) is not None:
            assert await asyncio.to_thread(wait.wait, 30)
        order.append(view.name)
        done[view.name].set()
        return view.name

    async with playing({name: later if place % 2 else plain for place, name in enumerate(names)}) as play:
        report = await play.play_turn()
    assert order == names[::-1]
    assert list(report.decisions.items()) == [(name, name) for name in names]


class Said:
    def decide(self, view: AgentView) -> str:
        return f"{view.name} decides"


class SaidAsync:
    async def decide(self, view: AgentView) -> str:
        return f"{view.name} decides"


class CalledAsync:
    async def __call__(self, view: AgentView) -> str:
        return f"{view.name} decides"


class Promising:
    def decide(self, view: AgentView) -> Any:
        return SaidAsync().decide(view)


class PlainAgent(ostler.Agent):
    def process(self, request: Any) -> str:
        return f"{request['name']} decides"


class AsyncAgent(ostler.Agent):
    async def process(self, request: Any) -> str:
        return f"{request['name']} decides"


async def by_function(view: AgentView) -> str:
    return f"{view.name} decides"


async def test_a_brain_is_any_object_function_or_agent_plain_or_async() -> None:
    brains = [
        Said(),
        SaidAsync(),
        CalledAsync(),
        Promising(),
        PlainAgent(),
        AsyncAgent(),
        by_function,
        lambda view: f"{view.name} decides",
        Said().decide,
    ]
    async with playing({f"n{place}": brain for place, brain in enumerate(brains)}) as play:
        report = await play.play_turn()
    assert dict(report.decisions) == {f"n{place}": f"n{place} decides" for place in range(len(brains))}
    assert not report.failures


async def test_a_brain_sees_its_world_as_it_was_before_the_turn() -> None:
    seen: list[Any] = []

    def look(view: AgentView) -> Any:
        seen.append((view.number, view.turn, dict(view.state), view.names, view.parameters["tax"]))
        return {"wealth": view.state.get("wealth", 0) + view.state_of("bo").get("wealth", 0) + 1}

    async with playing({"ada": look, "bo": look}, parameters={"tax": 2}) as play:
        await play.run(2)
        assert dict(play.state.states) == {"ada": {"wealth": 3}, "bo": {"wealth": 3}}
    assert seen[0] == (1, 1, {}, ("ada", "bo"), 2)
    assert seen[3] == (2, 2, {"wealth": 1}, ("ada", "bo"), 2)


async def test_chance_belongs_to_agent_turn_and_seed() -> None:
    async def drawn(seed: int, *others: str) -> list[float]:
        async with playing({"ada": lambda view: view.random.random()}, seed=seed) as play:
            for name in others:
                play.add_agent(name, lambda view: view.random.random(), {})
            return [(await play.play_turn()).decisions["ada"] for _ in range(3)]

    once = await drawn(1)
    assert len(set(once)) == 3
    assert await drawn(1, "bo", "cy") == once
    assert await drawn(2) != once
