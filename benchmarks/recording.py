"""Records the statements of real commits, so that a bare connection can repeat exactly the same work."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import psycopg

from ostler.store.life import Backend
from ostler.store.port import Head
from ostler.store.postgres import PostgresSession
from ostler.store.postgres import migrate as migrate_postgres
from ostler.store.queries import percent_style, queries
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlite import migrate as migrate_sqlite
from ostler.store.sqlsession import SqlSession, Values

Statement = tuple[str, Sequence[Values]]
Commits = list[list[Statement]]


class _Recording(SqlSession):
    commits: Commits

    def begin(self) -> Head:
        self.commits.append([])
        return super().begin()  # type: ignore[safe-super]  # the real session stands behind it in the order of classes

    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        if self.commits and rows:
            self.commits[-1].append((sql, rows))
        return super().execute_many(sql, rows)  # type: ignore[safe-super]  # the real session stands behind it in the order of classes


class _RecordingSqlite(_Recording, SqliteSession): ...


class _RecordingPostgres(_Recording, PostgresSession): ...


def recording_sqlite(path: Path, commits: Commits) -> Backend:
    def open_writer() -> _RecordingSqlite:
        session = _RecordingSqlite(path, create=True)
        session.commits = commits
        return session

    return Backend.migrating(open_writer, migrate_sqlite, lambda: SqliteSession(path, read_only=True))


def recording_postgres(address: str, commits: Commits) -> Backend:
    def open_writer() -> _RecordingPostgres:
        session = _RecordingPostgres(address)
        session.commits = commits
        return session

    return Backend.migrating(open_writer, migrate_postgres, lambda: PostgresSession(address, read_only=True))


class Bare(Protocol):
    """The floor: a driver that repeats recorded commits one after the other."""

    def rate(self, commits: Commits) -> float:
        """Commits per second."""
        ...

    def close(self) -> None: ...


class BareSqlite:
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        ours = SqliteSession(path)
        for pragma in ("synchronous", "foreign_keys", "cache_size", "wal_autocheckpoint"):
            value = ours.connection.execute(f"PRAGMA {pragma}").fetchone()[0]
            self._connection.execute(f"PRAGMA {pragma} = {value}")
        ours.close()

    def rate(self, commits: Commits) -> float:
        connection, head = self._connection, queries()["head"]
        begin = time.perf_counter()
        for statements in commits:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(head).fetchone()
            for sql, rows in statements:
                for row in rows:
                    connection.execute(sql, row)
            connection.execute("COMMIT")
        return len(commits) / (time.perf_counter() - begin)

    def close(self) -> None:
        self._connection.close()


class BarePostgres:
    def __init__(self, address: str) -> None:
        self._connection = psycopg.connect(address, autocommit=True)

    def rate(self, commits: Commits) -> float:
        head: Any = percent_style(queries()["head"] + " FOR UPDATE").encode()
        fitted = {sql: percent_style(sql).encode() for statements in commits for sql, _ in statements}
        begin = time.perf_counter()
        for statements in commits:
            self._connection.execute("BEGIN")
            self._connection.execute(head).fetchone()
            for sql, rows in statements:
                for row in rows:
                    self._connection.execute(fitted[sql], row)
            self._connection.execute("COMMIT")
        return len(commits) / (time.perf_counter() - begin)

    def close(self) -> None:
        self._connection.close()
