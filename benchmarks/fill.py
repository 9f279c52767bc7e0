"""Fills a store with a great many rows, past the store's rules: only the reading of them is measured."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from uuid import UUID

import psycopg

from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentHealthStatus,
    AgentInstance,
    AgentState,
    AgentStateChangedEvent,
    HealthState,
)
from ostler.seams import uuid7
from ostler.store.eventrows import EventRow, body
from ostler.store.kinds import Kind, Ledger
from ostler.store.mapper import Mapper
from ostler.store.postgres import PostgresSession
from ostler.store.shapes import SHAPES
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlsession import SqlSession

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
#: What the filters look for: so many instances at every size.
NEEDLES = 100
OWNER, CROWD_OWNER = UUID(int=7), UUID(int=8)
DEFINITION, CROWD_DEFINITION = UUID(int=9), UUID(int=10)
_CHUNK = 10_000


def instances(count: int) -> Iterator[AgentInstance]:
    """Needles spread evenly in a crowd that has ended long ago."""
    every = count // NEEDLES
    for number in range(count):
        needle = number % every == 0
        at = BEGIN + timedelta(seconds=number)
        yield AgentInstance(
            instance_id=uuid7(number + 1, 0, number),
            definition_id=DEFINITION if needle else CROWD_DEFINITION,
            state=AgentState.PROCESSING if needle else AgentState.TERMINATED,
            health=AgentHealthStatus(state=HealthState.UNHEALTHY if needle else HealthState.HEALTHY),
            created_at=at,
            updated_at=at,
            terminated_at=None if needle else at + timedelta(minutes=5),
            tags=("needle",) if needle else ("crowd",),
            name=f"needle-{number}" if needle else f"crowd-{number}",
            owner_id=OWNER if needle else CROWD_OWNER,
            workspace_id=HOME_WORKSPACE_ID,
        )


def events(count: int) -> Iterator[EventRow]:
    """A long log of a thousand instances that go back and forth."""
    record = next(instances(NEEDLES))
    said = {"previous_state": AgentState.PROCESSING, "new_state": AgentState.WAITING, "reason": None}
    text = body(AgentStateChangedEvent, record, said)
    kind = AgentStateChangedEvent.event_type
    for number in range(1, count + 1):
        instance_id = uuid7(number % 1000, 0, 0)
        yield EventRow(
            number, uuid7(number, 0, number).int, HOME_WORKSPACE_ID, instance_id, None, kind, text, BEGIN, None
        )


class Filler:
    """Writes rows as fast as the database takes them."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session

    def fill_instances(self, count: int) -> None:
        mapper = Mapper(self._session.dialect, SHAPES[Kind.INSTANCE])
        ledger = Ledger(workspace_id=HOME_WORKSPACE_ID)
        source = instances(count)
        uuid_out, flag_out = self._session.dialect.uuid_out, self._session.dialect.flag_out
        space = uuid_out(HOME_WORKSPACE_ID)
        while chunk := list(islice(source, _CHUNK)):
            for one in chunk:
                ledger.account(None, one)
            self._copy("agent_instances", mapper.columns, [mapper.row(one) for one in chunk])
            tags = [(uuid_out(one.instance_id), one.tags[0], space, flag_out(one.is_active)) for one in chunk]
            self._copy("agent_instance_tags", ("instance_id", "tag", "workspace_id", "active"), tags)
        totals = Mapper(self._session.dialect, SHAPES[Kind.LEDGER])
        self._copy("workspace_ledgers", totals.columns, [totals.row(ledger)])

    def fill_events(self, count: int) -> None:
        dialect = self._session.dialect
        columns = (
            *("sequence", "id", "workspace_id", "instance_id", "event_type"),
            *("event_data_json", "occurred_at"),
        )
        source = events(count)
        while chunk := list(islice(source, _CHUNK)):
            rows = [
                (
                    row.sequence,
                    dialect.id_out(row.event_id),
                    row.workspace_id and dialect.uuid_out(row.workspace_id),
                    row.instance_id and dialect.uuid_out(row.instance_id),
                    row.event_type,
                    row.body,
                    dialect.time_out(row.occurred_at),
                )
                for row in chunk
            ]
            self._copy("agent_instance_events", columns, rows)
        self._session.execute_many("UPDATE store_head SET sequence = ?", [(count,)])

    def _copy(self, table: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        names = ", ".join(columns)
        if isinstance(self._session, PostgresSession):
            with self._session.connection.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
            return
        assert isinstance(self._session, SqliteSession)
        places = ", ".join("?" * len(columns))
        connection = self._session.connection
        connection.execute("BEGIN")
        connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({places})", rows)
        connection.execute("COMMIT")


def analyse(session: SqlSession) -> None:
    """What autovacuum does by itself after a while on PostgreSQL."""
    if isinstance(session, PostgresSession):
        session.connection.execute("ANALYZE")


def create_database(address: str, name: str) -> str:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return address.replace("/postgres?", f"/{name}?")


def drop_database(address: str, name: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
