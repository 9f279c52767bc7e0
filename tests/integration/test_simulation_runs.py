"""Runs that are kept: one seed gives one history, and one that was broken off goes on as if it had not been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pydantic
import pytest
from simulation_scenes import SETTINGS, Doing, Learner, Market, Trader, economy, gone_on, in_turn, played, scripted

from ostler.errors import (
    InvalidOperationError,
    SimulationError,
    SimulationNotFoundError,
    ValidationError,
    VersionConflictError,
)
from ostler.model import Fault, RunState
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Ground,
    OnFailure,
    Scenario,
    SimulationState,
    begin_run,
    replay,
    resume_run,
    run_settings,
    state_at,
)
from ostler.store import Store, open_store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


class Purse(pydantic.BaseModel):
    wealth: int = 0


# --- one seed, one history ----------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_history_and_another_another(store: Store) -> None:
    _, once = await played(store, economy())
    run_id, again = await played(store, economy())
    _, other = await played(store, economy(seed=8))
    assert once == again != other
    told = [one async for one in replay(store, run_id)]
    operations = {(one["operation"], one["cause"]) for turn in told for one in turn.operations}
    assert operations >= {
        ("add_agent", "agent"),
        ("pause_agent", "agent"),
        ("pause_agent", "policy"),
        ("remove_agent", "agent"),
    }
    assert any(turn.failures for turn in told), "the scenario is no hard one"
    assert any(turn.resumed for turn in told)


@pytest.mark.parametrize("schema", [None, Purse])
@pytest.mark.parametrize("every", [1, 4, 50])
async def test_a_run_goes_on_as_if_nothing_had_been(
    store: Store, every: int, schema: type[pydantic.BaseModel] | None
) -> None:
    scenario = economy(schema=schema, settings=economy().settings.evolve(snapshot_every=every))
    whole_id, whole = await played(store, scenario)
    expected = [one async for one in replay(store, whole_id)]
    for broken_off in (0, 1, 4, 7, 19):
        run_id, _ = await played(store, scenario, broken_off)
        report, digest = await gone_on(store, run_id, scenario, scenario.turns - broken_off)
        assert (report.turn, digest) == (20, whole)
        assert [one async for one in replay(store, run_id)] == expected


async def test_a_run_that_is_broken_off_after_every_turn_has_the_same_history(store: Store) -> None:
    _, whole = await played(store, economy())
    run_id, _ = await played(store, economy(), 0)
    for _ in range(20):
        _, digest = await gone_on(store, run_id, economy(), 1)
    assert digest == whole


async def test_a_run_goes_on_on_postgres(make_database: Callable[[], str]) -> None:
    async with open_store(make_database()) as store:
        _, whole = await played(store, economy())
        run_id, _ = await played(store, economy(), 8)
        _, digest = await gone_on(store, run_id, economy(), 12)
        assert digest == whole


async def test_pauses_and_their_terms_outlive_the_program(store: Store) -> None:
    scenario = scripted({name: lambda _: None for name in ("ada", "bo", "cy")}, turns=9)
    async with begin_run(store, scenario) as run:
        run.pause_agent("bo", 3)
        run.pause_agent("cy")
        await run.run(1)
    async with resume_run(store, run.run_id, scenario) as run:
        assert (set(run.state.paused_agents), dict(run.state.auto_resume)) == ({"bo", "cy"}, {"bo": 2})
        reports = [await run.play_turn() for _ in range(2)]
        assert [report.resumed for report in reports] == [(), ("bo",)]
        assert run.check_invariants()


async def test_a_name_that_is_free_again_belongs_to_another_agent(store: Store) -> None:
    scenario = scripted({"ada": in_turn({1: lambda view: view.remove_agent("bo")}), "bo": lambda _: None})
    run_id, _ = await played(store, scenario, 1)
    async with resume_run(store, run_id, scenario) as run:
        run.add_kind("bo", "bo", {}, {})
        assert run.state.member("bo").number == 3


async def test_a_turn_that_broke_is_not_in_the_record(store: Store) -> None:
    bad = {3}

    def act(state: SimulationState) -> None:
        state.global_state["turn"] = state.turn
        if state.turn in bad:
            raise ZeroDivisionError

    scenario = scripted({"ada": lambda _: None}, engine=lambda: Doing(act))
    async with begin_run(store, scenario) as run:
        with pytest.raises(SimulationError, match="turn 3"):
            await run.finish()
        assert (run.record.turn, run.record.state) == (2, RunState.OPEN)
        with pytest.raises(InvalidOperationError, match="stands at turn 2"):
            await run.finish()
    bad.clear()
    report, digest = await gone_on(store, run.run_id, scenario, 8)
    assert (report.turn, digest) == (10, (await played(store, scenario))[1])


# --- the ends of a run --------------------------------------------------------------------------


async def test_a_finished_run_is_ended_and_a_resume_opens_it_again(store: Store) -> None:
    scenario = economy()
    async with begin_run(store, scenario) as run:
        report = await run.finish(5)
        assert (report.turn, report.ended) == (5, "all turns were played")
        assert (run.record.state, run.record.outcome) == (RunState.ENDED, "all turns were played")
    async with resume_run(store, run.run_id, scenario) as run:
        assert (run.record.state, run.record.outcome) == (RunState.OPEN, None)
        assert (await run.finish()).turn == 20
    assert run.record.digest == (await played(store, scenario))[1]


async def test_a_run_may_be_finished_twice(store: Store) -> None:
    async with begin_run(store, economy()) as run:
        await run.finish(3)
        assert (await run.finish(3)).played == 0
        assert run.record.state is RunState.ENDED


async def test_a_run_without_anybody_ends_and_says_why(store: Store) -> None:
    scenario = scripted({"ada": in_turn({2: lambda view: view.remove_agent()})})
    async with begin_run(store, scenario) as run:
        report = await run.finish()
        assert (report.turn, report.ended) == (2, "nobody is active")
        assert (run.record.state, run.record.outcome) == (RunState.ENDED, "nobody is active")
        assert (await run.run(3)).ended == "nobody is active"


async def test_of_two_who_go_on_with_one_run_one_is_refused_and_nothing_is_lost(store: Store) -> None:
    run_id, _ = await played(store, economy(), 3)
    async with resume_run(store, run_id, economy()) as one, resume_run(store, run_id, economy()) as other:
        await one.run(2)
        with pytest.raises(VersionConflictError, match="somebody else may be running it"):
            await other.run(1)
        with pytest.raises(InvalidOperationError, match="was not completed"):
            await other.run(1)
        await one.finish()
        digest = one.record.digest
    assert digest == (await played(store, economy()))[1]
    assert [one.turn async for one in replay(store, run_id)] == list(range(21))


# --- what a resume must be given ----------------------------------------------------------------


async def test_a_run_that_is_not_there_is_told(store: Store) -> None:
    with pytest.raises(SimulationNotFoundError, match="there is no run"):
        async with resume_run(store, uuid4(), economy()):
            pytest.fail("resumed nothing")


async def test_kinds_that_are_missing_are_told_all_at_once(store: Store) -> None:
    run_id, _ = await played(store, economy(), 1)
    with pytest.raises(InvalidOperationError, match="of the kinds learner, trader, which"):
        async with resume_run(store, run_id, economy(brains=Brains({}), agents=())):
            pytest.fail("resumed without brains")


async def test_a_schema_that_does_not_fit_is_told_with_the_agent(store: Store) -> None:
    class Other(pydantic.BaseModel):
        height: int

    run_id, _ = await played(store, economy(), 1)
    with pytest.raises(InvalidOperationError, match=r"what is kept of trader does not fit the schema: state.height"):
        async with resume_run(store, run_id, economy(schema=Other)):
            pytest.fail("resumed with another schema")


async def test_whoever_saved_something_must_be_able_to_take_it_back(store: Store) -> None:
    class Forgetful(Learner):
        restore = None  # type: ignore[assignment]  # on purpose

    class Lost(Market):
        restore = None  # type: ignore[assignment]  # on purpose

    run_id, _ = await played(store, economy(), 2)
    for change, who in (
        ({"brains": Brains({"trader": Trader, "learner": Forgetful})}, "the brain of learner(_1)?"),
        ({"engine": Lost}, "the engine"),
    ):
        with pytest.raises(InvalidOperationError, match=f"{who} has saved something, but has no `restore`"):
            async with resume_run(store, run_id, economy(**change)):
                pytest.fail("resumed without memory")


async def test_a_run_goes_on_by_its_own_settings(store: Store) -> None:
    run_id, _ = await played(store, economy(parameters={"shock": 5}), 2)
    async with resume_run(store, run_id, economy(seed=99, settings=SETTINGS.evolve(retries=3))) as run:
        assert (run.settings.seed, run.settings.retries, run.settings.parameters) == (7, 0, {"shock": 5})
        assert run_settings(run.record) == run.settings


async def test_everything_that_is_wrong_with_a_scenario_is_told_at_once(store: Store) -> None:
    scenario = Scenario(
        name="",
        brains=Brains({"trader": Trader}),
        turns=0,
        seed=-1,
        agents=(AgentGroup(name="a", kind="wizard", count=0), AgentGroup(name="b", kind="trader")),
        settings=SETTINGS.evolve(retries=-1),
        global_state={"x": {1, 2}},
    )
    with pytest.raises(ValidationError) as caught:
        async with begin_run(store, scenario):
            pytest.fail("began")
    fields = {fault.field for fault in caught.value.faults if isinstance(fault, Fault)}
    assert {"name", "turns", "seed", "settings.retries", "agents.0.kind", "agents.0.count"} <= fields
    assert not await store.list_runs()


async def test_a_scenario_with_more_agents_than_may_be_is_told(store: Store) -> None:
    with pytest.raises(ValidationError, match=r"settings\.max_agents must be at least 7"):
        async with begin_run(store, economy(settings=SETTINGS.evolve(max_agents=6))):
            pytest.fail("began")


# --- time, and what is shared -------------------------------------------------------------------


async def test_times_come_from_the_clock_of_the_ground(store: Store) -> None:
    clock = ManualClock()
    async with begin_run(Ground(store=store, clock=clock), scripted({"ada": lambda _: None})) as run:
        await run.run(2)
    row = await store.get_turn(run.run_id, 2)
    assert row is not None
    assert row.occurred_at == clock.wall()


async def test_one_that_hangs_costs_its_turn_and_not_the_run(store: Store) -> None:
    async def hang(view: AgentView) -> Any:
        if view.turn == 2:
            await asyncio.Event().wait()
        return {"turn": view.turn}

    clock = ManualClock()
    scenario = scripted({"ada": hang, "bo": lambda _: None}, settings=SETTINGS.evolve(on_timeout=OnFailure.KEEP))
    async with begin_run(Ground(store=store, clock=clock), scenario) as run:
        running = asyncio.create_task(run.run(3))
        while not running.done():
            clock.advance(run.settings.decision_timeout.total_seconds() / 4)
            await asyncio.sleep(0.001)
        await running
    turns = [one async for one in replay(store, run.run_id)]
    assert [list(turn.failures) for turn in turns] == [[], [], ["ada"], []]
    assert turns[2].failures["ada"]["timed_out"]
    assert (await state_at(store, run.run_id, 3)).states["ada"] == {"turn": 3}


async def test_agents_of_one_group_share_nothing(store: Store) -> None:
    class Hoarder:
        def __init__(self, goods: list[int]) -> None:
            self.goods = goods

        def decide(self, view: AgentView) -> Any:
            self.goods.append(view.number)
            return {"goods": list(self.goods)}

    group = AgentGroup(name="h", kind="h", count=2, params={"goods": []})
    scenario = Scenario(name="hoard", brains=Brains({"h": Hoarder}), agents=(group,))
    run_id, _ = await played(store, scenario, 1)
    state = await state_at(store, run_id, 1)
    assert dict(state.states) == {"h": {"goods": [1]}, "h_1": {"goods": [2]}}
    assert group.params == {"goods": []}
