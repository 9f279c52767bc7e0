"""Meddling from outside, what breaks a turn, and the engine where nothing else is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
from simulation_scenes import Doing, Script, in_turn, playing

from ostler.errors import InvalidOperationError, SimulationError, ValidationError
from ostler.model import Fault
from ostler.simulation import AgentView, Around, SimulationOrchestrator, SimulationSettings, SimulationState

pytestmark = pytest.mark.anyio


# --- from outside -------------------------------------------------------------------------------


async def test_nobody_meddles_with_a_turn_that_is_being_played() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def think(_: AgentView) -> None:
        begun.set()
        await go.wait()

    async with playing({"ada": think, "bo": lambda _: None}) as play:
        turn = asyncio.create_task(play.play_turn())
        await begun.wait()
        for meddle in (
            lambda: play.add_agent("cy", think, {}),
            lambda: play.try_add_agent("cy", think, {}),
            lambda: play.remove_agent("bo"),
            lambda: play.pause_agent("bo"),
            lambda: play.resume_agent("bo"),
        ):
            with pytest.raises(InvalidOperationError, match="between_turns"):
                meddle()
        waiting = asyncio.create_task(pause_between(play))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        await turn
        assert await waiting
        report = await play.play_turn()
        assert [(one.operation.value, one.agent_name, one.cause) for one in report.operations] == [
            ("pause_agent", "bo", "outside")
        ]


async def pause_between(play: SimulationOrchestrator) -> bool:
    async with play.between_turns():
        return play.pause_agent("bo")


async def test_what_is_refused_from_outside_is_told_with_its_reason() -> None:
    async with playing({"ada": lambda _: None}, max_agents=1) as play:
        outcome = play.try_add_agent("bo", lambda _: None, {})
        assert not outcome
        assert play.add_agent("bo", lambda _: None, {}) == "bo"
        assert not play.pause_agent("nobody")
        assert not play.resume_agent("ada")
        play.remove_agent("ada")
        with pytest.raises(ValidationError, match="agent must be"):
            play.add_agent("bo", 5, {})
        play.add_agent("ada", lambda _: None, {})
        report = await play.play_turn()
    refused = [(one.operation.value, one.agent_name, one.done) for one in report.operations if not one.done]
    adding = ("add_agent", "bo", False)
    assert refused == [adding, adding, ("pause_agent", "nobody", False), ("resume_agent", "ada", False), adding]
    assert all(bool(one.reason) is not one.done for one in report.operations)
    assert "1" in str(outcome.reason)


# --- what breaks a turn -------------------------------------------------------------------------


def fail(_: SimulationState) -> None:
    raise ZeroDivisionError("by zero")


def meddle(state: SimulationState) -> None:
    state.paused_agents.add("ada")


@pytest.mark.parametrize(
    ("act", "said"), [(fail, "ZeroDivisionError: by zero"), (meddle, "let somebody come, go or pause")]
)
async def test_an_engine_that_fails_or_meddles_breaks_the_run_and_says_so(
    act: Callable[[SimulationState], None], said: str
) -> None:
    async with playing({"ada": lambda _: None}, engine=Doing(act)) as play:
        with pytest.raises(SimulationError, match=said):
            await play.play_turn()
        for again in (play.play_turn(), play.run(1)):
            with pytest.raises(InvalidOperationError, match=r"turn 1 was not completed .* stands at turn 0; resume it"):
                await again
        with pytest.raises(InvalidOperationError, match="turn 1 was not completed"):
            play.pause_agent("ada")


async def test_a_turn_that_is_called_off_breaks_the_run_and_says_so() -> None:
    begun = asyncio.Event()

    async def slow(_: SimulationState) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with playing({"ada": lambda _: None}, engine=Doing(slow)) as play:
        turn = asyncio.create_task(play.play_turn())
        await begun.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        with pytest.raises(InvalidOperationError, match=r"turn 1 was not completed \(CancelledError\)"):
            await play.play_turn()


class SlowStable:
    """Takes its time to end an instance."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.retired: list[int] = []

    def instances(self) -> dict[int, None]:
        return {99: None}

    async def retire(self, numbers: list[int]) -> None:
        self.begun.set()
        await self.go.wait()
        self.retired += numbers

    async def close(self) -> None:
        return None


async def test_a_turn_that_is_called_off_when_it_is_complete_breaks_nothing() -> None:
    stable: Any = SlowStable()
    async with SimulationOrchestrator(around=Around(stable=stable)) as play:
        play.add_agent("ada", lambda view: {"turn": view.turn}, {})
        turn = asyncio.create_task(play.play_turn())
        await stable.begun.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert (play.state.turn, play.state.states["ada"]) == (1, {"turn": 1})
        stable.go.set()
        assert (await play.play_turn()).turn == 2
        assert stable.retired == [99], "what was left is done after the next turn"


async def test_an_engine_may_be_async() -> None:
    async def later(state: SimulationState) -> None:
        await asyncio.sleep(0)
        state.global_state["turn"] = state.turn

    async with playing({"ada": lambda _: None}, engine=Doing(later)) as play:
        await play.play_turn()
        assert play.state.global_state == {"turn": 1}


# --- the engine where nothing else is said ------------------------------------------------------


class Purse(pydantic.BaseModel):
    wealth: int = pydantic.Field(0, alias="w")
    tags: set[str] = set()
    secret: int = pydantic.Field(3, exclude=True)


async def test_decisions_are_merged_into_plain_states() -> None:
    given = {"list": [1]}
    scripts: dict[str, Script] = {"ada": lambda _: given, "bo": lambda _: 5}
    async with playing(scripts) as play:
        await play.play_turn()
        given["list"].append(2)
        assert dict(play.state.states) == {"ada": {"list": [1]}, "bo": {}}


async def test_decisions_are_merged_into_typed_states_and_checked() -> None:
    scripts: dict[str, Script] = {
        "ada": in_turn({1: lambda _: {"wealth": 4}, 2: lambda _: {"tags": {"x"}}, 3: lambda _: {"wealth": "much"}}),
        "bo": in_turn({3: lambda _: {"tags": 5}}),
    }
    async with playing(scripts, schema=Purse) as play:
        play.state.states["ada"].secret = 9
        await play.run(2)
        purse = play.state.states["ada"]
        assert (purse.wealth, purse.tags, purse.secret) == (4, {"x"}, 9)
        report = await play.play_turn()
        assert "state.wealth does not fit" in report.failures["ada"].message
        assert "state.tags does not fit" in report.failures["bo"].message
        assert play.state.states["ada"].wealth == 4


async def test_settings_are_checked_as_a_whole() -> None:
    with pytest.raises(ValidationError) as caught:
        SimulationOrchestrator(settings=SimulationSettings(retries=-1, concurrency=0))
    assert {fault.field for fault in caught.value.faults if isinstance(fault, Fault)} == {"retries", "concurrency"}
