"""Records the statements of real commits, so that a bare connection can repeat exactly the same work."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from ostler.seams import FaultPoint
from ostler.store.engine import Backend
from ostler.store.port import Head
from ostler.store.postgres import PostgresSession
from ostler.store.postgres import migrate as migrate_postgres
from ostler.store.queries import percent_style, queries
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlite import migrate as migrate_sqlite
from ostler.store.sqlsession import Values

Statement = tuple[str, Sequence[Values]]


class _Recorder:
    def __init__(self) -> None:
        self.commits: list[list[Statement]] = []


class _RecordingSqlite(SqliteSession):
    recorder: _Recorder

    def begin(self) -> Head:
        self.recorder.commits.append([])
        return super().begin()

    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        if self.recorder.commits:
            self.recorder.commits[-1].append((sql, rows))
        return super().execute_many(sql, rows)


class _RecordingPostgres(PostgresSession):
    recorder: _Recorder

    def begin(self) -> Head:
        self.recorder.commits.append([])
        return super().begin()

    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        if self.recorder.commits:
            self.recorder.commits[-1].append((sql, rows))
        return super().execute_many(sql, rows)


def recording_sqlite(path: Path) -> tuple[Backend, list[list[Statement]]]:
    recorder = _Recorder()

    def open_writer(fault: FaultPoint) -> SqliteSession:
        session = _RecordingSqlite(path, create=True)
        session.recorder = recorder
        migrate_sqlite(session, fault)
        return session

    return Backend(open_writer=open_writer, open_reader=lambda: SqliteSession(path)), recorder.commits


def recording_postgres(address: str) -> tuple[Backend, list[list[Statement]]]:
    recorder = _Recorder()

    def open_writer(fault: FaultPoint) -> PostgresSession:
        session = _RecordingPostgres(address)
        session.recorder = recorder
        migrate_postgres(session, fault)
        return session

    return Backend(open_writer=open_writer, open_reader=lambda: PostgresSession(address)), recorder.commits


def bare_sqlite(path: Path, commits: list[list[Statement]]) -> float:
    """Commits per second of a bare sqlite3 connection at the same durability, one commit after the other."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")
    head = queries()["head"]
    begin = time.perf_counter()
    for statements in commits:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(head).fetchone()
        for sql, rows in statements:
            for row in rows:
                connection.execute(sql, row)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - begin
    connection.close()
    return len(commits) / seconds


def bare_postgres(address: str, commits: list[list[Statement]]) -> float:
    """The same for a bare psycopg connection."""
    head: Any = percent_style(queries()["head"] + " FOR UPDATE").encode()
    fitted = {sql: percent_style(sql).encode() for statements in commits for sql, _ in statements}
    with psycopg.connect(address, autocommit=True) as connection:
        begin = time.perf_counter()
        for statements in commits:
            connection.execute("BEGIN")
            connection.execute(head).fetchone()
            for sql, rows in statements:
                for row in rows:
                    connection.execute(fitted[sql], row)
            connection.execute("COMMIT")
        seconds = time.perf_counter() - begin
    return len(commits) / seconds
