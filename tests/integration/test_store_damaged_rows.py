"""Rows that somebody or something has spoiled: which one it is, instead of an error of ours."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ostler.errors import DamagedRowError, StoreError
from ostler.model import AgentState
from ostler.store import Store, open_store, view_store
from ostler.store.kinds import Kind
from ostler.store.logrows import events_from
from ostler.store.mapper import Mapper
from ostler.store.shapes import SHAPES
from ostler.store.sqlite import SQLITE
from ostler.testing.store_suite.ground import brought_to, moved, reserved
from ostler.testing.store_suite.simulations import begun

pytestmark = pytest.mark.anyio


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    async with open_store(tmp_path) as store:
        for _ in range(3):
            await brought_to(store, AgentState.READY)
        await begun(store, turns=3)
    return tmp_path


CASES: dict[str, tuple[str, Callable[[Store], Awaitable[Any]], str]] = {
    "an event": (
        "UPDATE agent_instance_events SET event_data_json = '{bad' WHERE sequence = 2",
        lambda store: store.read_events(),
        r"the row sequence 2 of the table agent_instance_events is damaged \(JSONDecodeError",
    ),
    "a kind of event": (
        "UPDATE agent_instance_events SET event_type = 'agent_danced' WHERE sequence = 3",
        lambda store: store.read_events(),
        r"the row sequence 3 of the table agent_instance_events is damaged",
    ),
    "an instance": (
        "UPDATE agent_instances SET health_json = '[' WHERE rowid = 2",
        lambda store: store.list_instances(),
        r"the row id [0-9a-f]{32} of the table agent_instances is damaged, column health_json \(",
    ),
    "a state": (
        "UPDATE agent_instances SET state = 'asleep' WHERE rowid = 2",
        lambda store: store.list_instances(),
        r"of the table agent_instances is damaged, column state \(ValueError",
    ),
    "an id": (
        "UPDATE agent_instances SET definition_id = X'00' WHERE rowid = 1",
        lambda store: store.list_instances(),
        r"of the table agent_instances is damaged, column definition_id \(ValueError",
    ),
    "an audit entry": (
        "UPDATE audit SET occurred_at = 'noon' WHERE number = 4",
        lambda store: store.verify_audit(),
        r"the row [0-9a-f]{32} 4 of the table audit is damaged",
    ),
    "a run": (
        "UPDATE simulation_runs SET settings_json = 'x'",
        lambda store: store.list_runs(),
        r"of the table simulation_runs is damaged, column settings_json",
    ),
    "the workspace of an entry": (
        "UPDATE audit SET workspace_id = X'FF' WHERE number = 2",
        lambda store: store.list_chains(),
        r"the row ff of the table workspaces, workspace_ledgers or audit is damaged, column workspace_id",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_damaged_row_is_named(home: Path, case: str) -> None:
    sql, read, told = CASES[case]
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(sql).rowcount == 1
    connection.close()
    async with view_store(home) as store:
        with pytest.raises(StoreError, match=told + ".*; restore the store from a backup"):
            await read(store)


async def test_a_damaged_row_stops_no_other_command(home: Path) -> None:
    async with open_store(home) as store:
        bad, good = (await store.list_instances())[:2]
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("UPDATE agent_instances SET tags_json = '[' WHERE id = ?", (bad.instance_id.bytes,))
    connection.close()
    async with open_store(home) as store:
        with pytest.raises(StoreError, match="column tags_json"):
            await moved(store, bad, AgentState.PROCESSING)
        assert (await moved(store, good, AgentState.PROCESSING)).state is AgentState.PROCESSING
        await reserved(store)


async def test_nor_does_it_make_one_commit_of_each(home: Path) -> None:
    async with open_store(home) as store:
        bad = (await store.list_instances())[0]
    with sqlite3.connect(home / "ostler.db") as connection:
        connection.execute("UPDATE agent_instances SET tags_json = '[' WHERE id = ?", (bad.instance_id.bytes,))
    connection.close()
    async with open_store(home) as store:
        before = (await store.head()).commit_number
        others = [reserved(store) for _ in range(100)]
        told, *made = await asyncio.gather(moved(store, bad, AgentState.PROCESSING), *others, return_exceptions=True)
        assert isinstance(told, DamagedRowError)
        assert not [one for one in made if isinstance(one, BaseException)]
        assert (await store.head()).commit_number - before < len(others) / 2


def test_a_row_for_which_there_is_no_memory_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError

    mapper = Mapper(SQLITE, SHAPES[Kind.LEASE])
    monkeypatch.setattr(mapper, "_made", no_room)
    with pytest.raises(MemoryError):
        mapper.records(list(mapper.columns), [(None,) * len(mapper.columns)])
    monkeypatch.setattr("ostler.store.logrows.event_from", no_room)
    with pytest.raises(MemoryError):
        events_from(SQLITE, [(1,)])
