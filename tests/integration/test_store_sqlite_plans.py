"""How SQLite answers the filters: straight off an index, or by looking through more than it gives."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.model import AgentState, GetInstancesFilter, HealthState, TaskFilter, TaskState
from ostler.store import open_store
from ostler.store.filters import Found, instance_query, task_query

pytestmark = pytest.mark.anyio

SOMEBODY = UUID(int=7)
ALSO_ENDED: dict[str, Any] = {"include_terminated": True}

#: Filter to the index that leads.
QUICK: dict[str, tuple[GetInstancesFilter | TaskFilter, str]] = {
    "all that live": (GetInstancesFilter(), "idx_agent_instances_active"),
    "all": (GetInstancesFilter(**ALSO_ENDED), "idx_agent_instances_all"),
    "state": (GetInstancesFilter(state=AgentState.FAILED), "idx_agent_instances_state"),
    "health": (GetInstancesFilter(health_state=HealthState.UNHEALTHY), "idx_agent_instances_active_health"),
    "owner": (GetInstancesFilter(owner_id=SOMEBODY), "idx_agent_instances_active_owner"),
    "owner of all": (GetInstancesFilter(owner_id=SOMEBODY, **ALSO_ENDED), "idx_agent_instances_owner"),
    "definition": (GetInstancesFilter(definition_id=SOMEBODY), "idx_agent_instances_active_definition"),
    "tag": (GetInstancesFilter(tag="t"), "idx_instance_tags_active"),
    "tag of all": (GetInstancesFilter(tag="t", **ALSO_ENDED), "idx_instance_tags_tag"),
    "next page": (GetInstancesFilter(before=SOMEBODY), "idx_agent_instances_active"),
    "owner before health": (
        GetInstancesFilter(owner_id=SOMEBODY, health_state=HealthState.HEALTHY),
        "idx_agent_instances_active_owner",
    ),
    "tag before owner": (GetInstancesFilter(owner_id=SOMEBODY, tag="t"), "idx_instance_tags_active"),
    "tasks": (TaskFilter(), "idx_tasks_all"),
    "state of tasks": (TaskFilter(state=TaskState.QUEUED), "idx_tasks_state"),
    "definition of tasks": (TaskFilter(definition_id=SOMEBODY), "idx_tasks_definition"),
    "tag of tasks": (TaskFilter(tag="t"), "idx_task_tags_tag"),
}


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[sqlite3.Connection]:
    async with open_store(tmp_path):
        pass
    made = sqlite3.connect(tmp_path / "ostler.db")
    yield made
    made.close()


def steps(connection: sqlite3.Connection, wanted: GetInstancesFilter | TaskFilter) -> list[str]:
    def unindexed(clause: str) -> str:
        return f"+{clause}"

    found: Found = (
        task_query(wanted, unindexed) if isinstance(wanted, TaskFilter) else instance_query(wanted, unindexed, "1")
    )
    values = dict.fromkeys([*found.values, "workspace_id"], 1)
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {found.sql}", values)]


@pytest.mark.parametrize("case", QUICK)
async def test_a_filter_by_one_thing_is_answered_off_an_index_without_sorting(
    connection: sqlite3.Connection, case: str
) -> None:
    wanted, index = QUICK[case]
    first, *others = steps(connection, wanted)
    assert f"INDEX {index} (" in first
    assert not [step for step in others if "USING INDEX" not in step], others


async def test_a_name_that_begins_with_a_word_is_looked_for_among_those_that_do(connection: sqlite3.Connection) -> None:
    first, *others = steps(connection, GetInstancesFilter(name_pattern="a*"))
    assert "idx_agent_instances_active_name (workspace_id=? AND name_key>? AND name_key<?)" in first
    assert others == ["USE TEMP B-TREE FOR ORDER BY"], "what begins so is put into order"
    anywhere = steps(connection, GetInstancesFilter(name_pattern="*a"))
    assert len(anywhere) == 1
    assert "idx_agent_instances_active" in anywhere[0]
    assert "name_key>" not in anywhere[0], "a pattern that begins with * is held against every name"
