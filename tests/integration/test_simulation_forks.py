"""Looking back and branching off: replays, forks, forks of forks, and a run played once more."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from simulation_scenes import SETTINGS, Market, Trader, economy, played, scripted

from ostler.errors import InvalidOperationError, ValidationError
from ostler.simulation import (
    AgentView,
    Brains,
    PlayedTurn,
    Scenario,
    SimulationSettings,
    begin_run,
    compare_run,
    fork_run,
    replay,
    resume_run,
    run_settings,
    state_at,
)
from ostler.store import Store

pytestmark = pytest.mark.anyio


async def told(store: Store, run_id: UUID, **span: Any) -> list[PlayedTurn]:
    return [one async for one in replay(store, run_id, **span)]


async def forked(
    store: Store, run_id: UUID, at: int, until: int = 20, settings: SimulationSettings | None = None
) -> tuple[UUID, str]:
    async with fork_run(store, run_id, economy(), at=at, settings=settings) as run:
        await run.finish(until)
        return run.run_id, run.record.digest


async def settings_of(store: Store, run_id: UUID) -> SimulationSettings:
    run = await store.get_run(run_id)
    assert run is not None
    return run_settings(run)


# --- looking back -------------------------------------------------------------------------------


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
        assert (turn.resumed, turn.states, turn.digest) == (report.resumed, states, digest)
        assert turn.operations == tuple(one.as_json() for one in report.operations)
        for name, failure in report.failures.items():
            assert failure.message.startswith("RuntimeError: no luck")
            assert turn.failures[name] == {
                "timed_out": False,
                "error_type": failure.error_type,
                "message": failure.message,
                "became": "paused",
            }


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 20), (5, 7), (6, 6), (7, 19), (20, 20)])
async def test_a_replay_of_some_turns_is_that_part_of_the_whole(store: Store, first: int, last: int) -> None:
    run_id, _ = await played(store, economy())
    assert await told(store, run_id, first=first, last=last) == (await told(store, run_id))[first : last + 1]


@pytest.mark.parametrize("span", [{"last": 21}, {"first": 21}, {"first": -1}, {"last": -1}])
async def test_turns_that_were_not_played_are_refused(store: Store, span: dict[str, int]) -> None:
    run_id, _ = await played(store, economy())
    with pytest.raises(InvalidOperationError, match="stands at turn 20; ask for a turn from 0 to 20"):
        await told(store, run_id, **span)


async def test_the_state_at_a_turn_is_there_to_be_looked_at(store: Store) -> None:
    run_id, _ = await played(store, economy())
    for turn in await told(store, run_id):
        state = await state_at(store, run_id, turn.turn)
        assert (state.turn, dict(state.states), state.global_state) == (turn.turn, turn.states, turn.global_state)
        assert {name: state.auto_resume.get(name) for name in state.paused_agents} == turn.paused
        assert {name: state.member(name).number for name in state.agents} == turn.numbers
    with pytest.raises(InvalidOperationError, match="from 0 to 20"):
        await state_at(store, run_id, 21)


# --- branching off ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 6, 13, 20])
async def test_a_fork_with_the_same_settings_has_the_same_future(store: Store, at: int) -> None:
    run_id, digest = await played(store, economy())
    fork_id, again = await forked(store, run_id, at)
    assert again == digest
    assert await told(store, fork_id) == await told(store, run_id)


async def test_a_fork_with_another_seed_or_other_parameters_has_another_future(store: Store) -> None:
    run_id, digest = await played(store, economy())
    before = await told(store, run_id)
    settings = await settings_of(store, run_id)
    for change in ({"seed": 8}, {"parameters": {"shock": 9}}):
        fork_id, other = await forked(store, run_id, 9, settings=settings.evolve(**change))
        turns = await told(store, fork_id)
        assert other != digest
        assert turns[:10] == before[:10]
        assert turns[-1].global_state != before[-1].global_state
    assert await told(store, run_id) == before, "the run itself is as it was"


async def test_a_fork_may_go_further_than_the_run_it_came_from(store: Store) -> None:
    _, whole = await played(store, economy())
    run_id, _ = await played(store, economy(), 6)
    fork_id, digest = await forked(store, run_id, 4)
    assert digest == whole
    run = await store.get_run(fork_id)
    assert run is not None
    assert (run.parent_id, run.forked_at, run.turn) == (run_id, 4, 20)
    with pytest.raises(InvalidOperationError, match="stands at turn 6"):
        await forked(store, run_id, 7)


async def test_forks_of_forks_know_all_turns_they_came_by(store: Store) -> None:
    """Also one that branches off before the place at which its parent did."""
    root_id, _ = await played(store, economy())
    settings = await settings_of(store, root_id)
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


async def test_a_fork_is_resumed_as_any_run(store: Store) -> None:
    run_id, digest = await played(store, economy())
    fork_id, _ = await forked(store, run_id, 6, 9)
    async with resume_run(store, fork_id, economy()) as run:
        await run.finish()
        assert run.record.digest == digest


async def test_a_fork_must_have_room_for_those_who_are_there(store: Store) -> None:
    run_id, _ = await played(store, economy(), 3)
    settings = await settings_of(store, run_id)
    with pytest.raises(ValidationError, match="max_agents must be at least 7, the agents there are at turn 0"):
        await forked(store, run_id, 0, settings=settings.evolve(max_agents=2))
    with pytest.raises(ValidationError, match="retries"):
        await forked(store, run_id, 0, settings=settings.evolve(retries=-1))
    assert len(await store.list_runs()) == 1


# --- once more ----------------------------------------------------------------------------------


async def test_a_run_played_once_more_is_the_same(store: Store) -> None:
    run_id, _ = await played(store, economy())
    found = await compare_run(store, run_id, economy())
    assert (found.equal, found.turns, found.differs_at) == (True, 20, None)
    assert (await compare_run(store, run_id, economy(), last=7)).turns == 7
    fork_id, _ = await forked(store, run_id, 12)
    assert (await compare_run(store, fork_id, economy())).turns == 8
    for last in (21, -1):
        with pytest.raises(InvalidOperationError, match="has turns 0 to 20 of its own"):
            await compare_run(store, run_id, economy(), last=last)
    assert len(await store.list_runs()) == 2, "comparing keeps nothing"


async def test_the_turn_at_which_other_code_decides_otherwise_is_told(store: Store) -> None:
    class Changed(Trader):
        def decide(self, view: AgentView) -> Any:
            decided = super().decide(view)
            return {**decided, "give": 0} if view.turn >= 7 else decided

    run_id, _ = await played(store, economy())
    brains = Brains({"trader": Changed, "learner": economy().brains.make("learner", {}).__class__})
    found = await compare_run(store, run_id, economy(brains=brains))
    assert (found.equal, found.differs_at, found.turns) == (False, 7, 7)


async def test_what_was_done_from_outside_is_in_the_record_and_done_again(store: Store) -> None:
    def scenario() -> Scenario:
        return economy(settings=SETTINGS.evolve(max_agents=9, failure_pause_turns=1))

    async with begin_run(store, scenario()) as run:
        run.pause_agent("trader", 2)
        await run.run(2)
        run.add_agent("guest", Trader(step=4), {"wealth": 50})
        run.add_kind("guest", "trader", {"step": 1}, {"wealth": 1})
        run.remove_agent("learner")
        assert not run.remove_agent("nobody")
        for _ in range(9):
            run.try_add_agent("crowd", Trader(), {"wealth": 1})
        await run.run(3)
        run.resume_agent(next(iter(run.state.paused_agents), "nobody"))
        await run.run(4)
    turns = await told(store, run.run_id)
    outside = [(turn.turn, one["operation"]) for turn in turns for one in turn.operations if one["cause"] == "outside"]
    assert outside[:5] == [
        (1, "pause_agent"),
        (3, "add_agent"),
        (3, "add_agent"),
        (3, "remove_agent"),
        (3, "remove_agent"),
    ]
    assert {one.get("done", True) for one in turns[3].operations if one["operation"] == "add_agent"} == {True, False}
    assert (await compare_run(store, run.run_id, scenario())).equal


async def test_what_is_done_from_outside_belongs_to_the_turn_after_it(store: Store) -> None:
    scenario = scripted({"ada": lambda _: None, "bo": lambda _: None})
    async with begin_run(store, scenario) as run:
        await run.run(1)
        run.pause_agent("bo")
    async with resume_run(store, run.run_id, scenario) as run:
        assert not run.state.paused_agents, "no turn was completed with it"
        run.pause_agent("bo")
        await run.run(1)
    async with resume_run(store, run.run_id, scenario) as run:
        assert list(run.state.paused_agents) == ["bo"]


async def test_a_run_differs_when_its_engine_does(store: Store) -> None:
    class Other(Market):
        def save(self) -> Any:
            return self.moved + (1 if self.moved > 4 else 0)

    run_id, _ = await played(store, economy())
    assert not (await compare_run(store, run_id, economy(engine=Other))).equal
