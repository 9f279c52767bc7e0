"""What a user may get wrong, or say in two places, and how a run ends: told in words, before anything is lost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pydantic
import pytest
from simulation_scenes import SETTINGS, doing, economy, played, playing, scripted, silent

from ostler.errors import ValidationError
from ostler.model import RunState
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Decisions,
    MergeEngine,
    Scenario,
    SimulationState,
    World,
    begin_run,
    compare_run,
    fork_run,
    resume_run,
    state_at,
)
from ostler.store import Store
from ostler.store.commands import MoveRun

pytestmark = pytest.mark.anyio


# --- seed and parameters ------------------------------------------------------------------------


async def test_runs_of_one_scenario_share_no_parameters(store: Store) -> None:
    class Taking(MergeEngine):
        def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any:
            del decisions
            state.global_state["got"] = world.parameters["queue"].pop()

    scenario = scripted({"ada": silent}, engine=Taking, parameters={"queue": [1, 2, 3]})
    for _ in range(2):
        async with begin_run(store, scenario) as run:
            await run.run(1)
        assert run.state.global_state == {"got": 3}


async def test_seed_and_parameters_may_stand_in_the_settings(store: Store) -> None:
    settings = SETTINGS.evolve(seed=7, parameters={"tax": 1})
    for scenario in (
        doing(silent, settings=settings),  # type: ignore[arg-type]  # it does nothing
        doing(silent, settings=settings, seed=7, parameters={"tax": 1}),  # type: ignore[arg-type]  # the same
    ):
        async with begin_run(store, scenario) as run:
            assert (run.record.seed, run.settings.parameters) == (7, {"tax": 1})
    wrong = doing(silent, settings=settings, seed=8, parameters={"tax": 2})  # type: ignore[arg-type]  # the same
    with pytest.raises(ValidationError, match=r"seed must be .*settings.*parameters must be .*settings"):
        wrong.validate().require()


# --- the end of a run ---------------------------------------------------------------------------


async def test_a_run_goes_on_after_its_end(store: Store) -> None:
    async with begin_run(store, economy()) as run:
        await run.finish(3)
        assert run.record.state is RunState.ENDED
        assert (await run.finish(6)).played == 3
        assert (run.record.turn, run.record.state) == (6, RunState.ENDED)
        await run.run(1)
        assert (run.record.turn, run.record.state) == (7, RunState.OPEN)
        await run.finish()
    assert run.record.digest == (await played(store, economy()))[1]


async def test_the_last_turn_and_the_end_are_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill has no room between the two."""
    moves: list[MoveRun] = []
    commit = store.commit

    async def watched(command: Any, *more: Any, **options: Any) -> Any:
        if isinstance(command, MoveRun):
            moves.append(command)
        return await commit(command, *more, **options)

    monkeypatch.setattr(store, "commit", watched)
    async with begin_run(store, economy()) as run:
        await run.finish(3)
    assert (run.record.state, run.record.outcome) == (RunState.ENDED, "all turns were played")
    assert not moves


async def test_a_run_that_is_complete_and_open_is_ended_without_a_turn(store: Store) -> None:
    run_id, _ = await played(store, economy())
    async with resume_run(store, run_id, economy()) as run:
        assert (await run.finish()).played == 0
        assert run.record.state is RunState.ENDED


# --- slips --------------------------------------------------------------------------------------


class OddParams:
    def __init__(self) -> None:
        self.params = [1, 2, 3]

    def decide(self, _: AgentView) -> None:
        return None


@dataclass
class Locked:
    lock: Any = field(default_factory=threading.Lock)

    def decide(self, _: AgentView) -> None:
        return None


@pytest.mark.parametrize(("brain", "said"), [(OddParams, "must be a mapping"), (Locked, "must be a JSON value")])
async def test_a_brain_that_cannot_tell_how_it_is_made_does_not_join(store: Store, brain: Any, said: str) -> None:
    scenario = Scenario(
        name="x", brains=Brains({"b": brain, "h": lambda: silent}), agents=(AgentGroup(name="h", kind="h"),)
    )
    async with begin_run(store, scenario) as run:
        with pytest.raises(ValidationError, match=said):
            run.add_agent("b", brain(), {})
        await run.run(1)


@pytest.mark.parametrize("brain", [OddParams, Locked])
async def test_in_memory_nobody_asks_how_a_brain_is_made(brain: Any) -> None:
    async with playing({}) as population:
        population._joining.brains = Brains({"b": brain})  # noqa: SLF001 - the scenes give no brains
        assert population.add_agent("b", brain(), {}) == "b"


