"""A history that was edited, or has a gap, is told by whoever reads it; nobody goes on from it."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
from simulation_scenes import SETTINGS, doing, economy, fails, in_turn, played, scripted, silent

from ostler.errors import HistoryBrokenError
from ostler.simulation import (
    PlayedTurn,
    Scenario,
    SimulationState,
    compare_run,
    export_turns,
    fork_run,
    kept_at,
    replay,
    resume_run,
    state_at,
)
from ostler.store import Store, open_store

pytestmark = pytest.mark.anyio
TURNS = 7


def count(state: SimulationState) -> None:
    for name in state.states:
        state.states[name]["n"] = state.turn + 1000


def scene() -> Scenario:
    """Turns 0, 3 and 6 are whole; in turn 2 somebody fails."""
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


def spoil(home: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(home / "ostler.db")) as connection:
        assert connection.execute(sql, values).rowcount > 0
        connection.commit()


def edited(turn: int, old: str, new: str) -> tuple[str, ...]:
    return ("UPDATE simulation_turns SET body = replace(body, ?, ?) WHERE turn = ?", old, new, str(turn))


DAMAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "a value": (
        edited(4, '"n":1004', '"n":9999'),
        "turn 4 of run .* not as it was written; .*fork the run at turn 3",
    ),
    "a value of a whole": (edited(6, '"n":1006', '"n":9999'), "turn 6 of run .* is not as it was written"),
    "the first state": (edited(0, '"seed":0', '"seed":1'), "turn 0 of run .* written; restore the home from a backup$"),
    "a decision": (edited(5, '"ada":null', '"ada":1'), "turn 5 of run .* is not as it was written"),
    "the words of an error": (edited(2, "not my day", "no my day!"), "turn 2 of run .* is not as it was written"),
    "spaces": (edited(4, '"n":1004', '"n": 1004'), "turn 4 of run .* is not as it was written"),
    "no JSON": (("UPDATE simulation_turns SET body = '{bad' WHERE turn = 3",), "turn 3 of run .* is not as it was"),
    "nothing": (("UPDATE simulation_turns SET body = '{}' WHERE turn = 3",), "turn 3 of run .* is not as it was"),
    "no text": (("UPDATE simulation_turns SET body = '' WHERE turn = 3",), "turn 3 of run .* is not as it was"),
    "a list": (("UPDATE simulation_turns SET body = '[1]' WHERE turn = 4",), "turn 4 of run .* is not as it was"),
    "a gap": (("DELETE FROM simulation_turns WHERE turn = 4",), "turn 4 of run .* is missing from the store"),
    "no end": (("DELETE FROM simulation_turns WHERE turn = 7",), "turn 7 of run .* is missing from the store"),
    "no beginning": (("DELETE FROM simulation_turns WHERE turn = 0",), "no whole state of run .* at turn 0 or before"),
    "a digest": (
        ("UPDATE simulation_turns SET digest = ? WHERE turn = 7", "0" * 64),
        "turn 7 of run .* is not as it was written",
    ),
    "the digest of a whole": (
        ("UPDATE simulation_turns SET digest = ? WHERE turn = 6", "0" * 64),
        "turn 6 of run .* is not as it was written",
    ),
    "the run": (
        ("UPDATE simulation_runs SET digest = ?", "0" * 64),
        "turn 7 of run .* is not the one that the run",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
async def test_damage_is_told_by_whoever_reads_it(home: Path, damage: tuple[str, ...], said: str) -> None:
    async with open_store(home) as store:
        run_id, _ = await played(store, scene())
        for read in (by_replay, by_state, by_comparing):
            await read(store, run_id)
    spoil(home, *damage)
    async with open_store(home) as store:
        for read in (by_replay, by_state, by_comparing):
            with pytest.raises(HistoryBrokenError, match=said):
                await read(store, run_id)
        with pytest.raises(HistoryBrokenError, match=said):
            await export_turns(lambda: replay(store, run_id), home / "out.jsonl", "jsonl")
        assert not (home / "out.jsonl").exists()


async def test_nobody_goes_on_from_damage_but_from_before_it(home: Path) -> None:
    async with open_store(home) as store:
        run_id, _ = await played(store, scene(), 5)
    spoil(home, *edited(5, '"n":1005', '"n":9999'))
    async with open_store(home) as store:
        with pytest.raises(HistoryBrokenError, match=f"turn 5 of run {run_id} is not as it was written"):
            async with resume_run(store, run_id, scene()):
                pytest.fail("went on")
        async with fork_run(store, run_id, scene(), at=4) as fork:
            assert (await fork.finish()).turn == TURNS


async def test_a_turn_of_another_run_is_no_turn_of_this_one(home: Path) -> None:
    """A whole turn has nothing before it to be compared with, but the one after it has."""
    async with open_store(home) as store:
        run_id, _ = await played(store, scene())
        other, _ = await played(store, dataclasses.replace(scene(), seed=5))
    take = "SELECT {0} FROM simulation_turns WHERE turn = 6 AND run_id = ?"
    sql = (
        f"UPDATE simulation_turns SET body = ({take.format('body')}), digest = ({take.format('digest')}) WHERE turn = 6"
    )
    spoil(home, sql, other.bytes, other.bytes)
    async with open_store(home) as store:
        with pytest.raises(HistoryBrokenError, match=f"turn 7 of run {run_id} is not as it was written"):
            await by_replay(store, run_id)


async def test_what_is_whole_is_read_whole(store: Store) -> None:
    """Failures, comings and goings, forks of forks, pieces: each text is what its digest says."""
    run_id, digest = await played(store, economy())
    async with fork_run(store, run_id, economy(), at=9) as fork:
        await fork.run(5)
    async with resume_run(store, fork.run_id, economy()) as fork:
        await fork.run(5)
    async with fork_run(store, fork.run_id, economy(), at=12) as second:
        await second.run(3)
    told: list[PlayedTurn] = [one async for one in replay(store, second.run_id)]
    assert [one.turn for one in told] == list(range(16))
    assert (await kept_at(store, run_id, 20)).digest == digest
    assert (await kept_at(store, second.run_id, 15)).digest == told[-1].digest


async def test_what_was_written_before_there_were_seals_is_read_too(home: Path) -> None:
    async with open_store(home) as store:
        run_id, _ = await played(store, scene())
    with closing(sqlite3.connect(home / "ostler.db")) as connection:
        for turn, text in connection.execute("SELECT turn, body FROM simulation_turns").fetchall():
            body = json.loads(text)
            assert ("seal" in body) == (turn in {0, 2, 3, 6}), "it costs nothing where the digest covers all"
            body.pop("seal", None)
            plain = json.dumps(body, separators=(",", ":"))
            connection.execute("UPDATE simulation_turns SET body = ? WHERE turn = ?", (plain, turn))
        connection.commit()
    async with open_store(home) as store:
        for read in (by_replay, by_state, by_comparing):
            await read(store, run_id)
        async with resume_run(store, run_id, scene()) as run:
            await run.run(2)
        await by_replay(store, run_id)
    spoil(home, 'UPDATE simulation_turns SET body = \'{"turn":6,"whole":{}}\' WHERE turn = 6')
    async with open_store(home) as store:
        with pytest.raises(HistoryBrokenError, match=r"turn 6 of run .* is not as it was written"):
            await by_replay(store, run_id)
