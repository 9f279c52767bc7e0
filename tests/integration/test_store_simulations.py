"""The rows of runs, on SQLite, in memory and on PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from ostler.clock import SystemClock
from ostler.errors import InvalidOperationError, SimulationNotFoundError, StaleWriterError, VersionConflictError
from ostler.ids import Uuid7Source
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.simulation import (
    OnFailure,
    RunState,
    SimulationRun,
    SimulationSettings,
    SimulationTurn,
    SimulationWhole,
)
from ostler.store import audit, simulations
from ostler.store.sqlite import SqliteConnection
from ostler.store.store import Store

pytestmark = pytest.mark.anyio
IDS = Uuid7Source(SystemClock())
NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    where = {"sqlite": str(tmp_path / "home"), "memory": ":memory:"}.get(request.param)
    async with Store(where or request.getfixturevalue("migrated_address")) as store:
        yield store


def whole(run_id: UUID, turn: int) -> SimulationWhole:
    return SimulationWhole(run_id=run_id, turn=turn, digest=f"d{turn}", body=f'{{"turn":{turn}}}', seal="s")


def turn(run: SimulationRun, number: int) -> SimulationTurn:
    return SimulationTurn(run_id=run.run_id, turn=number, core=f'{{"turn":{number}}}', notes=None, digest=f"d{number}")


async def begun(store: Store, at: int = 0, **more: object) -> SimulationRun:
    run = SimulationRun(run_id=IDS.new(), name="x", turn=at, digest=f"d{at}", created_at=NOW, updated_at=NOW)
    return await store.run_unfenced(simulations.create_run, run.evolve(**more).checked(), whole(run.run_id, at))


async def played(store: Store, turns: int, every: int = 3) -> SimulationRun:
    run = await begun(store)
    for number in range(1, turns + 1):
        body = whole(run.run_id, number) if number % every == 0 else None
        run = await store.run_unfenced(simulations.append_turn, run, turn(run, number), whole=body)
    return run


async def acts(store: Store) -> list[str]:
    entries = await store.read(audit.list_entries, HOME_WORKSPACE_ID)
    return [one.action for one in entries if one.action.startswith("simulation.")]


async def test_a_run_is_read_as_it_was_written(store: Store) -> None:
    settings = SimulationSettings(
        seed=2**63 - 1, parameters={"tax": [0.1, "ü"]}, decision_timeout=timedelta(seconds=0.5), on_error=OnFailure.KEEP
    )
    run = await begun(store, settings=settings, scenario={"text": "name = 'x'", "overrides": {}})
    found = await store.read(simulations.require_run, run.run_id)
    assert found == run
    assert (found.settings, found.seed, found.created_at > NOW) == (settings, 2**63 - 1, True)
    with pytest.raises(SimulationNotFoundError, match="there is no run"):
        await store.read(simulations.require_run, uuid4())


async def test_turns_follow_each_other_and_the_run_follows_them(store: Store) -> None:
    run = await played(store, 7)
    assert (run.turn, run.digest, run.state) == (7, "d7", RunState.OPEN)
    assert await store.read(simulations.require_run, run.run_id) == run
    rows = await store.read(simulations.list_turns, run.run_id, after=2, until=6, limit=3)
    assert [one.turn for one in rows] == [3, 4, 5]
    for at, expected in ((0, 0), (2, 0), (3, 3), (5, 3), (7, 6)):
        found = await store.read(simulations.last_whole, run.run_id, at)
        assert found is not None
        assert found.turn == expected


async def test_of_two_that_append_one_turn_one_is_refused(store: Store) -> None:
    run = await played(store, 2)
    after = await store.run_unfenced(simulations.append_turn, run, turn(run, 3))
    for stale in (run, run.evolve(turn=3), after.evolve(digest="other")):
        with pytest.raises(VersionConflictError, match="is at turn 3"):
            await store.run_unfenced(simulations.append_turn, stale, turn(run, stale.turn + 1))
    with pytest.raises(SimulationNotFoundError):
        await store.run_unfenced(simulations.append_turn, run.evolve(run_id=uuid4()), turn(run, 4))
    assert len(await store.read(simulations.list_turns, run.run_id, after=0, until=9, limit=9)) == 3


async def test_a_run_ends_with_its_last_turn_or_between_two_and_is_opened_again(store: Store) -> None:
    run = await begun(store)
    ended = await store.run_unfenced(simulations.append_turn, run, turn(run, 1), ended="done\0" + "x" * 5000)
    assert (ended.state, str(ended.outcome)[:5]) == (RunState.ENDED, "done\ufffd")
    assert len(str(ended.outcome)) <= 2000
    opened = await store.run_unfenced(simulations.append_turn, ended, turn(run, 2))
    assert (opened.state, opened.outcome) == (RunState.OPEN, None)
    ended = await store.run_unfenced(simulations.end_run, opened, "no agent is active")
    assert ended == await store.read(simulations.require_run, run.run_id)
    assert await acts(store) == ["simulation.create", "simulation.end", "simulation.reopen", "simulation.end"]


async def test_forks_need_a_parent_that_has_the_turn(store: Store) -> None:
    parent = await played(store, 4)
    fork = await begun(store, 3, parent_id=parent.run_id, forked_at=3)
    assert [one.run_id for one in await store.read(simulations.list_forks, parent.run_id)] == [fork.run_id]
    with pytest.raises(InvalidOperationError, match="stands at turn 4 and cannot be forked after turn 5"):
        await begun(store, 5, parent_id=parent.run_id, forked_at=5)
    with pytest.raises(SimulationNotFoundError):
        await begun(store, 3, parent_id=uuid4(), forked_at=3)


async def test_runs_are_listed_newest_first(store: Store) -> None:
    runs = [await begun(store) for _ in range(5)]
    newest = [run.run_id for run in reversed(runs)]
    first = await store.read(simulations.list_runs, limit=3)
    rest = await store.read(simulations.list_runs, before=first[-1].run_id)
    assert [run.run_id for run in (*first, *rest)] == newest
    assert await store.read(simulations.list_runs, uuid4()) == []


async def test_a_run_is_removed_some_turns_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulations, "REMOVED_AT_ONCE", 2)
    run = await played(store, 5)
    with pytest.raises(InvalidOperationError, match="mark it for removal first"):
        await store.run_unfenced(simulations.remove_turns, run.run_id)
    await store.run_unfenced(simulations.mark_removing, run.run_id)
    steps = 1
    while await store.run_unfenced(simulations.remove_turns, run.run_id):
        steps += 1
    assert steps == 4
    assert await store.read(simulations.get_run, run.run_id) is None
    assert await acts(store) == ["simulation.create", "simulation.remove"]
    assert not await store.run_unfenced(simulations.remove_turns, run.run_id)


async def test_runs_are_written_beside_an_owner_and_fenced_where_that_is_wanted(tmp_path: Path) -> None:
    async with Store(tmp_path) as owner, Store(tmp_path) as beside:
        await owner.take_lease("owner", ttl=timedelta(minutes=1))
        run = await begun(beside)
        after = await beside.run_unfenced(simulations.append_turn, run, turn(run, 1))
        with pytest.raises(StaleWriterError):
            await beside.run(simulations.append_turn, after, turn(run, 2))
        assert (await owner.run(simulations.append_turn, after, turn(run, 2))).turn == 2


async def test_the_questions_about_runs_and_turns_are_answered_by_an_index(tmp_path: Path) -> None:
    async with Store(tmp_path) as store:
        await played(store, 3)
    db = sqlite3.connect(tmp_path / "ostler.db")
    for sql in (
        "SELECT * FROM simulation_runs WHERE workspace_id = x'00' AND id < x'00' ORDER BY id DESC LIMIT 3",
        "SELECT * FROM simulation_runs WHERE parent_id = x'00' ORDER BY id",
        "SELECT * FROM simulation_turns WHERE run_id = x'00' AND turn > 1 AND turn <= 5 ORDER BY turn LIMIT 3",
        "SELECT * FROM simulation_wholes WHERE run_id = x'00' AND turn <= 5 ORDER BY turn DESC LIMIT 1",
    ):
        plan = " ".join(str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {sql}"))
        assert "USING INDEX" in plan or "USING COVERING INDEX" in plan or "USING PRIMARY KEY" in plan, plan
        assert "SCAN" not in plan
    db.close()


def test_the_tables_of_runs_can_be_taken_back_and_put_up_again(tmp_path: Path) -> None:
    connection = SqliteConnection(tmp_path / "ostler.db", create=True)
    connection.migrate()
    newest = connection.version
    connection.migrate_down(1)
    assert connection.version == 1
    connection.migrate()
    assert connection.version == newest
    connection.close()


def test_what_is_wrong_with_a_run_or_its_settings_is_said() -> None:
    run = SimulationRun(run_id=uuid4(), name="", turn=-1, digest="", parent_id=uuid4(), created_at=NOW, updated_at=NOW)
    assert [one.field for one in run.validate()] == ["turn", "name", "forked_at"]
    settings = SimulationSettings(max_agents=0, seed=-1, on_idle="never", decision_timeout="soon")  # type: ignore[arg-type]  # on purpose
    assert [one.field for one in settings.validate()] == ["seed", "max_agents", "decision_timeout", "on_idle"]
    assert SimulationSettings(decision_timeout="500ms").checked().decision_timeout == timedelta(seconds=0.5)  # type: ignore[arg-type]  # as in a file
