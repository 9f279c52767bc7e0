"""Kept runs: one seed gives one history, whole, resumed anywhere, forked, replayed, or played once more."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from math import inf, nan
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pydantic
import pytest
from simulation_scenes import (
    SETTINGS,
    Doing,
    Hang,
    Learner,
    Market,
    Trader,
    doing,
    economy,
    gone_on,
    in_turn,
    played,
    scripted,
    silent,
)

from ostler.errors import (
    InvalidOperationError,
    SimulationError,
    SimulationNotFoundError,
    ValidationError,
    VersionConflictError,
)
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Managed,
    OnFailure,
    PlayedTurn,
    RunState,
    Scenario,
    SimulationSettings,
    SimulationState,
    TurnReport,
    begin_run,
    compare_run,
    fork_run,
    replay,
    resume_run,
    state_at,
)
from ostler.store import simulations
from ostler.store.store import Store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store(tmp_path / "home") as store:
        yield store


class Purse(pydantic.BaseModel):
    wealth: int = 0


async def told(store: Store, run_id: UUID, **span: Any) -> list[PlayedTurn]:
    return [one async for one in replay(store, run_id, **span)]


async def same_in_pieces(store: Store, scenario: Scenario, turns: int = 4) -> SimulationState:
    """Played whole, and broken off after every turn: the same states and the same digest."""
    async with begin_run(store, scenario) as run:
        await run.run(turns)
    run_id, _ = await played(store, scenario, 0)
    for _ in range(turns):
        async with resume_run(store, run_id, scenario) as other:
            await other.run(1)
    assert dict(run.state.states) == dict(other.state.states)
    assert run.state.global_state == other.state.global_state
    assert run.record.digest == other.record.digest
    assert await compare_run(store, run_id, scenario)
    return run.state


# --- one seed, one history ---------------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_history_and_another_another(store: Store) -> None:
    _, once = await played(store, economy())
    run_id, again = await played(store, economy())
    _, other = await played(store, economy(settings=economy().settings.evolve(seed=8)))
    assert once == again != other
    turns = await told(store, run_id)
    operations = {(one["operation"], one["cause"]) for turn in turns for one in turn.operations}
    assert operations >= {
        ("add_agent", "agent"),
        ("pause_agent", "agent"),
        ("pause_agent", "policy"),
        ("remove_agent", "agent"),
    }
    assert any(turn.failures for turn in turns), "the scenario is no hard one"
    assert any(turn.resumed for turn in turns)


@pytest.mark.parametrize("schema", [None, Purse])
@pytest.mark.parametrize("every", [1, 4, 50])
async def test_a_run_that_was_broken_off_goes_on_with_the_same_future(
    store: Store, every: int, schema: type[pydantic.BaseModel] | None
) -> None:
    scenario = economy(schema=schema, settings=economy().settings.evolve(snapshot_every=every))
    whole_id, whole = await played(store, scenario)
    expected = await told(store, whole_id)
    for broken_off in (0, 1, 4, 7, 19):
        run_id, _ = await played(store, scenario, broken_off)
        report, digest = await gone_on(store, run_id, scenario, scenario.turns - broken_off)
        assert (report.turn, digest) == (20, whole)
        assert await told(store, run_id) == expected


async def test_a_run_that_is_broken_off_after_every_turn_has_the_same_history(store: Store) -> None:
    await same_in_pieces(store, economy(), 20)


async def test_a_run_goes_on_on_postgres(postgres_address: str) -> None:
    async with Store(postgres_address) as store:
        _, whole = await played(store, economy())
        run_id, _ = await played(store, economy(), 8)
        _, digest = await gone_on(store, run_id, economy(), 12)
        assert digest == whole
        assert await compare_run(store, run_id, economy())


async def test_pauses_and_their_counters_outlive_the_program(store: Store) -> None:
    scenario = scripted(dict.fromkeys(("ada", "bo", "cy"), silent), turns=9)
    async with begin_run(store, scenario) as run:
        run.pause_agent("bo", 3)
        run.pause_agent("cy")
        await run.run(1)
    async with resume_run(store, run.run_id, scenario) as run:
        assert (run.state.paused_agents, run.state.auto_resume) == ({"bo", "cy"}, {"bo": 2})
        assert [list((await run.play_turn()).resumed) for _ in range(2)] == [[], ["bo"]]
        assert run.lifecycle_manager.check_invariants(run.state)


async def test_a_paused_agent_is_not_written_in_every_turn(store: Store) -> None:
    async with begin_run(store, scripted({"ada": silent, "bo": silent})) as run:
        run.pause_agent("bo", 9)
        await run.run(3)
    rows = await store.read(simulations.list_turns, run.run_id, after=0, until=3, limit=9)
    assert ['"name":"bo"' in row.core for row in rows] == [True, False, False]


async def test_a_name_that_is_free_again_belongs_to_another_number(store: Store) -> None:
    scenario = scripted({"ada": in_turn({1: lambda view: view.remove_agent("bo")}), "bo": silent, "cy": silent})
    scripts = {"ada": in_turn({2: lambda view: view.add_agent("bo", kind="bo")}), "bo": silent, "cy": silent}
    run_id, _ = await played(store, scenario, 1)
    async with resume_run(store, run_id, scripted(scripts)) as run:
        await run.run(1)
        assert run.state.member("bo").number == 4


async def test_a_turn_that_broke_is_not_in_the_record(store: Store) -> None:
    bad = {3}

    def act(state: SimulationState) -> None:
        state.global_state["turn"] = state.turn
        if state.turn in bad:
            raise ZeroDivisionError

    scenario = scripted({"ada": silent}, engine=lambda: Doing(act))
    async with begin_run(store, scenario) as run:
        with pytest.raises(SimulationError, match="turn 3"):
            await run.finish()
        assert (run.record.turn, run.record.state) == (2, RunState.OPEN)
        with pytest.raises(InvalidOperationError, match="stands at turn 2"):
            await run.finish()
    bad.clear()
    report, digest = await gone_on(store, run.run_id, scenario, 8)
    assert (report.turn, digest) == (10, (await played(store, scenario))[1])


class Stuck(Learner):
    """Hangs in one turn, in a thread that cannot be ended; what it then learned must not count."""

    hang = Hang()

    def decide(self, view: AgentView) -> Any:
        self.seen = [*self.seen[-4:], view.random.randint(0, 9)]
        if view.turn == 3:
            self.hang.decide(view)
        return {"give": sum(self.seen) % 3, "to": view.names[0]}


@pytest.mark.parametrize("broken_off", [2, 3, 4])
async def test_a_brain_that_hung_before_has_the_same_future_whole_and_resumed(store: Store, broken_off: int) -> None:
    """Whole, the old call still runs in this program; resumed, it is as if in another one."""
    settings = economy().settings.evolve(decision_timeout=timedelta(milliseconds=300), on_timeout=OnFailure.KEEP)
    scenario = economy(brains=Brains({"trader": Trader, "learner": Stuck}), settings=settings, turns=7)
    whole_id, whole = await played(store, scenario)
    run_id, _ = await played(store, scenario, broken_off)
    _, digest = await gone_on(store, run_id, scenario, 7 - broken_off)
    turns = await told(store, whole_id)
    assert sorted(turns[3].failures) == ["learner", "learner_1"]
    assert digest == whole
    assert await compare_run(store, whole_id, scenario)


# --- the ends of a run -------------------------------------------------------------------------------


async def test_a_finished_run_is_ended_and_a_resume_opens_it_again(store: Store) -> None:
    async with begin_run(store, economy()) as run:
        report = await run.finish(5)
        assert (report.turn, report.ended) == (5, "all turns were played")
        assert (run.record.state, run.record.outcome) == (RunState.ENDED, "all turns were played")
        assert (await run.finish(5)).played == 0
    async with resume_run(store, run.run_id, economy()) as run:
        await run.play_turn()
        assert (run.record.state, run.record.outcome) == (RunState.OPEN, None)
        assert (await run.finish()).turn == 20
    assert run.record.digest == (await played(store, economy()))[1]


async def test_a_run_in_which_no_agent_is_active_ends_and_says_why(store: Store) -> None:
    async with begin_run(store, scripted({"ada": in_turn({2: lambda view: view.remove_agent()})})) as run:
        report = await run.finish()
        assert (report.turn, report.ended) == (2, "no agent is active")
        assert (run.record.state, run.record.outcome) == (RunState.ENDED, "no agent is active")
        assert (await run.run(3)).ended == "no agent is active"


async def test_of_two_that_resume_one_run_one_is_refused_and_nothing_is_lost(store: Store) -> None:
    run_id, _ = await played(store, economy(), 3)
    async with resume_run(store, run_id, economy()) as one, resume_run(store, run_id, economy()) as other:
        await one.run(2)
        with pytest.raises(VersionConflictError, match="another program plays it too"):
            await other.run(1)
        with pytest.raises(InvalidOperationError, match="was not completed"):
            await other.run(1)
        await one.finish()
        digest = one.record.digest
    assert digest == (await played(store, economy()))[1]
    assert [turn.turn for turn in await told(store, run_id)] == list(range(21))


# --- what a run must be given ------------------------------------------------------------------------


async def resume(store: Store, run_id: UUID, scenario: Scenario) -> None:
    async with resume_run(store, run_id, scenario):
        pytest.fail("resumed")


async def test_what_does_not_fit_a_run_is_told(store: Store) -> None:
    class Other(pydantic.BaseModel):
        height: int

    class Forgetful(Learner):
        restore = None  # type: ignore[assignment]  # on purpose

    class Lost(Market):
        restore = None  # type: ignore[assignment]  # on purpose

    with pytest.raises(SimulationNotFoundError, match="there is no run"):
        await resume(store, uuid4(), economy())
    with pytest.raises(ValidationError, match="run_id must be the id of a run"):
        await resume(store, "nonsense", economy())  # type: ignore[arg-type]  # on purpose
    run_id, _ = await played(store, economy(), 2)
    with pytest.raises(ValidationError, match=r"kind must be one of the brains of the run \(none\), was 'trader'"):
        await resume(store, run_id, economy(brains={}, agents=()))
    with pytest.raises(InvalidOperationError, match=r"what is kept of trader does not fit the schema \(state.height"):
        await resume(store, run_id, economy(schema=Other))
    with pytest.raises(SimulationError, match="the brain of learner has saved something, and has no `restore`"):
        await resume(store, run_id, economy(brains={"trader": Trader, "learner": Forgetful}))
    with pytest.raises(SimulationError, match="the engine has saved something, and has no `restore`"):
        await resume(store, run_id, economy(engine=Lost))


async def test_a_run_goes_on_by_its_own_settings(store: Store) -> None:
    settings = SETTINGS.evolve(parameters={"shock": 5}, seed=7)
    run_id, _ = await played(store, economy(settings=settings), 2)
    async with resume_run(store, run_id, economy(settings=SETTINGS.evolve(seed=99))) as run:
        assert run.settings == run.record.settings == settings


async def test_everything_that_is_wrong_with_a_scenario_is_told_at_once(store: Store) -> None:
    scenario = Scenario(
        name="",
        brains={"trader": Trader},
        turns=0,
        agents=(AgentGroup(name="a", kind="wizard", count=0), AgentGroup(name="b", kind="trader")),
        settings=SETTINGS.evolve(concurrency=-1),
        global_state={"x": {1, 2}},
        engine=5,  # type: ignore[arg-type]  # on purpose
    )
    with pytest.raises(ValidationError) as caught:
        async with begin_run(store, scenario):
            pytest.fail("began")
    fields = {one.field for one in caught.value.faults}  # type: ignore[attr-defined]  # a Fault
    wrong = {"name", "turns", "settings.concurrency", "agents.0.kind", "agents.0.count", "global_state.x", "engine"}
    assert fields == wrong
    with pytest.raises(ValidationError, match=r"settings\.max_agents must be at least 7"):
        async with begin_run(store, economy(settings=SETTINGS.evolve(max_agents=6))):
            pytest.fail("began")
    assert not await store.read(simulations.list_runs)


# --- what can be kept --------------------------------------------------------------------------------


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


async def test_types_that_json_lacks_come_back_as_they_were(store: Store) -> None:
    scenario = doing(age, schema=Rich)
    state = await same_in_pieces(store, scenario)
    run_id, _ = await played(store, scenario, 2)
    async with resume_run(store, run_id, scenario) as run:
        before = run.state.states["ada"]
        assert (before.mood, before.pair, type(before.place)) == (Mood.GRIM, (2, "y"), Place)
    assert (await state_at(store, run_id, 2, schema=Rich)).states["ada"] == before
    assert state.states["ada"] is not state.states["bo"]


_BAGS = """
from ostler.simulation.schema import StateForm
import pydantic
class Bag(pydantic.BaseModel):
    tags: set[str] = set()
    inner: dict[str, list[frozenset[tuple[str, int]]]] = {}
