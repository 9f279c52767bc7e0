"""Kept runs at their edges: the same before and after a resume, and no slip of a user that says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import pydantic
import pytest
from simulation_scenes import doing, played, scripted, silent

from ostler.errors import InvalidOperationError
from ostler.model import RunState
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Decisions,
    KeptRun,
    Managed,
    MergeEngine,
    Scenario,
    SimulationState,
    World,
    begin_run,
    compare_run,
    fork_run,
    replay,
    resume_run,
)
from ostler.store import Store

pytestmark = pytest.mark.anyio


async def in_pieces(store: Store, scenario: Scenario, turns: int) -> KeptRun:
    """Broken off after every turn."""
    async with begin_run(store, scenario) as run:
        pass
    for _ in range(turns):
        async with resume_run(store, run.run_id, scenario) as run:
            await run.run(1)
    return run


async def same_in_pieces(store: Store, scenario: Scenario, turns: int = 4) -> SimulationState:
    async with begin_run(store, scenario) as run:
        await run.run(turns)
    other = await in_pieces(store, scenario, turns)
    assert dict(run.state.states) == dict(other.state.states)
    assert run.state.global_state == other.state.global_state
    assert run.record.digest == other.record.digest
    assert (await compare_run(store, run.run_id, scenario)).equal
    return run.state


# --- brains that live elsewhere need somebody who spawns them -----------------------------------


def elsewhere() -> Scenario:
    brains = Brains({"far": lambda: Managed(definition=UUID(int=1))})
    return Scenario(name="x", brains=brains, agents=(AgentGroup(name="ada", kind="far"),))


async def test_managed_brains_without_a_manager_are_told_before_anything_is_written(store: Store) -> None:
    with pytest.raises(InvalidOperationError, match=r"ada .*pass .*manager="):
        async with begin_run(store, elsewhere()):
            pytest.fail("began")
    assert not await store.list_runs()


async def test_a_kept_run_with_managed_brains_is_not_taken_up_without_a_manager(store: Store) -> None:
    near = Scenario(
        name="x", brains=Brains({"far": lambda: silent}), agents=(AgentGroup(name="ada", kind="far"),), turns=2
    )
    async with begin_run(store, near) as run:
        await run.finish()
    for take_up in (
        resume_run(store, run.run_id, elsewhere()),
        fork_run(store, run.run_id, elsewhere(), at=1),
    ):
        with pytest.raises(InvalidOperationError, match=r"pass .*manager="):
            async with take_up:
                pytest.fail("went on")
    with pytest.raises(InvalidOperationError, match=r"pass .*manager="):
        await compare_run(store, run.run_id, elsewhere())
    assert [one.state for one in await store.list_runs()] == [RunState.ENDED]


# --- states are after a turn what they would be after a resume ----------------------------------


def share(state: SimulationState) -> None:
    """Two agents and the world hold one list."""
    if state.turn == 1:
        for one in state.states.values():
            one["home"] = state.global_state["home"]
    state.global_state["home"].append(state.turn)


def share_quietly(state: SimulationState) -> None:
    """The same, but what is shared looks as before."""
    if state.turn == 2:
        state.states["ada"]["home"] = state.global_state["home"]
    if state.turn == 3:
        state.global_state["home"].append(3)
    if state.turn == 1:
        state.states["ada"]["home"] = list(state.global_state["home"])


def share_all(state: SimulationState) -> None:
    """Two agents have one state."""
    if state.turn == 1:
        state.member("ada").state = state.member("bo").state
    state.states["bo"]["turn"] = state.turn


def hold(state: SimulationState) -> None:
    """The state of one holds that of another."""
    if state.turn == 1:
        state.states["ada"]["other"] = state.states["bo"]
        state.global_state["other"] = state.states["bo"]
    state.states["bo"]["turn"] = state.turn


class Colour(StrEnum):
    RED = "red"


def enumerate_it(state: SimulationState) -> None:
    last = state.states["ada"].get("colour", "none")
    state.states["ada"]["was"] = type(last).__name__
    state.states["ada"]["colour"] = Colour.RED
    state.global_state["was"] = type(state.global_state.get("colour", "")).__name__
    state.global_state["colour"] = Colour.RED


@pytest.mark.parametrize("act", [share, share_quietly, share_all, hold, enumerate_it])
async def test_what_states_share_is_shared_for_one_turn_only(
    store: Store, act: Callable[[SimulationState], Any]
) -> None:
    await same_in_pieces(store, doing(act, global_state={"home": []}))


@pytest.mark.parametrize("kind", [lambda: defaultdict(int), Counter])
async def test_a_kind_of_dict_is_a_plain_dict_after_its_turn(store: Store, kind: Callable[[], Any]) -> None:
    def count(state: SimulationState) -> None:
        state.states["ada"].setdefault("seen", kind())
        state.global_state.setdefault("seen", kind())

    async with begin_run(store, doing(count)) as run:
        await run.run(1)
        assert type(run.state.states["ada"]["seen"]) is dict
        assert type(run.state.global_state["seen"]) is dict


class Bag(pydantic.BaseModel):
    goods: list[int] = []
    tags: set[str] = set()


async def test_typed_states_share_nothing_either(store: Store) -> None:
    def share_goods(state: SimulationState) -> None:
        state.states["ada"].goods = state.states["bo"].goods
        state.states["bo"].goods.append(state.turn)
        state.states["bo"].tags.add(str(state.turn))

    state = await same_in_pieces(store, doing(share_goods, schema=Bag))
    assert state.states["ada"].goods is not state.states["bo"].goods


async def test_brains_see_the_state_that_was_put_back(store: Store) -> None:
    """Their views are older than it."""
    seen: list[Any] = []

    def look(view: AgentView) -> Any:
        seen.append(dict(view.state))
        return {"turn": view.turn}

    await played(store, scripted({"ada": look}), 3)
    assert seen == [{}, {"turn": 1}, {"turn": 2}]


async def test_parameters_and_params_are_what_they_are_after_a_resume(store: Store) -> None:
    @dataclass
    class Friendly:
        friends: Any = None

        def decide(self, _: AgentView) -> str:
            return type(self.friends).__name__

    class Look(MergeEngine):
        def update(self, state: SimulationState, decisions: Decisions, world: World) -> Any:
            del decisions
            state.global_state["kind"] = type(world.parameters["list"]).__name__

    scenario = Scenario(
        name="x",
        brains=Brains({"f": Friendly}),
        agents=(AgentGroup(name="f", kind="f", params={"friends": ("x", "y")}),),
        parameters={"list": (1, 2)},
        engine=Look,
    )
    assert (await same_in_pieces(store, scenario)).global_state == {"kind": "list"}
    async with begin_run(store, scenario) as run:
        for refused in (run.try_add_agent("g", Friendly(("x",)), {}), run.add_kind("g", "f", {"friends": ("x",)}, {})):
            assert "params would come back as something else" in str(refused.reason)
        await run.run(1)
        forked = run.settings.evolve(parameters={"list": (3,)})
    async with fork_run(store, run.run_id, scenario, at=1, settings=forked) as fork:
        await fork.run(1)
        assert fork.state.global_state == {"kind": "list"}


class Fickle:
    """Forgets what it was made with."""

    def __init__(self) -> None:
        self.held: Any = 7
        self.restored: list[Any] = []

    def decide(self, _: AgentView) -> Any:
        self.held = None

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> None:
        del state, decisions, world
        self.held = None

    def save(self) -> Any:
        return self.held

    def restore(self, saved: Any) -> None:
        self.held = saved
        self.restored.append(saved)


async def test_nothing_is_something_to_give_back(store: Store) -> None:
    class Plain:
        def decide(self, _: AgentView) -> None:
            return None

        def restore(self, saved: Any) -> None:
            pytest.fail(f"nobody has saved {saved!r}")

    scenario = Scenario(
        name="x",
        brains=Brains({"f": Fickle, "p": Plain}),
        agents=(AgentGroup(name="f", kind="f"), AgentGroup(name="p", kind="p")),
        engine=Fickle,
    )
    run_id, _ = await played(store, scenario, 1)
    async with resume_run(store, run_id, scenario) as run:
        assert run.state.agents["f"].restored == [None]
        assert run.engine.restored == [None]  # type: ignore[attr-defined]  # it is Fickle


# --- the digest ---------------------------------------------------------------------------------


async def test_another_beginning_is_another_history(store: Store) -> None:
    digests = set()
    for changed in ({}, {"global_state": {"wealth": 1}}, {"agents": (AgentGroup(name="ada", kind="ada"),)}):
        async with begin_run(store, doing(silent, **changed)) as run:  # type: ignore[arg-type]  # it does nothing
            digests.add(run.record.digest)
            await run.run(1)
        digests.add(run.record.digest)
        (turn,) = [one async for one in replay(store, run.run_id, first=0, last=0)]
        assert turn.digest in digests
    assert len(digests) == 6
    assert "" not in digests
