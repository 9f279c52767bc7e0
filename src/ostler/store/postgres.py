"""PostgreSQL: the same rows in native types; writers queue at the locked head row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg
from psycopg.rows import dict_row, tuple_row

from ostler.errors import (
    OutcomeUnknownError,
    StoreBusyError,
    StoreError,
    StoreFailedError,
    StoreFullError,
    StoreTooNewError,
)
from ostler.seams import FaultPoint, no_fault
from ostler.store.life import Backend
from ostler.store.mapper import Dialect
from ostler.store.port import Head, OutOfStepError
from ostler.store.queries import migrations, percent_style, queries, statements
from ostler.store.sqlsession import HEADLESS, Row, SqlSession, Values

#: Taken while migrating, so that two programs that start at once do it once. The number is "OSTL".
_MIGRATION_LOCK = 0x4F53544C
_LOCK_TIMEOUT_MS = 10_000
#: Said at every transaction: what the server or the role has as its default must not decide.
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

#: Out of something, or on its way up or down.
_NOT_NOW = ("53", "57P")
#: The same, where it has no code: of one who is not let in, only words come through.
_TOO_SOON = (
    "too many clients",
    "too many connections",
    "connection slots are reserved",
    "the database system is ",  # starting up, shutting down, in recovery mode, not yet accepting connections
    "terminating connection",
)

_Connection = psycopg.Connection[dict[str, Any]]
R = TypeVar("R")

POSTGRES = Dialect(
    name="postgres",
    true="TRUE",
    uuid_out=lambda value: value,
    uuid_in=lambda value: value,
    id_out=lambda value: UUID(int=value),
    time_out=lambda value: value,
    time_in=lambda value: value.astimezone(UTC),
    flag_out=bool,
)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """The one place where the driver's errors become ours."""
    try:
        yield
    except (pg.DiskFull, pg.OutOfMemory) as error:
        raise StoreFullError(f"the database server is out of space: {error}".strip()) from error
    except (pg.LockNotAvailable, pg.DeadlockDetected, pg.QueryCanceled, pg.SerializationFailure) as error:
        raise StoreBusyError(f"another process holds the store: {error}".strip()) from error
    except (pg.IoError, pg.DataCorrupted, pg.IndexCorrupted) as error:
        raise StoreFailedError(f"the database server reported a broken disk: {error}".strip()) from error
    except psycopg.OperationalError as error:
        raise _unwilling(error) from error
    except psycopg.Error as error:
        raise StoreError(str(error).strip()) from error


def _unwilling(error: psycopg.OperationalError) -> StoreError:
    """A server that lets nobody in tells why in words only, which begin as its log does."""
    told = str(error).strip()
    if (error.sqlstate or "").startswith(_NOT_NOW) or ("FATAL:" in told and any(words in told for words in _TOO_SOON)):
        return StoreBusyError(
            f"the database server has too many clients, or is just starting or stopping: {told}; try again in a moment"
        )
    if "FATAL:" in told:
        return StoreError(
            f"the database server refused: {told}; check the user, the password and the database in the address"
        )
    if _cut_off(error):
        return StoreError(f"the database server did not answer: {told}; check the address, and whether the server runs")
    return StoreError(f"the database server could not do this: {told}")


def _cut_off(error: psycopg.OperationalError) -> bool:
    """No code: the line is dead. 57P: the server told us so before it cut it."""
    return error.sqlstate is None or error.sqlstate.startswith("57P")