names = [f"tag {number}" for number in range(20)]
print(StateForm(Bag).write([Bag(tags=set(names), inner={"x": [{(name, 1) for name in names}]})])[0])
"""


def test_sets_of_a_schema_are_written_alike_in_every_program() -> None:
    """Their order depends on hashes, which no two programs share."""
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _BAGS], env=environment, capture_output=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


class Loose(pydantic.BaseModel):
    anything: Any = None
    number: float = 0.0
    hidden: int = pydantic.Field(0, exclude=True)


@pytest.mark.parametrize(
    "change",
    [
        {"anything": (1, 2)},
        {"anything": Mood.GLAD},
        {"number": nan},
        {"number": inf},
        {"hidden": 5},
        {"anything": "\ud800"},
    ],
)
async def test_a_typed_state_that_would_come_back_changed_is_refused(store: Store, change: dict[str, Any]) -> None:
    def spoil(state: SimulationState) -> None:
        for name, value in change.items():
            setattr(state.states["ada"], name, value)

    async with begin_run(store, doing(spoil, schema=Loose)) as run:
        with pytest.raises(SimulationError, match="it left a state of ada that cannot be kept"):
            await run.play_turn()
        assert run.record.turn == 0
    ask = in_turn({1: lambda view: view.add_agent("kid", kind="ada", initial_state=change)})
    run_id, _ = await played(store, scripted({"ada": ask}, schema=Loose), 1)
    (turn,) = await told(store, run_id, first=1)
    assert "initial_state cannot be kept" in turn.operations[0]["reason"]


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, nan, inf, {"x"}, datetime(2026, 1, 1, tzinfo=UTC), [(1,)]])
async def test_a_plain_state_that_would_come_back_changed_is_refused(store: Store, value: Any) -> None:
    def spoil(state: SimulationState) -> None:
        if state.turn == 2:
            state.states["bo"]["x"] = value

    async with begin_run(store, doing(spoil)) as run:
        with pytest.raises(SimulationError, match="the engine failed in turn 2: it left a state of bo that cannot be"):
            await run.run(3)
        assert run.record.turn == 1


async def test_a_global_state_is_any_json_value_and_nothing_else(store: Store) -> None:
    def put(value: Any) -> Scenario:
        return doing(lambda state: setattr(state, "global_state", value), global_state={"a": 1})

    values: list[Any] = [[], 0, "x", {}, None]
    for value in values:
        run_id, _ = await played(store, put(value), 1)
        async with resume_run(store, run_id, put(value)) as run:
            assert run.state.global_state == value
    async with begin_run(store, put({"x": (1, 2)})) as run:
        with pytest.raises(SimulationError, match="it left a global state that cannot be kept"):
            await run.run(1)


async def test_states_that_are_nested_as_deep_as_may_be_are_read_again(store: Store) -> None:
    def nest(state: SimulationState) -> None:
        deep: list[Any] = []
        for _ in range(170):
            deep = [deep]
        state.states["ada"]["deep"] = deep

    await same_in_pieces(store, doing(nest), 2)


class Offer(pydantic.BaseModel):
    price: Decimal
    tags: set[str] = set()


@pytest.mark.parametrize("value", [nan, {"x"}, {(1, 2): 3}, {1: 2}, (1, 2), object(), {"deep": [inf]}, "x" * 1_100_000])
async def test_a_decision_that_json_would_change_is_the_failure_of_its_agent(store: Store, value: Any) -> None:
    scenario = scripted(
        {"ada": lambda _: 1, "bad": lambda _: value, "cy": lambda _: {"n": 3}},
        settings=SETTINGS.evolve(on_error=OnFailure.KEEP),
    )
    async with begin_run(store, scenario) as run:
        report = await run.play_turn()
        assert dict(report.decisions) == {"ada": 1, "cy": {"n": 3}}
        assert "its decision cannot be kept" in report.failures["bad"].message
        assert run.state.states["cy"] == {"n": 3}
    (turn,) = await told(store, run.run_id, first=1)
    assert turn.decisions == {"ada": 1, "cy": {"n": 3}}


async def test_a_model_may_be_a_decision(store: Store) -> None:
    names = {f"tag {number}" for number in range(20)}
    run_id, _ = await played(
        store, scripted({"ada": lambda _: Offer(price=Decimal("1.5"), tags=names), "bo": silent}), 1
    )
    (turn,) = await told(store, run_id, first=1)
    assert turn.decisions == {"ada": {"price": "1.5", "tags": sorted(names)}, "bo": None}


async def test_many_large_decisions_are_kept(store: Store) -> None:
    run_id, _ = await played(store, scripted({name: lambda _: "x" * 600_000 for name in ("ada", "bo", "cy")}), 1)
    (turn,) = await told(store, run_id, first=1)
    assert [len(value) for value in turn.decisions.values()] == [600_000] * 3


class Word(StrEnum):
    YES = "yes"


@pytest.mark.parametrize(
    "share",
    [
        lambda state: [
            one.setdefault("goods", state.states["ada"].setdefault("goods", [])).append(state.turn)
            for one in state.states.values()
        ],
        lambda state: state.states.update(bo=Counter(a=1)),
        lambda state: state.members["ada"].__setattr__("state", defaultdict(int, n=1)),
        lambda state: state.states["ada"].update(order=OrderedDict(a=1), word=Word.YES),
        lambda state: state.global_state.update(ada=state.states["ada"]),
    ],
)
async def test_shared_lists_and_special_dicts_live_for_one_turn_only(
    store: Store, share: Callable[[SimulationState], Any]
) -> None:
    def act(state: SimulationState) -> None:
        for one in state.states.values():
            one["seen"] = [type(one).__name__, *(type(inner).__name__ for inner in one.values())]
        share(state)

    state = await same_in_pieces(store, doing(act))
    assert all(type(one) is dict for one in state.states.values())


async def test_what_save_and_restore_do_wrong_is_told(store: Store) -> None:
    class Odd:
        saved: Any = None

        def decide(self, _: AgentView) -> None:
            return None

        def save(self) -> Any:
            if isinstance(self.saved, Exception):
                raise self.saved
            return self.saved

        def restore(self, saved: Any) -> None:
            raise ValueError(f"what is {saved}?")

    class OddEngine(Market):
        def save(self) -> Any:
            return nan

    odd = Scenario(name="odd", brains={"odd": Odd}, agents=(AgentGroup(name="ada", kind="odd"),))
    Odd.saved = {1, 2}
    with pytest.raises(SimulationError, match=r"save\(\) of ada must return JSON values"):
        await played(store, odd, 0)
    Odd.saved = KeyError("x")
    with pytest.raises(SimulationError, match=r"save\(\) of ada failed: KeyError"):
        await played(store, odd, 0)
    with pytest.raises(SimulationError, match=r"save\(\) of the engine must return JSON values"):
        await played(store, scripted({"ada": silent}, engine=OddEngine), 0)
    Odd.saved = None  # nothing is something to give back
    run_id, _ = await played(store, odd, 1)
    with pytest.raises(SimulationError, match=r"restore\(\) of the brain of ada failed: ValueError: what is None"):
        await resume(store, run_id, odd)


@dataclass
class Fielded:
    step: int
    tags: list[str]

    def decide(self, _: AgentView) -> Any:
        return {"step": self.step, "tags": self.tags}


def guests() -> Scenario:
    return Scenario(
        name="guests",
        brains={"fielded": Fielded, "host": lambda: silent},
        agents=(AgentGroup(name="host", kind="host"),),
    )


async def test_a_brain_that_came_as_an_object_is_made_again_by_its_class(store: Store) -> None:
    async with begin_run(store, guests()) as run:
        run.add_agent("f", Fielded(3, ["x"]), {})
        await run.run(1)
        before = dict(run.state.states)
    async with resume_run(store, run.run_id, guests()) as run:
        assert run.state.agents["f"] == Fielded(3, ["x"])
        await run.run(1)
        assert dict(run.state.states) == before


@pytest.mark.parametrize(
    ("brain", "said"),
    [
        (Trader(), "cannot be made again after a crash, and this run is kept; name its class in the scenario's brains"),
        (silent, "cannot be made again after a crash"),
        (Fielded(1, {"x"}), "params"),  # type: ignore[arg-type]  # on purpose
        (Managed(UUID(int=1)), "cannot be made again after a crash"),
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
        run.state.agents["ghost"] = Fielded(1, [])  # past the run
        with pytest.raises(SimulationError, match="the agent ghost, whose brain cannot be made again"):
            await run.play_turn()


async def test_kinds_that_make_no_brain_are_told(store: Store) -> None:
    for maker, said in ((lambda: 5, "must be an object with a method"), (lambda: 1 / 0, "ZeroDivisionError")):
        scenario = Scenario(name="x", brains={"odd": maker}, agents=(AgentGroup(name="a", kind="odd"),))
        with pytest.raises(ValidationError, match=said):
            await played(store, scenario, 0)
    with pytest.raises(ValidationError, match="must be a class or a function"):
        Brains({"five": 5})  # type: ignore[dict-item]  # on purpose


async def test_agents_of_one_group_share_nothing_and_get_what_a_resume_gives_them(store: Store) -> None:
    class Hoarder:
        def __init__(self, goods: Any) -> None:
            self.goods = goods

        def decide(self, view: AgentView) -> Any:
            return {"goods": [*self.goods, view.number], "kind": type(self.goods).__name__}

    group = AgentGroup(name="h", kind="h", count=2, params={"goods": [0]})
    scenario = Scenario(name="hoard", brains={"h": Hoarder}, agents=(group,))
    state = await same_in_pieces(store, scenario, 2)
    assert dict(state.states) == {"h": {"goods": [0, 1], "kind": "list"}, "h_1": {"goods": [0, 2], "kind": "list"}}


async def test_another_beginning_is_another_history(store: Store) -> None:
    digests = set()
    for changed in ({}, {"global_state": {"wealth": 1}}, {"agents": (AgentGroup(name="ada", kind="ada"),)}):
        async with begin_run(store, doing(silent, **changed)) as run:  # type: ignore[arg-type]  # it does nothing
            digests.add(run.record.digest)
            await run.run(1)
        digests.add(run.record.digest)
        (turn,) = await told(store, run.run_id, last=0)
        assert turn.digest in digests
    assert len(digests) == 6


# --- looking back ------------------------------------------------------------------------------------


async def test_a_replay_tells_every_turn_as_it_was(store: Store) -> None:
    seen = []
    async with begin_run(store, economy()) as run:
        for _ in range(20):
            report = await run.play_turn()
            seen.append((report, {name: dict(one) for name, one in run.state.states.items()}, run.record.digest))
    turns = await told(store, run.run_id)
    assert [one.turn for one in turns] == list(range(21))
    for turn, (report, states, digest) in zip(turns[1:], seen, strict=True):
        assert (turn.decisions, list(turn.decisions)) == (dict(report.decisions), list(report.decisions))
        assert (turn.resumed, turn.states, turn.digest) == (tuple(report.resumed), states, digest)
        assert turn.operations == tuple(one.as_json() for one in report.operations)
        for name, failure in report.failures.items():
            assert failure.message.startswith("RuntimeError: no luck")
            words = {"timed_out": False, "error_type": "RuntimeError", "message": failure.message, "became": "paused"}
            assert turn.failures[name] == words
    for first, last in ((0, 0), (0, 20), (5, 7), (6, 6), (7, 19), (20, 20)):
        assert await told(store, run.run_id, first=first, last=last) == turns[first : last + 1]
    for span in ({"last": 21}, {"first": 21}, {"first": -1}, {"last": -1}):
        with pytest.raises(InvalidOperationError, match="stands at turn 20; ask for a turn from 0 to 20"):
            await told(store, run.run_id, **span)


async def test_the_state_at_a_turn_is_there_to_be_looked_at(store: Store) -> None:
    run_id, _ = await played(store, economy())
    for turn in await told(store, run_id):
        state = await state_at(store, run_id, turn.turn)
        assert (state.turn, dict(state.states), state.global_state) == (turn.turn, turn.states, turn.global_state)
        assert {name: state.auto_resume.get(name) for name in state.paused_agents} == turn.paused
        assert {name: state.member(name).number for name in state.agents} == turn.numbers


# --- forks -------------------------------------------------------------------------------------------


async def forked(
    store: Store, run_id: UUID, at: int, until: int = 20, settings: SimulationSettings | None = None
) -> tuple[UUID, str]:
    async with fork_run(store, run_id, economy(), at=at, settings=settings) as run:
        await run.finish(until)
        return run.run_id, run.record.digest


@pytest.mark.parametrize("at", [0, 1, 6, 13, 20])
async def test_a_fork_with_the_same_settings_has_the_same_future(store: Store, at: int) -> None:
    run_id, digest = await played(store, economy())
    fork_id, again = await forked(store, run_id, at)
    assert again == digest
    assert await told(store, fork_id) == await told(store, run_id)


async def test_a_fork_with_another_seed_or_other_parameters_has_another_future(store: Store) -> None:
    run_id, digest = await played(store, economy())
    before = await told(store, run_id)
    settings = (await store.read(simulations.require_run, run_id)).settings
    for change in ({"seed": 8}, {"parameters": {"shock": 9}}):
        fork_id, other = await forked(store, run_id, 9, settings=settings.evolve(**change))
        turns = await told(store, fork_id)
        assert other != digest
        assert turns[:10] == before[:10]
        assert turns[-1].global_state != before[-1].global_state
    assert await told(store, run_id) == before, "the run itself is as it was"


async def test_a_fork_may_go_further_and_is_resumed_as_any_run(store: Store) -> None:
    _, whole = await played(store, economy())
    run_id, _ = await played(store, economy(), 6)
    fork_id, _ = await forked(store, run_id, 4, 9)
    async with resume_run(store, fork_id, economy()) as run:
        await run.finish()
        assert run.record.digest == whole
    assert (run.record.parent_id, run.record.forked_at, run.record.turn) == (run_id, 4, 20)
    with pytest.raises(InvalidOperationError, match="stands at turn 6"):
        await forked(store, run_id, 7)


async def test_forks_of_forks_know_all_turns_they_came_by(store: Store) -> None:
    """Also one that branches off before the place at which its parent did."""
    root_id, _ = await played(store, economy())
    settings = economy().settings
    child_id, _ = await forked(store, root_id, 8, 14, settings.evolve(seed=1))
    late_id, _ = await forked(store, child_id, 11, 16, settings.evolve(seed=2))
    early_id, _ = await forked(store, child_id, 5, 16, settings.evolve(seed=3))
    root, child = await told(store, root_id), await told(store, child_id)
    late, early = await told(store, late_id), await told(store, early_id)
    assert [one.turn for one in late] == [one.turn for one in early] == list(range(17))
    assert child[:9] == root[:9]
    assert child[9:] != root[9:15]
    assert late[:12] == child[:12]
    assert early[:6] == root[:6]
    assert early[6] != root[6]
    for run_id, turns in ((late_id, late), (early_id, early)):
        assert await told(store, run_id, first=3, last=13) == turns[3:14]
        assert await told(store, run_id, first=9) == turns[9:]
        for turn in turns:
            assert dict((await state_at(store, run_id, turn.turn)).states) == turn.states


async def test_a_fork_must_have_room_for_the_agents_that_are_there(store: Store) -> None:
    run_id, _ = await played(store, economy(), 3)
    settings = economy().settings
    with pytest.raises(ValidationError, match="max_agents must be at least 7, the agents at turn 0"):
        await forked(store, run_id, 0, settings=settings.evolve(max_agents=2))
    with pytest.raises(ValidationError, match="concurrency"):
        await forked(store, run_id, 0, settings=settings.evolve(concurrency=-1))
    assert len(await store.read(simulations.list_runs)) == 1


# --- once more ---------------------------------------------------------------------------------------


async def test_a_run_played_once_more_is_the_same(store: Store) -> None:
    run_id, _ = await played(store, economy())
    found = await compare_run(store, run_id, economy())
    assert (bool(found), found.turns, found.differs_at) == (True, 20, None)
    assert (await compare_run(store, run_id, economy(), last=7)).turns == 7
    fork_id, _ = await forked(store, run_id, 12)
    assert (await compare_run(store, fork_id, economy())).turns == 8
    with pytest.raises(InvalidOperationError, match="has turns 13 to 20 of its own"):
        await compare_run(store, fork_id, economy(), last=5)
    assert len(await store.read(simulations.list_runs)) == 2, "comparing keeps nothing"


async def test_the_turn_at_which_other_code_decides_otherwise_is_told(store: Store) -> None:
    class Changed(Trader):
        def decide(self, view: AgentView) -> Any:
            decided = super().decide(view)
            return {**decided, "give": 0} if view.turn >= 7 else decided

    class Other(Market):
        def save(self) -> Any:
            return self.moved + (1 if self.moved > 4 else 0)

    run_id, _ = await played(store, economy())
    found = await compare_run(store, run_id, economy(brains={"trader": Changed, "learner": Learner}))
    assert (bool(found), found.differs_at, found.turns) == (False, 7, 6)
    assert not await compare_run(store, run_id, economy(engine=Other))


async def test_what_was_done_from_outside_is_in_the_record_and_done_again(store: Store) -> None:
    def scenario() -> Scenario:
        return economy(settings=SETTINGS.evolve(max_agents=9, failure_pause_turns=1))

    async with begin_run(store, scenario()) as run:
        run.pause_agent("trader", 2)
        await run.run(2)
        run.add_agent("guest", Trader(step=4), {"wealth": 50})
        run.remove_agent("learner")
        assert not run.remove_agent("nobody")
        for _ in range(9):
            run.try_add_agent("crowd", Trader(), {"wealth": 1})
        await run.run(3)
        run.resume_agent(next(iter(run.state.paused_agents), "nobody"))
        await run.run(4)
        run.pause_agent("guest")
    turns = await told(store, run.run_id)
    outside = [(turn.turn, one["operation"]) for turn in turns for one in turn.operations if one["cause"] == "outside"]
    assert outside[:4] == [(1, "pause_agent"), (3, "add_agent"), (3, "remove_agent"), (3, "remove_agent")]
    assert {one.get("done", True) for one in turns[3].operations if one["operation"] == "add_agent"} == {True, False}
    assert await compare_run(store, run.run_id, scenario())
    async with resume_run(store, run.run_id, scenario()) as run:
        assert "guest" not in run.state.paused_agents, "no turn was completed with it"


async def test_a_run_that_is_cancelled_can_be_resumed_with_the_same_future(store: Store) -> None:
    _, whole = await played(store, economy())
    async with begin_run(store, economy()) as run:

        def cancel(report: TurnReport) -> None:
            if report.turn == 5:
                running.cancel()

        running = asyncio.create_task(run.finish(on_turn=cancel))
        with pytest.raises(asyncio.CancelledError):
            await running
        assert run.record.turn < 20
    async with resume_run(store, run.run_id, economy()) as again:
        await again.finish()
        assert again.record.digest == whole
