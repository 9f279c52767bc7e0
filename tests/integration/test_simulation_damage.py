"""Damage is told by whoever reads it; runs are removed while others play, fork or remove them."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from simulation_scenes import SETTINGS, doing, economy, fails, in_turn, played, scripted, silent

from ostler.errors import HistoryBrokenError, InvalidOperationError, SimulationNotFoundError, VersionConflictError
from ostler.simulation import (
    AgentGroup,
    AgentView,
    RunState,
    Scenario,
    SimulationState,
    begin_run,
    compare_run,
    export_turns,
    fork_run,
    remove_run,
    replay,
    resume_run,
    state_at,
)
from ostler.store import simulations
from ostler.store.store import Store

pytestmark = pytest.mark.anyio
TURNS = 7


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
async def store(home: Path) -> AsyncIterator[Store]:
    async with Store(home) as store:
        yield store


@pytest.fixture
async def beside(home: Path, store: Store) -> AsyncIterator[Store]:
    del store  # opened first
    async with Store(home) as beside:
        yield beside


# --- damage ------------------------------------------------------------------------------------------


def count(state: SimulationState) -> None:
    for name in state.states:
        state.states[name]["n"] = state.turn + 1000


def scene() -> Scenario:
    """Turns 0, 3 and 6 are whole; in turn 2 an agent fails."""
    return scripted(
        {"ada": silent, "bo": in_turn({2: fails})},
        engine=doing(count).engine,
        turns=TURNS,
        settings=SETTINGS.evolve(snapshot_every=3, failure_pause_turns=1),
    )


async def by_replay(store: Store, run_id: UUID) -> None:
    _ = [one async for one in replay(store, run_id)]


async def by_state(store: Store, run_id: UUID) -> None:
    for turn in range(TURNS + 1):
        await state_at(store, run_id, turn)


async def by_comparing(store: Store, run_id: UUID) -> None:
    await compare_run(store, run_id, scene())


READERS = (by_replay, by_state, by_comparing)


def spoil(home: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(home / "ostler.db")) as connection:
        assert connection.execute(sql, values).rowcount > 0
        connection.commit()


def edited(turn: int, old: str, new: str) -> tuple[Any, ...]:
    return ("UPDATE simulation_turns SET core = replace(core, ?, ?) WHERE turn = ?", old, new, turn)


#: What is done, the turn that is told, and who sees it: a state that begins at a whole one skips the turns before.
DAMAGE: dict[str, tuple[tuple[object, ...], int, tuple[Any, ...]]] = {
    "a value": (edited(4, '"n":1004', '"n":9999'), 4, READERS),
    "a decision": (edited(5, '"decided":[["ada","bo"],[null', '"decided":[["ada","bo"],[1'), 5, READERS),
    "spaces": (edited(4, '"n":1004', '"n": 1004'), 4, READERS),
    "no JSON": (("UPDATE simulation_turns SET core = '{bad' WHERE turn = 4",), 4, READERS),
    "nothing": (("UPDATE simulation_turns SET core = '{}' WHERE turn = 4",), 4, READERS),
    "a gap": (("DELETE FROM simulation_turns WHERE turn = 4",), 4, READERS),
    "no end": (("DELETE FROM simulation_turns WHERE turn = 7",), 7, READERS),
    "a digest": (("UPDATE simulation_turns SET digest = ? WHERE turn = 7", "0" * 64), 7, READERS),
    "the run": (("UPDATE simulation_runs SET digest = ?", "0" * 64), 7, (by_replay, by_state)),
    "a whole state": (
        ("UPDATE simulation_wholes SET body = replace(body, '1006', '9999') WHERE turn = 6",),
        6,
        (by_state,),
    ),
    "the first state": (
        ("UPDATE simulation_wholes SET body = replace(body, 'ada', 'eve') WHERE turn = 0",),
        0,
        READERS,
    ),
    "the digest of a whole state": (
        ("UPDATE simulation_wholes SET digest = ? WHERE turn = 6", "0" * 64),
        6,
        (by_state,),
    ),
    "the words of an error": (("UPDATE simulation_turns SET notes = '{bad' WHERE turn = 2",), 2, READERS),
}


@pytest.mark.parametrize(("damage", "turn", "readers"), DAMAGE.values(), ids=DAMAGE)
async def test_damage_is_told_by_whoever_reads_it(
    home: Path, damage: tuple[Any, ...], turn: int, readers: tuple[Any, ...]
) -> None:
    async with Store(home) as store:
        run_id, _ = await played(store, scene())
        for read in READERS:
            await read(store, run_id)
    spoil(home, *damage)
    said = f"turn {turn} of run {run_id} is missing or not as it was written"
    async with Store(home) as store:
        for read in readers:
            with pytest.raises(HistoryBrokenError, match=said):
                await read(store, run_id)
        if by_replay in readers:
            with pytest.raises(HistoryBrokenError, match=said):
                await export_turns(lambda: replay(store, run_id), home / "out.jsonl", "jsonl")
            assert not (home / "out.jsonl").exists()


async def test_a_run_without_its_first_state_is_told(home: Path) -> None:
    async with Store(home) as store:
        run_id, _ = await played(store, scene())
    spoil(home, "DELETE FROM simulation_wholes WHERE turn = 0")
    async with Store(home) as store:
        for read in READERS:
            with pytest.raises(HistoryBrokenError, match=f"run {run_id} has no whole state at turn"):
                await read(store, run_id)


async def test_a_run_does_not_go_on_from_damage_but_a_fork_does_from_before_it(home: Path) -> None:
    async with Store(home) as store:
        run_id, _ = await played(store, scene(), 5)
    spoil(home, *edited(5, '"n":1005', '"n":9999'))
    async with Store(home) as store:
        with pytest.raises(HistoryBrokenError, match=f"turn 5 of run {run_id} is missing or not as it was written"):
            async with resume_run(store, run_id, scene()):
                pytest.fail("went on")
        async with fork_run(store, run_id, scene(), at=4) as fork:
            assert (await fork.finish()).turn == TURNS


async def test_a_turn_of_another_run_is_no_turn_of_this_one(home: Path) -> None:
    async with Store(home) as store:
        run_id, _ = await played(store, scene())
        other, _ = await played(store, scripted({"ada": silent}, turns=TURNS))
    spoil(
        home,
        """UPDATE simulation_turns SET core = o.core, digest = o.digest FROM simulation_turns AS o
           WHERE o.run_id = ? AND o.turn = 6 AND simulation_turns.run_id = ? AND simulation_turns.turn = 6""",
        other.bytes,
        run_id.bytes,
    )
    async with Store(home) as store:
        with pytest.raises(HistoryBrokenError, match=f"turn 6 of run {run_id}"):
            await by_replay(store, run_id)


# --- removing ----------------------------------------------------------------------------------------


class Whimsical:
    """Never decides the same twice, as a language model would."""

    def __init__(self, whims: Iterator[int]) -> None:
        self._whims = whims

    def decide(self, _: AgentView) -> Any:
        return {"n": next(self._whims)}


def whimsical(turns: int = 20) -> Scenario:
    whims = itertools.count()
    brains = {"w": lambda: Whimsical(whims)}
    return Scenario(name="x", turns=turns, brains=brains, agents=(AgentGroup(name="w", kind="w", count=2),))


async def rows_left(store: Store, run_id: UUID) -> int:
    turns = await store.read(simulations.list_turns, run_id, after=-1, until=10**6, limit=10**6)
    whole = await store.read(simulations.last_whole, run_id, 10**6)
    return len(turns) + (whole is not None)


async def test_a_run_is_removed_with_all_its_turns(store: Store) -> None:
    run_id, _ = await played(store, economy())
    other_id, _ = await played(store, economy(), 3)
    assert await remove_run(store, run_id) == 20
    assert await rows_left(store, run_id) == 0
    with pytest.raises(SimulationNotFoundError):
        await remove_run(store, run_id)
    assert [run.run_id for run in await store.read(simulations.list_runs)] == [other_id]
    assert await compare_run(store, other_id, economy())


async def test_a_run_from_which_others_were_forked_stays(store: Store) -> None:
    run_id, _ = await played(store, economy(), 5)
    async with fork_run(store, run_id, economy(), at=4) as fork:
        await fork.run(3)
    with pytest.raises(InvalidOperationError, match=f"holds the first turns of {fork.run_id}"):
        await remove_run(store, run_id)
    assert await remove_run(store, fork.run_id) == 3
    assert await remove_run(store, run_id) == 5


async def test_a_run_that_is_being_removed_takes_neither_turns_nor_forks(store: Store, beside: Store) -> None:
    async with begin_run(store, whimsical()) as run:
        await run.run(5)
        await beside.run_unfenced(simulations.mark_removing, run.run_id)
        with pytest.raises(InvalidOperationError, match="is being removed and takes no more turns"):
            await run.play_turn()
        with pytest.raises(InvalidOperationError, match="is being removed and cannot be forked"):
            async with fork_run(store, run.run_id, whimsical(), at=4):
                pytest.fail("forked")
        with pytest.raises(InvalidOperationError, match="is being removed; remove it again"):
            async with resume_run(store, run.run_id, whimsical()):
                pytest.fail("resumed")
    record = await store.read(simulations.require_run, run.run_id)
    assert (record.state, record.turn) == (RunState.REMOVING, 5)
    assert await remove_run(store, run.run_id) == 5, "a removal that was broken off is finished by another"
    assert await rows_left(store, run.run_id) == 0


async def test_two_programs_remove_a_run_at_once_while_it_is_played(store: Store, beside: Store) -> None:
    async with begin_run(store, whimsical(turns=2000)) as run:
        await run.run(300)
        gone = [asyncio.create_task(remove_run(one, run.run_id)) for one in (store, beside)]
        with pytest.raises((InvalidOperationError, VersionConflictError, SimulationNotFoundError)):
            await run.run(2000)
        removed = await asyncio.gather(*gone, return_exceptions=True)
    counts = [count for count in removed if isinstance(count, int)]
    # One that begins when the other is done finds nothing.
    assert all(isinstance(error, SimulationNotFoundError) for error in removed if not isinstance(error, int))
    assert max(counts) >= 300
    assert await store.read(simulations.get_run, run.run_id) is None
    assert await rows_left(store, run.run_id) == 0


async def test_a_player_does_not_go_on_after_the_turns_of_another(store: Store, beside: Store) -> None:
    """Both stand at one turn, but not at the same one: brains that draw otherwise gave it another digest."""
    async with begin_run(store, whimsical()) as first:
        await first.run(3)
        async with resume_run(beside, first.run_id, whimsical()) as second:
            await second.run(1)
        with pytest.raises(VersionConflictError, match="is at turn 4, and was played here from turn 3"):
            await first.play_turn()
    assert [one.turn async for one in replay(store, first.run_id)][-1] == 4
