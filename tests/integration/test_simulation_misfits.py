"""What is too large for a run, does not fit it or raises in it: it costs as little as can be, and is told."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from simulation_scenes import SETTINGS, doing, played, playing, scripted, silent

from ostler.errors import SimulationError
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Decisions,
    MergeEngine,
    OnFailure,
    Scenario,
    SimulationState,
    World,
    begin_run,
    compare_run,
    replay,
    resume_run,
    state_at,
)
from ostler.store import Store

pytestmark = pytest.mark.anyio


# --- what is too large, or does not fit ---------------------------------------------------------


async def test_a_whole_turn_does_not_tell_everything_twice(store: Store) -> None:
    def fill(state: SimulationState) -> None:
        state.global_state = {"blob": str(state.turn) * 300_000}

    scenario = doing(fill, settings=SETTINGS.evolve(snapshot_every=2), turns=4)
    async with begin_run(store, scenario) as run:
        await run.finish()
    row = await store.get_turn(run.run_id, 4)
    assert row is not None
    assert row.whole
    assert len(row.body) < 400_000
    assert "changes" not in json.loads(row.body)
    assert (await state_at(store, run.run_id, 4)).global_state == run.state.global_state
    assert (await compare_run(store, run.run_id, scenario)).equal


class Aged(pydantic.BaseModel):
    age: int = pydantic.Field(default=1, ge=0)


async def test_the_merge_engine_tells_whose_decision_does_not_fit() -> None:
    scripts = {"ada": lambda _: {"age": 3}, "bo": lambda _: {"age": -5}}
    async with playing({}, schema=Aged) as population:
        for name, script in scripts.items():
            population.add_agent(name, script, {})
        state = population.state
        decisions = Decisions(list(state.members.values()), [{"age": 3}, {"age": -5}])
        told = MergeEngine().update(state, decisions, population.world)
    assert list(told) == ["bo"]
    assert "age does not fit" in told["bo"]
    assert [one.age for one in state.states.values()] == [3, 1]


async def test_a_state_that_grows_too_large_is_the_failure_of_its_agent() -> None:
    async with playing({"ada": silent}) as population:
        members = list(population.state.members.values())
        told = MergeEngine().update(population.state, Decisions(members, [{"log": "x" * 300_000}]), population.world)
    assert "must be at most 256 KiB" in told["ada"]
    assert population.state.states["ada"] == {}


class Broken:
    """Raises where it is told to."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        if where == "made":
            raise KeyError("no file")

    def decide(self, _: AgentView) -> None:
        return None

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> None:
        del state, decisions, world

    def save(self) -> Any:
        if self.where == "save":
            raise KeyError("boom")
        return {"a": 1}

    def restore(self, saved: Any) -> None:
        del saved
        if self.where == "restore":
            raise KeyError("lost")


async def test_errors_of_foreign_code_say_whose_they_are(store: Store) -> None:
    def scene(brain: str = "", engine: str = "") -> Scenario:
        group = AgentGroup(name="ada", kind="b", params={"where": brain})
        return Scenario(name="x", brains=Brains({"b": Broken}), agents=(group,), engine=lambda: Broken(engine))

    for scenario, said in (
        (scene(brain="save"), r"save\(\) of ada failed: KeyError: 'boom'"),
        (scene(engine="save"), r"save\(\) of the engine failed: KeyError: 'boom'"),
        (scene(engine="made"), "the engine cannot be made: KeyError: 'no file'"),
    ):
        with pytest.raises(SimulationError, match=said):
            async with begin_run(store, scenario):
                pytest.fail("began")
    for scenario, said in (
        (scene(brain="restore"), r"restore\(\) of the brain of ada failed: KeyError: 'lost'"),
        (scene(engine="restore"), r"restore\(\) of the engine failed: KeyError: 'lost'"),
    ):
        run_id, _ = await played(store, scenario, 1)
        with pytest.raises(SimulationError, match=said):
            async with resume_run(store, run_id, scenario):
                pytest.fail("went on")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x" * 1_100_000, "1 MiB"),
        ({1: "a"}, "keys must be text"),
        ({"x": [{None: 1}]}, "keys must be text"),
        ({True: (1, 2)}, "keys must be text"),
    ],
)
async def test_a_decision_that_would_come_back_changed_or_is_huge_is_a_failure(
    store: Store, value: Any, said: str
) -> None:
    scenario = scripted(
        {"ada": lambda _: value, "bo": lambda _: (1, {"a": 2})}, settings=SETTINGS.evolve(on_error=OnFailure.KEEP)
    )
    async with begin_run(store, scenario) as run:
        report = await run.play_turn()
        assert said in report.failures["ada"].message
        assert dict(report.decisions) == {"bo": (1, {"a": 2})}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [300, 100_000])
async def test_what_is_nested_so_deep_that_it_could_not_be_read_is_a_failure(store: Store, levels: int) -> None:
    scenario = scripted({"ada": lambda _: nested(levels), "bo": lambda _: (1,)})
    async with begin_run(store, scenario) as run:
        report = await run.play_turn()
    assert ("ada" in report.failures) == (levels > 300)
    async with resume_run(store, run.run_id, scenario) as run:
        await run.run(1)
    assert len([one async for one in replay(store, run.run_id)]) == 3


async def test_a_decision_is_kept_as_it_was_decided(store: Store) -> None:
    class Taking(MergeEngine):
        def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any:
            del state, world
            for member, decision in decisions.pairs():
                member.state["bid"] = decision.pop("bid")

    run_id, _ = await played(store, scripted({"ada": lambda _: {"bid": 5}}, engine=Taking), 1)
    (turn,) = [one async for one in replay(store, run_id, first=1)]
    assert turn.decisions == {"ada": {"bid": 5}}
    assert turn.states == {"ada": {"bid": 5}}


async def test_a_state_that_is_no_mapping_is_told_with_its_agent(store: Store) -> None:
    def spoil(state: SimulationState) -> None:
        state.member("bo").state = 5

    async with begin_run(store, doing(spoil)) as run:
        with pytest.raises(SimulationError, match=r"states\.bo cannot be kept: it must be a mapping"):
            await run.run(1)