class PostgresSession(SqlSession):
    dialect = POSTGRES

    def __init__(self, address: str, *, read_only: bool = False) -> None:
        self._address = address
        self._read_only = read_only
        self._inside = False
        #: The connection is not the one that the last transaction was on.
        self._renewed = False
        self._connection = self._connect()

    def _connect(self) -> _Connection:
        with mapped_errors():
            connection = psycopg.connect(
                self._address, autocommit=True, row_factory=dict_row, application_name="ostler"
            )
            try:
                for setting in (
                    "TIME ZONE 'UTC'",
                    "synchronous_commit = on",
                    f"lock_timeout = {_LOCK_TIMEOUT_MS}",
                    *(["default_transaction_read_only = on"] if self._read_only else []),
                ):
                    connection.execute(f"SET {setting}".encode())
            except BaseException:
                connection.close()
                raise
            return connection

    @property
    def connection(self) -> _Connection:
        """The connection, opened anew when the server has dropped it."""
        if self._connection.closed:
            self._connection = self._connect()
            self._renewed = True
        return self._connection

    def execute(self, sql: str, values: Row | Values) -> Sequence[Row]:
        with mapped_errors():
            return self._afresh(lambda connection: connection.execute(_fitted(sql), values).fetchall())

    def _afresh(self, run: Callable[[_Connection], R]) -> R:
        """Once more on a new connection, if the server had dropped the idle one: nothing was under way on it."""
        if self._inside:  # never on another connection: what was done on this one would be forgotten
            return run(self._connection)
        connection = self.connection
        try:
            return run(connection)
        except psycopg.OperationalError as error:
            if not _cut_off(error):
                raise
            connection.close()
            return run(self.connection)

    def select(self, sql: str, values: Row | Values) -> tuple[list[str], list[Values]]:
        def run(connection: _Connection) -> tuple[list[str], list[Values]]:
            with connection.cursor(row_factory=tuple_row) as cursor:
                cursor.execute(_fitted(sql), values)
                return [column.name for column in cursor.description or ()], cursor.fetchall()

        with mapped_errors():
            return self._afresh(run)

    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        if not rows:
            return 0
        with mapped_errors(), self._connection.cursor() as cursor:
            cursor.executemany(_fitted(sql), rows)
            return cursor.rowcount

    def begin(self) -> Head:
        with mapped_errors():
            self._afresh(lambda connection: connection.execute(_BEGIN))
            self._inside = True
            if self._renewed:
                self._renewed = False
                # Behind a new connection may stand another server: what a cache took from the old one does not count,
                # even if the commit numbers happen to agree.
                raise OutOfStepError("the connection to the database server was made anew")
            row = self._connection.execute(_fitted(queries()["head"] + " FOR UPDATE")).fetchone()
        if row is None:
            raise StoreFailedError(HEADLESS)
        return Head(**row)

    def commit(self) -> None:
        with mapped_errors():
            try:
                done = self._connection.execute("COMMIT").statusmessage
            except psycopg.OperationalError as error:
                if not _cut_off(error):
                    raise
                lost = f"the database server did not answer at the commit ({str(error).strip()})"
                raise OutcomeUnknownError(f"{lost}; {OutcomeUnknownError.sentence()}") from error
        if done != "COMMIT":  # a transaction in which something failed ends in this way, without an error
            raise StoreError(f"the database server answered the commit with {done}; nothing was written")
        self._inside = False

    def rollback(self) -> None:
        self._inside = False
        if (
            not self._connection.closed
            and self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        ):
            try:
                self._connection.execute("ROLLBACK")
            except psycopg.Error:
                # A connection that cannot even forget is of no further use; the next command opens another.
                self._connection.close()

    def close(self) -> None:
        self._connection.close()


@functools.cache
def _fitted(sql: str) -> bytes:
    return percent_style(sql).encode()


def backend(address: str) -> Backend:
    return Backend.migrating(
        lambda: PostgresSession(address), migrate, lambda: PostgresSession(address, read_only=True)
    )


def migrate(session: PostgresSession, fault: FaultPoint = no_fault) -> None:
    """Bring the database to the newest shape, one transaction per step."""
    connection = session.connection
    known = migrations("postgres")
    newest = known[-1][0]
    with mapped_errors():
        connection.execute("SELECT pg_advisory_lock(%s)", (_MIGRATION_LOCK,))
        try:
            connection.execute("CREATE TABLE IF NOT EXISTS ostler_schema (version BIGINT NOT NULL)")
            row = connection.execute("SELECT max(version) AS version FROM ostler_schema").fetchone()
            version = (row and row["version"]) or 0
            if version > newest:
                raise StoreTooNewError(
                    f"this store has shape {version}, this program knows up to {newest}: it was made by a newer "
                    "Ostler; upgrade the program, nothing was changed"
                )
            for number, script in known[version:]:
                _step(connection, number, script, fault)
        finally:
            if not connection.closed:
                connection.execute("SELECT pg_advisory_unlock(%s)", (_MIGRATION_LOCK,))


def _step(connection: psycopg.Connection[dict[str, Any]], number: int, script: str, fault: FaultPoint) -> None:
    fault("store.migrate.before")
    with connection.transaction():
        for statement in statements(script):
            connection.execute(statement.encode())
            fault("store.migrate.statement")
        connection.execute("INSERT INTO ostler_schema (version) VALUES (%s)", (number,))
    fault("store.migrate.after")
