"""Migrations on both databases: up, down and up again; a death at any statement leaves the old shape or the new."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from store_ground import Place, brought_to, current, new_task, ready, reserved
from store_invariants import invariant_faults

from ostler.failpoints import FaultPlan, InjectedCrash, Seams
from ostler.model.access import SYSTEM
from ostler.model.states import AgentState
from ostler.model.task import TaskState
from ostler.store import tasks
from ostler.store.connection import migrations
from ostler.store.postgres import PostgresConnection
from ostler.store.sqlite import SqliteConnection
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

Shape = dict[str, tuple[frozenset[str], frozenset[str]]]
NEWEST = migrations()[-1].number
#: The shape of the homes that kept no totals.
_BEFORE_TOTALS = 6


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place("sqlite", str(tmp_path / "home"))
    return Place("postgres", request.getfixturevalue("postgres_address"))


@contextlib.contextmanager
def connected(place: Place) -> Iterator[SqliteConnection | PostgresConnection]:
    made: SqliteConnection | PostgresConnection
    if place.kind == "sqlite":
        made = SqliteConnection(Path(place.where) / "ostler.db", create=True)
    else:
        made = PostgresConnection(place.where)
    try:
        yield made
    finally:
        made.close()


def sqlite_shape(path: Path) -> Shape:
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {one: frozenset(row[1] for row in file.execute(f"PRAGMA table_info({one})")) for one in tables}
        indexes = {one: [row[1] for row in file.execute(f"PRAGMA index_list({one})")] for one in tables}
    return {table: (columns[table], named(indexes[table])) for table in tables}


def postgres_shape(address: str) -> Shape:
    with psycopg.connect(address) as server:
        columns = server.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
        ).fetchall()
        indexes = server.execute("SELECT tablename, indexname FROM pg_indexes WHERE schemaname = 'public'").fetchall()
    tables = {table for table, _ in columns} - {"ostler_schema"}  # what SQLite keeps in the head of its file
    return {
        table: (
            frozenset(name for owner, name in columns if owner == table),
            named([name for owner, name in indexes if owner == table]),
        )
        for table in tables
    }


def named(indexes: list[str]) -> frozenset[str]:
    """Without those that a database makes by itself for a key."""
    return frozenset(name for name in indexes if name.startswith("idx_"))


def shape(place: Place) -> Shape:
    """The columns and the named indexes of each table, read without Ostler."""
    return sqlite_shape(Path(place.where) / "ostler.db") if place.kind == "sqlite" else postgres_shape(place.where)


def version(place: Place) -> int:
    with connected(place) as connection:
        return connection.stored_version()


async def test_a_database_goes_up_down_and_up_again(place: Place) -> None:
    clock = ManualClock()
    async with place.store(Seams(clock=clock)) as store:
        await brought_to(store, AgentState.TERMINATED)
    whole = shape(place)
    assert version(place) == NEWEST
    with connected(place) as connection:
        connection.migrate_down(0)
        connection.migrate_down(0)
    assert (shape(place), version(place)) == ({}, 0)
    async with place.store(Seams(clock=clock)) as store:
        await ready(store)
        assert await invariant_faults(store, clock.wall()) == []
    assert shape(place) == whole


async def test_totals_of_an_older_home_are_counted_from_its_rows(place: Place) -> None:
    clock = ManualClock()
    async with place.store(Seams(clock=clock)) as store:
        for state in (AgentState.TERMINATED, AgentState.FAILED, AgentState.READY):
            await brought_to(store, state)
            clock.advance(1.5)
        for completes in (False, True):
            task = await store.run(tasks.add_task, new_task(clock), by=SYSTEM)
            if completes:
                changes = {"started_at": clock.wall(), "attempt": 1}
                task = await store.run(tasks.change_task, task, changes, to=TaskState.RUNNING)
                clock.advance(2)
                task = await store.run(tasks.change_task, task, to=TaskState.COMPLETED)
            await store.run(tasks.change_task, task, {"cost_usd": 0.125}, to=TaskState.REJECTED)
    with connected(place) as connection:
        connection.migrate_down(_BEFORE_TOTALS)
    async with place.store(Seams(clock=clock)) as store:
        assert await invariant_faults(store, clock.wall()) == []


async def test_every_step_down_leaves_the_shape_of_the_step_below(place: Place) -> None:
    shapes: dict[int, Shape] = {0: {}}
    with connected(place) as connection:
        for number in range(1, NEWEST + 1):
            plan = FaultPlan(name="store.migrate.after", nth=1)
            with contextlib.suppress(InjectedCrash):  # one step at a time
                connection.migrate(plan)
            shapes[number] = shape(place)
            assert connection.version == number
        for number in range(NEWEST - 1, -1, -1):
            connection.migrate_down(number)
            assert (connection.version, shape(place)) == (number, shapes[number])


async def test_opening_a_current_database_changes_nothing(place: Place) -> None:
    async with place.store() as store:
        one = await ready(store)
    before, plan = shape(place), FaultPlan()
    async with place.store(Seams(fault=plan)) as store:
        assert await current(store, one) == one
    assert shape(place) == before
    assert not [point for point in plan.seen if point.startswith("store.migrate")]


async def test_a_migration_that_dies_at_any_statement_leaves_the_old_shape(place: Place) -> None:
    with connected(place) as connection:
        statements = [len(list(migration.statements(connection))) for migration in migrations()]
    for number, many in enumerate(statements, 1):
        old = shape(place)
        for nth in range(1, many + 1):
            with connected(place) as connection, pytest.raises(InjectedCrash):
                connection.migrate(FaultPlan(name="store.migrate.statement", nth=nth))
            assert version(place) == number - 1, nth
            if nth in {1, many // 2, many}:
                assert shape(place) == old, nth
        with connected(place) as connection, contextlib.suppress(InjectedCrash):
            connection.migrate(FaultPlan(name="store.migrate.after"))
        assert version(place) == number
    async with place.store() as store:
        await ready(store)


@pytest.mark.parametrize(("point", "after"), [("store.migrate.before", 0), ("store.migrate.after", 1)])
async def test_a_migration_that_dies_around_its_transaction_leaves_the_old_shape_or_the_new(
    place: Place, point: str, after: int
) -> None:
    with pytest.raises(InjectedCrash):
        await place.store(Seams(fault=FaultPlan(name=point))).open()
    assert version(place) == after
    async with place.store() as store:
        await reserved(store)


# --- names -------------------------------------------------------------------------------------------

#: What other programs and people ask by. A migration may add to these, never take away.
COLUMNS: Mapping[str, str] = {
    "agent_instances": """
        id definition_id state health_state name name_key owner_id workspace_id task_id crew agent_id generation active
        spawn_options_json health_json metrics_json tags_json context_json enforcement_json final_state_json
        error_message restart_count lifetime_restarts attempt version created_at updated_at terminated_at
        failing_since""",
    "agent_instance_tags": "instance_id tag workspace_id active",
    "agent_instance_events": """
        sequence workspace_id instance_id task_id event_type event_data_json occurred_at correlation_id""",
    "attempts": "instance_id number intended_at handle_json started_at ended_at outcome exit_code detail",
    "requests": "instance_id id attempt state input_digest answer_json error begun_at ended_at",
    "waits": "id workspace_id kind instance_id task_id wake_key reason detail_json due_at ended_at outcome answer_json",
    "workspaces": "id name tier active audit_number audit_hash anchor_number anchor_hash created_at",
    "audit": """
        workspace_id number occurred_at actor action subject outcome detail correlation_id sequence previous_hash
        hash""",
}
INDEXES: Mapping[str, str] = {
    "agent_instances": """
        idx_agent_instances_all idx_agent_instances_state idx_agent_instances_owner idx_agent_instances_definition
        idx_agent_instances_health idx_agent_instances_name idx_agent_instances_active
        idx_agent_instances_active_owner idx_agent_instances_active_definition idx_agent_instances_active_health
        idx_agent_instances_active_name idx_agent_instances_ended""",
    "agent_instance_tags": "idx_instance_tags_tag idx_instance_tags_active",
    "agent_instance_events": """
        idx_instance_events_instance idx_instance_events_workspace idx_instance_events_correlation""",
}


async def test_the_names_in_the_database_are_the_promised_ones(place: Place) -> None:
    async with place.store():
        pass
    found = shape(place)
    for table, names in COLUMNS.items():
        assert set(names.split()) <= found[table][0], f"a column of {table} is gone"
    for table, names in INDEXES.items():
        assert set(names.split()) <= found[table][1], f"an index of {table} is gone"


async def test_both_databases_have_the_same_names(tmp_path: Path, make_database: Callable[[], str]) -> None:
    places = [Place("sqlite", str(tmp_path)), Place("postgres", make_database())]
    for place in places:
        async with place.store():
            pass
    assert shape(places[0]) == shape(places[1])


def test_every_migration_has_a_way_down() -> None:
    found: list[Any] = [migration for migration in migrations() if not migration.down.strip()]
    assert found == []
    assert [migration.number for migration in migrations()] == list(range(1, NEWEST + 1))
    assert os.linesep in migrations()[0].up
