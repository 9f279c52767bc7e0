"""What simulations cost a store: no memory for turns that are written, and no search through those that are kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ostler.seams import Uuid7Source
from ostler.store import open_store
from ostler.store.cache import Cache, slot_of
from ostler.store.commands import RecordTurn
from ostler.store.kinds import Kind
from ostler.store.opening import sqlite_backend
from ostler.store.queries import queries
from ostler.store.unit import Unit
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.simulations import RUN, a_turn, beginning, begun

pytestmark = pytest.mark.anyio


async def test_a_turn_that_is_written_is_not_kept_in_memory(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await store.commit(beginning())
    backend, clock, cache = sqlite_backend(tmp_path / "ostler.db"), ManualClock(), Cache()
    assert backend.open_writer is not None
    session = backend.open_writer(lambda _: None)
    for first in (1, 4):
        head = session.begin()
        cache.check(head)
        unit = Unit(session, head, cache, clock.wall(), Uuid7Source(clock))
        for number in range(first, first + 3):
            unit.start()
            RecordTurn(run_id=RUN, turn=a_turn(number)).apply(unit)
            unit.accept()
        changes = unit.changes()
        assert changes is not None
        session.save(changes)
        session.commit()
        cache.committed(changes)
        assert [kind for kind, _ in cache.rows if kind is Kind.SIMULATION_TURN] == []
        assert cache.rows[slot_of(Kind.SIMULATION_RUN, (RUN,))].turn == first + 2
    session.close()


async def test_the_questions_about_runs_and_turns_are_answered_by_an_index(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await begun(store, turns=1)
    values = {"run_id": RUN.bytes, "workspace_id": RUN.bytes, "before": RUN.bytes, "after": 0, "until": 9, "limit": 1}
    wanted = {
        "runs_of_workspace": "idx_simulation_runs_all (workspace_id=?)",
        "runs_of_workspace_before": "idx_simulation_runs_all (workspace_id=? AND id<?)",
        "turns_of_run": "sqlite_autoindex_simulation_turns_1 (run_id=? AND turn>?)",
        "whole_turn": "idx_simulation_turns_whole (run_id=? AND turn<?)",
    }
    with sqlite3.connect(tmp_path / "ostler.db") as connection:
        for name, index in wanted.items():
            sql = queries()[name].format(true="1")
            steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
            assert len(steps) == 1, f"{name} also sorts: {steps}"
            assert steps[0].endswith(f"USING INDEX {index}")
    connection.close()
