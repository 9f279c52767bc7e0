"""How SQLite answers: every list comes straight off an index, without looking through more than it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from store_ground import HOME

from ostler.model.query import GetInstancesFilter
from ostler.model.states import AgentState, HealthState
from ostler.store import attempts, audit, events, leases, moves, queries, requests, waits, workspaces
from ostler.store.queries import list_instances
from ostler.store.sqlite import SqliteConnection
from ostler.store.store import Store
from ostler.store.transaction import Reader

SOME = UUID(int=7)
NOW = datetime(2026, 3, 1, tzinfo=UTC)
ALSO_ENDED: dict[str, Any] = {"include_terminated": True}

#: Filter to the index that leads.
FILTERS: dict[str, tuple[GetInstancesFilter, str]] = {
    "active ones": (GetInstancesFilter(), "idx_agent_instances_active"),
    "all": (GetInstancesFilter(**ALSO_ENDED), "idx_agent_instances_all"),
    "state": (GetInstancesFilter(state=AgentState.FAILED), "idx_agent_instances_state"),
    "active state": (GetInstancesFilter(state=AgentState.READY), "idx_agent_instances_state"),
    "health": (GetInstancesFilter(health_state=HealthState.UNHEALTHY), "idx_agent_instances_active_health"),
    "health of all": (GetInstancesFilter(health_state=HealthState.HEALTHY, **ALSO_ENDED), "idx_agent_instances_health"),
    "owner": (GetInstancesFilter(owner_id=SOME), "idx_agent_instances_active_owner"),
    "owner of all": (GetInstancesFilter(owner_id=SOME, **ALSO_ENDED), "idx_agent_instances_owner"),
    "definition": (GetInstancesFilter(definition_id=SOME), "idx_agent_instances_active_definition"),
    "definition of all": (GetInstancesFilter(definition_id=SOME, **ALSO_ENDED), "idx_agent_instances_definition"),
    "task": (GetInstancesFilter(task_id=SOME), "idx_agent_instances_task"),
    "crew": (GetInstancesFilter(crew="red", **ALSO_ENDED), "idx_agent_instances_crew"),
    "tag": (GetInstancesFilter(tag="t"), "idx_instance_tags_active"),
    "tag of all": (GetInstancesFilter(tag="t", **ALSO_ENDED), "idx_instance_tags_tag"),
    "next page": (GetInstancesFilter(before=SOME), "idx_agent_instances_active"),
    "next page of a tag": (GetInstancesFilter(before=SOME, tag="t"), "idx_instance_tags_active"),
    "owner before health": (
        GetInstancesFilter(owner_id=SOME, health_state=HealthState.HEALTHY),
        "idx_agent_instances_active_owner",
    ),
    "tag before owner": (GetInstancesFilter(owner_id=SOME, tag="t"), "idx_instance_tags_active"),
    "definition before state": (
        GetInstancesFilter(definition_id=SOME, state=AgentState.READY),
        "idx_agent_instances_active_definition",
    ),
}

Query = Callable[[Reader], object]
QUERIES: dict[str, Query] = {
    "one instance": lambda reader: moves.get_instance(reader, SOME),
    "instances by name": lambda reader: queries.find_instances(reader, "coder", HOME),
    "instances by a part of the id": lambda reader: queries.find_instances(reader, "abcdef", HOME),
    "statistics": lambda reader: queries.statistics(reader, HOME, NOW),
    "attempts": lambda reader: attempts.list_attempts(reader, SOME),
    "open attempts": attempts.open_attempts,
    "one request": lambda reader: requests.get_request(reader, SOME, "r"),
    "requests": lambda reader: requests.list_requests(reader, SOME),
    "open waits": lambda reader: waits.open_waits(reader, HOME),
    "open waits of an instance": lambda reader: waits.open_waits(reader, instance_id=SOME),
    "open waits after one": lambda reader: waits.open_waits(reader, HOME, after=SOME),
    "events": lambda reader: events.read_events(reader, 0),
    "events of a workspace": lambda reader: events.read_events(reader, 0, workspace_id=HOME),
    "events of an instance": lambda reader: events.read_events(reader, 0, instance_id=SOME),
    "last events": lambda reader: events.last_events(reader, 5, workspace_id=HOME),
    "last events of an instance": lambda reader: events.last_events(reader, 5, workspace_id=HOME, instance_id=SOME),
    "audit": lambda reader: audit.list_entries(reader, HOME),
    "last of the audit": lambda reader: audit.last_entries(reader, HOME, 5),
    "a token": lambda reader: workspaces.find_token(reader, "ab", NOW),
    "a definition": lambda reader: workspaces.find_definition(reader, HOME, "coder"),
    "definitions": lambda reader: workspaces.list_definitions(reader, HOME),
    "the lease": leases.get_lease,
}


class Explained(SqliteConnection):
    """Notes the plan of every query."""

    plans: list[list[str]]

    def fetch(self, sql: str, values: Any) -> list[tuple[Any, ...]]:
        self.plans.append([row[3] for row in super().fetch(f"EXPLAIN QUERY PLAN {sql}", values)])
        return super().fetch(sql, values)


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explained]:
    home = tmp_path_factory.mktemp("plans")

    async def make() -> None:
        async with Store(home):
            pass

    asyncio.run(make())
    opened = Explained(Path(home) / "ostler.db", read_only=True)
    yield opened
    opened.close()


def plans(connection: Explained, query: Query) -> list[list[str]]:
    connection.plans = []
    query(Reader(connection))
    return connection.plans


@pytest.mark.parametrize("case", FILTERS)
def test_a_filter_is_answered_off_an_index_without_sorting(connection: Explained, case: str) -> None:
    wanted, index = FILTERS[case]
    ((first, *others),) = plans(connection, lambda reader: list_instances(reader, wanted, HOME))
    assert f"INDEX {index} (" in first
    assert not [step for step in others if "USING INDEX" not in step], others


def test_a_name_that_begins_with_a_word_is_looked_for_among_those_that_do(connection: Explained) -> None:
    wanted = GetInstancesFilter(name_pattern="a*")
    ((first, *others),) = plans(connection, lambda reader: list_instances(reader, wanted, HOME))
    assert "idx_agent_instances_active_name (workspace_id=? AND name_key>? AND name_key<?)" in first
    assert others == ["USE TEMP B-TREE FOR ORDER BY"], "what begins so is put into order"
    anywhere = GetInstancesFilter(name_pattern="*a")
    ((only,),) = plans(connection, lambda reader: list_instances(reader, anywhere, HOME))
    assert "idx_agent_instances_active" in only
    assert "name_key>" not in only, "a pattern that begins with * is held against every name"


@pytest.mark.parametrize("case", QUERIES)
def test_no_question_looks_through_a_whole_table(connection: Explained, case: str) -> None:
    small = ("SCAN head", "SCAN leases", "SCAN CONSTANT ROW", "SCAN (subquery", "SCAN i", "USE TEMP B-TREE")
    for plan in plans(connection, QUERIES[case]):
        scanned = [step for step in plan if step.startswith("SCAN") and "USING" not in step]
        assert not [step for step in scanned if not step.startswith(small)], plan


def test_statistics_are_one_statement(connection: Explained) -> None:
    """Two would tell of two moments."""
    assert len(plans(connection, lambda reader: queries.statistics(reader, HOME, NOW))) == 1