@pytest.mark.parametrize(
    ("slip", "fields"),
    [
        ({"engine": MergeEngine()}, ["engine"]),
        ({"engine": Locked}, ["engine"]),
        ({"brains": 5}, ["brains"]),
        ({"agents": AgentGroup(name="a", kind="ada")}, ["agents"]),
        ({"agents": [{"name": "a", "kind": "ada"}]}, ["agents.0"]),
        ({"agents": [AgentGroup(name=5, kind=[])]}, ["agents.0.name", "agents.0.kind"]),  # type: ignore[arg-type]  # wrong on purpose
        ({"settings": {}}, ["settings"]),
        ({"global_state": [1]}, ["global_state"]),
        ({"parameters": [1]}, ["parameters"]),
        ({"schema": dict}, ["schema"]),
        ({"name": 5, "source": 5}, ["name", "source"]),
        ({"source": {"a": object()}}, ["source.a"]),
        ({"agents": (AgentGroup(name="a", kind="ada", params=[1]),)}, ["agents.0.params"]),  # type: ignore[arg-type]  # wrong on purpose
        (
            {"agents": (AgentGroup(name="a", kind="ada", initial_state=5),)},  # type: ignore[arg-type]  # wrong on purpose
            ["agents.0.initial_state"],
        ),
    ],
)
async def test_a_slip_in_a_scenario_is_told_in_words(store: Store, slip: dict[str, Any], fields: list[str]) -> None:
    scenario = scripted({"ada": silent})
    given = {name: getattr(scenario, name) for name in ("name", "brains", "agents")} | slip
    with pytest.raises(ValidationError) as caught:
        async with begin_run(store, Scenario(**given)):
            pytest.fail("began")
    assert [fault.field for fault in caught.value.faults] == fields  # type: ignore[attr-defined]  # each is a Fault, which has its field
    assert not await store.list_runs()


async def test_lists_and_dicts_will_do(store: Store) -> None:
    scenario = Scenario(
        name="x",
        brains={"ada": lambda: silent},  # type: ignore[arg-type]  # any mapping will do
        agents=[AgentGroup(name="ada", kind="ada")],  # type: ignore[arg-type]  # so will a list
        turns=2,
    )
    async with begin_run(store, scenario) as run:
        assert (await run.finish()).turn == 2


async def test_params_that_do_not_fit_are_told_with_the_place_of_the_group(store: Store) -> None:
    scenario = Scenario(
        name="x",
        brains=Brains({"ada": lambda: silent}),
        agents=(AgentGroup(name="a", kind="ada"), AgentGroup(name="b", kind="ada", params={"z": 1})),
    )
    with pytest.raises(ValidationError, match=r"agents\.1\.brain ada cannot be made with these params"):
        async with begin_run(store, scenario):
            pytest.fail("began")


async def test_an_engine_maker_must_make_an_engine(store: Store) -> None:
    with pytest.raises(ValidationError, match="engine must make an object with a method `update`"):
        async with begin_run(store, scripted({"ada": silent}, engine=lambda: 5)):
            pytest.fail("began")


async def test_a_run_may_be_named_by_the_text_of_its_id(store: Store) -> None:
    run_id, _ = await played(store, economy(), 2)
    text: Any = str(run_id)
    async with resume_run(store, text, economy()) as run:
        assert run.run_id == run_id
    async with fork_run(store, text, economy(), at=1) as run:
        assert run.record.parent_id == run_id
    assert (await compare_run(store, text, economy())).equal
    assert (await state_at(store, text, 1)).turn == 1
    for wrong in ("the last one", 5):
        with pytest.raises(ValidationError, match="run_id must be the id of a run, a UUID"):
            await state_at(store, wrong, 1)  # type: ignore[arg-type]  # on purpose


async def test_a_ground_that_is_none_is_told(home: Path) -> None:
    for ground in (str(home), home, None):
        with pytest.raises(ValidationError, match="must be a store"):
            async with begin_run(ground, economy()):  # type: ignore[arg-type]  # on purpose
                pytest.fail("began")
        with pytest.raises(ValidationError, match="must be a store"):
            await compare_run(ground, UUID(int=1), economy())  # type: ignore[arg-type]  # on purpose


class Inner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: tuple[int, ...] = ()


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: tuple[int, ...] = ()
    inner: Inner = Inner()


async def test_a_strict_schema_takes_what_was_added_from_outside_again(store: Store) -> None:
    scenario = doing(silent, schema=Strict)  # type: ignore[arg-type]  # it does nothing
    async with begin_run(store, scenario) as run:
        run.add_kind("cy", "ada", {}, {"at": (1, 2), "inner": Inner(at=(3,))})
        await run.run(2)
    assert (await compare_run(store, run.run_id, scenario)).equal
