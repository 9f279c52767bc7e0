"""Rows that something has damaged: the error names the row, and only the command that needs it stops."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from store_ground import HOME, current, do_nothing, failed, new_wait, ready, reserved
from store_invariants import all_instances

from ostler.errors import DamagedRowError
from ostler.model.access import SYSTEM
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.store import attempts, audit, events, instances, leases, queries, waits, workspaces
from ostler.store.store import Store
from ostler.store.transaction import Reader

pytestmark = pytest.mark.anyio

#: How the row is damaged, the query that meets it, and the words that name it.
CASES: dict[str, tuple[str, Callable[[Reader], object], str]] = {
    "an event": (
        "UPDATE agent_instance_events SET event_data_json = '{bad' WHERE sequence = 2",
        lambda reader: events.read_events(reader, 0),
        r"the row 2 of the table agent_instance_events is damaged \(ValidationError",
    ),
    "a kind of event": (
        "UPDATE agent_instance_events SET event_type = 'agent_danced' WHERE sequence = 3",
        lambda reader: events.read_events(reader, 0),
        r"the row 3 of the table agent_instance_events is damaged",
    ),
    "the workspace of an event": (
        "UPDATE agent_instance_events SET workspace_id = X'00' WHERE sequence = 3",
        lambda reader: events.read_events(reader, 0),
        r"the row 3 of the table agent_instance_events is damaged",
    ),
    "a nested value": (
        "UPDATE agent_instances SET health_json = '[' WHERE rowid = 2",
        lambda reader: all_instances(reader, HOME),
        r"the row [0-9a-f]{32} of the table agent_instances is damaged, column health_json \(",
    ),
    "a state": (
        "UPDATE agent_instances SET state = 'asleep' WHERE rowid = 2",
        lambda reader: all_instances(reader, HOME),
        r"of the table agent_instances is damaged, column state \(ValueError",
    ),
    "an id": (
        "UPDATE agent_instances SET definition_id = X'00' WHERE rowid = 1",
        lambda reader: all_instances(reader, HOME),
        r"of the table agent_instances is damaged, column definition_id \(ValueError",
    ),
    "a time": (
        "UPDATE agent_instances SET created_at = 'noon' WHERE rowid = 1",
        lambda reader: all_instances(reader, HOME),
        r"of the table agent_instances is damaged, column created_at \(TypeError",
    ),
    "an audit entry": (
        "UPDATE audit SET occurred_at = 'noon' WHERE number = 2",
        lambda reader: audit.verify(reader, HOME),
        r"the row [0-9a-f]{32} 2 of the table audit is damaged, column occurred_at",
    ),
    "an attempt": (
        "UPDATE attempts SET outcome = 'vanished' WHERE rowid = 2",
        attempts.open_attempts,
        r"the row [0-9a-f]{32} 1 of the table attempts is damaged, column outcome",
    ),
    "a wait": (
        "UPDATE waits SET kind = 'boredom'",
        waits.all_open_waits,
        r"the row [0-9a-f]{32} of the table waits is damaged, column kind",
    ),
    "a workspace": (
        "UPDATE workspaces SET tier = 'gold'",
        workspaces.list_workspaces,
        r"of the table workspaces is damaged, column tier",
    ),
    "a lease": (
        "INSERT INTO leases VALUES ('owner', 'o', 1, 0, 'never')",
        leases.get_lease,
        r"the row owner of the table leases is damaged, column expires_at",
    ),
}


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    async with Store(tmp_path) as store:
        for _ in range(3):
            await ready(store)
        await store.run(waits.open_wait, new_wait())
    return tmp_path


def damage(home: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(home / "ostler.db")) as file, file:
        file.execute("PRAGMA ignore_check_constraints = ON")
        assert file.execute(sql).rowcount == 1


@pytest.mark.parametrize("case", CASES)
async def test_a_damaged_row_is_named_with_its_table_key_and_column(home: Path, case: str) -> None:
    sql, query, told = CASES[case]
    async with Store(home) as store:
        damage(home, sql)
        with pytest.raises(DamagedRowError, match=told + ".*; restore the store from a backup"):
            await store.read(query)


async def test_a_damaged_row_stops_only_the_command_that_needs_it(home: Path) -> None:
    async with Store(home) as store:
        bad, good = (await store.read(queries.list_instances, GetInstancesFilter(), HOME))[:2]
        damage(home, f"UPDATE attempts SET handle_json = '[' WHERE instance_id = X'{bad.instance_id.hex}'")
        answers = await asyncio.gather(
            store.run(do_nothing),
            failed(store, good),
            _restarted(store, bad),
            reserved(store),
            return_exceptions=True,
        )
        assert isinstance(answers[2], DamagedRowError)
        assert isinstance(answers[1], AgentInstance)
        assert isinstance(answers[3], AgentInstance)
        assert await current(store, bad) != bad, "what came before it stands"


async def _restarted(store: Store, one: AgentInstance) -> None:
    over = await failed(store, one)
    await store.run(instances.new_attempt, over, by=SYSTEM, reason="again")


async def test_one_damaged_instance_hides_no_other_by_its_id(home: Path) -> None:
    async with Store(home) as store:
        bad, good = (await store.read(queries.list_instances, GetInstancesFilter(), HOME))[:2]
        damage(home, f"UPDATE agent_instances SET tags_json = '[' WHERE id = X'{bad.instance_id.hex}'")
        with pytest.raises(DamagedRowError, match="column tags_json"):
            await current(store, bad)
        assert await current(store, good) == good
        await failed(store, bad)  # a move compares and sets, so it does not read what is damaged
