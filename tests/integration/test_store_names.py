"""The names in the database, which other programs and people ask by. A migration may add to them, never take away."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from ostler.store import open_store

pytestmark = pytest.mark.anyio

Names = Mapping[str, frozenset[str]]

COLUMNS: Mapping[str, str] = {
    "agent_instances": """
        id definition_id state health_state name name_key owner_id workspace_id active spawn_options_json health_json
        metrics_json tags_json context_json enforcement_json final_state_json error_message restart_count
        lifetime_restarts attempt version created_at updated_at terminated_at failing_since""",
    "agent_instance_tags": "instance_id tag workspace_id active",
    "agent_instance_events": """
        sequence id workspace_id instance_id task_id event_type event_data_json occurred_at correlation_id""",
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


async def in_sqlite(home: Path) -> tuple[Names, Names]:
    """The columns and the named indexes of each table."""
    async with open_store(home):
        pass
    with closing(sqlite3.connect(home / "ostler.db")) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {one: frozenset(row[1] for row in file.execute(f"PRAGMA table_info({one})")) for one in tables}
        indexes = {one: [row[1] for row in file.execute(f"PRAGMA index_list({one})")] for one in tables}
    return columns, {table: frozenset(_named(found)) for table, found in indexes.items()}


async def in_postgres(address: str) -> tuple[Names, Names]:
    async with open_store(address):
        pass
    with psycopg.connect(address) as server:
        columns = server.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
        ).fetchall()
        indexes = server.execute("SELECT tablename, indexname FROM pg_indexes WHERE schemaname = 'public'").fetchall()
    tables = {table for table, _ in columns} - {"ostler_schema"}  # what SQLite keeps in the head of its file
    return (
        {table: frozenset(name for owner, name in columns if owner == table) for table in tables},
        {table: frozenset(_named([name for owner, name in indexes if owner == table])) for table in tables},
    )


def _named(indexes: list[str]) -> list[str]:
    """Without those that a database makes by itself for a key."""
    return [name for name in indexes if name.startswith("idx_")]


def require_names(columns: Names, indexes: Names) -> None:
    for table, names in COLUMNS.items():
        assert set(names.split()) <= columns[table], f"a column of {table} is gone"
        assert set(INDEXES[table].split()) <= indexes[table], f"an index of {table} is gone"


async def test_the_names_in_a_file_are_the_promised_ones(tmp_path: Path) -> None:
    require_names(*await in_sqlite(tmp_path))


async def test_the_names_on_a_server_are_the_promised_ones_and_those_of_the_file(
    tmp_path: Path, postgres_address: str
) -> None:
    found = await in_postgres(postgres_address)
    require_names(*found)
    assert found == await in_sqlite(tmp_path)
