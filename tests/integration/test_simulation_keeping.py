"""What can be kept and what cannot: states, decisions and brains either come back as they were, or are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from math import inf, nan
from pathlib import Path
from typing import Any
from uuid import UUID

import pydantic
import pytest
from simulation_scenes import SETTINGS, Doing, Market, Script, Trader, economy, played, scripted

from ostler.errors import SimulationError, ValidationError
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Managed,
    OnFailure,
    Scenario,
    SimulationState,
    begin_run,
    replay,
    resume_run,
    state_at,
)
from ostler.store import Store

pytestmark = pytest.mark.anyio


# --- typed states -------------------------------------------------------------------------------


class Mood(Enum):
    GLAD = "glad"
    GRIM = 2


class Place(pydantic.BaseModel):
    at: tuple[int, int] = (1, 2)


class Rich(pydantic.BaseModel):
    """Types that JSON lacks."""

    model_config = pydantic.ConfigDict(strict=True)

    born: datetime = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    day: date = date(2026, 1, 2)
    age: timedelta = timedelta(days=3, microseconds=7)
    pair: tuple[int, str] = (1, "x")
    tags: set[str] = {"a", "b"}
    frozen: frozenset[int] = frozenset({3, 1})
    mood: Mood = Mood.GRIM
    place: Place = Place(at=(3, 4))
    places: dict[int, Place] = {7: Place()}
    price: Decimal = Decimal("1.10")
    raw: bytes = b"abc"
    key: UUID = UUID(int=5)
    ratio: float = 0.1
    other: int | None = None
    named: int = pydantic.Field(3, alias="camelName")


def age(state: SimulationState) -> None:
    for rich in state.states.values():
        rich.age += timedelta(days=1)
        rich.tags.add(f"turn {state.turn}")
        rich.mood = Mood.GLAD if state.turn % 2 else Mood.GRIM
        rich.pair = (state.turn, "y")


def one_agent(schema: type[pydantic.BaseModel], engine: Any) -> Scenario:
    return scripted({"ada": lambda _: None}, schema=schema, engine=engine, turns=4)


async def test_types_that_json_lacks_come_back_as_they_were(store: Store) -> None:
    scenario = one_agent(Rich, lambda: Doing(age))
    async with begin_run(store, scenario) as run:
        await run.run(2)
        before = run.state.states["ada"]
        assert (before.mood, before.pair) == (Mood.GRIM, (2, "y"))
    async with resume_run(store, run.run_id, scenario) as run:
        assert run.state.states["ada"] == before
        assert type(run.state.states["ada"].place) is Place
        await run.run(2)
        assert run.record.digest == (await played(store, scenario))[1]
    assert (await state_at(store, run.run_id, 2, schema=Rich)).states["ada"] == before


class Bag(pydantic.BaseModel):
    tags: set[str] = set()
    inner: dict[str, list[frozenset[tuple[str, int]]]] = {}


BAGS = """
from ostler.simulation.schema import StateForm
from test_simulation_keeping import Bag
names = [f"tag {number}" for number in range(20)]
bag = Bag(tags=set(names), inner={"x": [{(name, 1) for name in names}]})
print(StateForm(Bag).dump(bag))
"""


def test_sets_are_written_alike_in_every_process() -> None:
    """Their order depends on hashes, which no two processes share."""
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run([sys.executable, "-c", BAGS], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


async def test_a_decision_may_hold_a_set(store: Store) -> None:
    names = [f"tag {number}" for number in range(20)]
    run_id, _ = await played(store, scripted({"ada": lambda _: Bag(tags=set(names))}), 1)
    (turn,) = [one async for one in replay(store, run_id, first=1)]
    assert turn.decisions["ada"]["tags"] == sorted(names)


class Loose(pydantic.BaseModel):
    anything: Any = None
    number: float = 0.0
    hidden: int = pydantic.Field(0, exclude=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"anything": (1, 2)}, "the field anything would come back as something else"),
        ({"anything": datetime(2026, 1, 1, tzinfo=UTC)}, "the field anything would come back as something else"),
        ({"number": nan}, "number"),
        ({"number": inf}, "number"),
        ({"hidden": 5}, "the field hidden would come back as something else"),
        ({"anything": "\ud800"}, "it does not come back"),
    ],
)
async def test_a_typed_state_that_would_come_back_changed_is_refused(
    store: Store, change: dict[str, Any], said: str
) -> None:
    def spoil(state: SimulationState) -> None:
        for name, value in change.items():
            setattr(state.states["ada"], name, value)

    async with begin_run(store, one_agent(Loose, lambda: Doing(spoil))) as run:
        with pytest.raises(SimulationError, match=rf"states\.ada cannot be kept: .*{said}"):
            await run.play_turn()
        assert run.record.turn == 0
    async with begin_run(store, one_agent(Loose, lambda: Doing(spoil))) as run:
        outcome = run.add_kind("bo", "ada", {}, change)
        assert not outcome
        assert str(outcome.reason).startswith("initial_state cannot be kept")


async def test_an_agent_that_asks_for_a_state_that_cannot_be_kept_is_refused(store: Store) -> None:
    wish: Script = lambda view: view.add_agent("kid", kind="ada", initial_state={"number": nan})  # noqa: E731 - short
    scenario = scripted({"ada": wish}, schema=Loose)
    run_id, _ = await played(store, scenario, 1)
    (one,) = [turn async for turn in replay(store, run_id, first=1)]
    assert "initial_state cannot be kept" in one.operations[0]["reason"]


# --- plain states -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, nan, inf, {"x"}, datetime(2026, 1, 1, tzinfo=UTC), [(1,)]])
async def test_a_plain_state_that_would_come_back_changed_is_refused(store: Store, value: Any) -> None:
    def spoil(state: SimulationState) -> None:
        if state.turn == 2:
            state.states["bo"]["x"] = value

    scenario = scripted({"ada": lambda _: None, "bo": lambda _: None}, engine=lambda: Doing(spoil))
    async with begin_run(store, scenario) as run:
        with pytest.raises(SimulationError, match=r"states\.bo cannot be kept: .*or give a schema"):
            await run.run(3)
        assert run.record.turn == 1


async def test_a_global_state_that_cannot_be_kept_is_refused(store: Store) -> None:
    def spoil(state: SimulationState) -> None:
        state.global_state["x"] = (1, 2)

    async with begin_run(store, scripted({"ada": lambda _: None}, engine=lambda: Doing(spoil))) as run:
        with pytest.raises(SimulationError, match="global_state cannot be kept"):
            await run.run(1)


@pytest.mark.parametrize("value", [[], 0, "x", {}])
async def test_a_global_state_may_be_any_json_value(store: Store, value: Any) -> None:
    def put(state: SimulationState) -> None:
        state.global_state = value

    scenario = scripted({"ada": lambda _: None}, engine=lambda: Doing(put), global_state={"a": 1})
    run_id, _ = await played(store, scenario, 1)
    async with resume_run(store, run_id, scenario) as run:
        assert run.state.global_state == value


# --- decisions ----------------------------------------------------------------------------------


class Offer(pydantic.BaseModel):
    price: Decimal


@pytest.mark.parametrize("value", [nan, {"x"}, {(1, 2): 3}, object(), {"deep": [inf]}])
async def test_a_decision_that_cannot_be_kept_is_the_failure_of_that_agent(store: Store, value: Any) -> None:
    scenario = scripted(
        {"ada": lambda _: 1, "bad": lambda _: value, "cy": lambda _: {"n": 3}},
        settings=SETTINGS.evolve(on_error=OnFailure.KEEP),
    )
    async with begin_run(store, scenario) as run:
        report = await run.play_turn()
        assert dict(report.decisions) == {"ada": 1, "cy": {"n": 3}}
        assert report.failures["bad"].error_type == "UnkeptDecisionError"
        assert "cannot be kept as JSON" in report.failures["bad"].message
        assert run.state.states["cy"] == {"n": 3}


async def test_a_model_may_be_a_decision(store: Store) -> None:
    run_id, _ = await played(store, scripted({"ada": lambda _: Offer(price=Decimal("1.5"))}), 1)
    (turn,) = [one async for one in replay(store, run_id, first=1)]
    assert turn.decisions == {"ada": {"price": "1.5"}}


async def test_what_a_brain_or_an_engine_saves_must_be_json(store: Store) -> None:
    class Odd:
        def decide(self, _: AgentView) -> None:
            return None

        def save(self) -> Any:
            return {1, 2}

    class OddEngine(Market):
        def save(self) -> Any:
            return nan

    odd = Scenario(name="odd", brains=Brains({"odd": Odd}), agents=(AgentGroup(name="ada", kind="odd"),))
    for scenario, who in ((odd, "ada"), (scripted({"ada": lambda _: None}, engine=OddEngine), "the engine")):
        with pytest.raises(SimulationError, match=rf"save\(\) of {who} must return JSON values"):
            async with begin_run(store, scenario):
                pytest.fail("began")


# --- brains -------------------------------------------------------------------------------------


@dataclass
class Fielded:
    step: int
    tags: list[str]

    def decide(self, _: AgentView) -> Any:
        return {"step": self.step, "tags": self.tags}


class WithParams:
    def __init__(self, step: int = 1) -> None:
        self.params = {"step": step}

    def decide(self, _: AgentView) -> Any:
        return dict(self.params)


class Needy:
    def __init__(self, friend: str) -> None:
        self.friend = friend

    def decide(self, _: AgentView) -> None:
        return None


def guests() -> Scenario:
    brains = Brains({"fielded": Fielded, "params": WithParams, "needy": Needy, "host": lambda: lambda _: None})
    return Scenario(name="guests", brains=brains, agents=(AgentGroup(name="host", kind="host"),))


async def test_a_brain_that_came_as_an_object_is_made_again_by_its_class(store: Store) -> None:
    async with begin_run(store, guests()) as run:
        run.add_agent("f", Fielded(3, ["x"]), {})
        run.add_agent("p", WithParams(5), {})
        await run.run(1)
        before = dict(run.state.states)
    async with resume_run(store, run.run_id, guests()) as run:
        assert (run.state.agents["f"], run.state.agents["p"].params) == (Fielded(3, ["x"]), {"step": 5})
        await run.run(1)
        assert dict(run.state.states) == before


@pytest.mark.parametrize(
    ("brain", "said"),
    [
        (Trader(), "cannot be made again after a crash, and this run is kept; name its class in the scenario's brains"),
        (lambda _: None, "cannot be made again after a crash"),
        (Needy("bo"), "cannot be made again: .*friend.*give it `params`, or make it a dataclass"),
        (Fielded(1, {"x"}), "params"),  # type: ignore[arg-type]  # on purpose
        (Managed(definition=UUID(int=1)), "must come by a kind of the scenario's brains"),
        (5, "must be an object with a method `decide`"),
    ],
)
async def test_a_brain_that_could_not_be_made_again_does_not_join(store: Store, brain: Any, said: str) -> None:
    async with begin_run(store, guests()) as run:
        with pytest.raises(ValidationError, match=said):
            run.add_agent("guest", brain, {})
        assert not run.try_add_agent("guest", brain, {})
        assert "guest" not in run.state.agents
        report = await run.play_turn()
        assert [one.done for one in report.operations] == [False, False]


async def test_one_that_comes_past_the_run_is_told_before_it_is_too_late(store: Store) -> None:
    async with begin_run(store, guests()) as run:
        run.state.agents["ghost"] = Fielded(1, [])
        with pytest.raises(ValidationError, match=r"agents\.ghost came past the run"):
            await run.play_turn()


async def test_a_brain_is_made_once_for_each_agent(store: Store) -> None:
    made: list[int] = []

    class Counted(Trader):
        def __init__(self, step: int = 1) -> None:
            super().__init__(step)
            made.append(step)

    async with begin_run(store, economy(brains=Brains({"trader": Counted, "learner": Counted}))) as run:
        assert len(made) == 7
        run.add_kind("more", "trader", {}, {"wealth": 1})
        assert len(made) == 8


async def test_kinds_that_make_no_brain_are_told(store: Store) -> None:
    for maker, said in ((lambda: 5, "must be an object with a method"), (lambda: 1 / 0, "ZeroDivisionError")):
        scenario = Scenario(name="x", brains=Brains({"odd": maker}), agents=(AgentGroup(name="a", kind="odd"),))
        with pytest.raises(ValidationError, match=said):
            async with begin_run(store, scenario):
                pytest.fail("began")
    with pytest.raises(ValidationError, match="must be a class or a function"):
        Brains({"five": 5})  # type: ignore[dict-item]  # on purpose
