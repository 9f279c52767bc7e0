"""PostgreSQL: the same tables; writers wait for each other at the locked head row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg

from ostler.errors import (
    InvalidOperationError,
    OutcomeUnknownError,
    StoreBusyError,
    StoreError,
    StoreFailedError,
    StoreFullError,
)
from ostler.failpoints import FaultPoint, no_fault
from ostler.store.connection import Connection, Head, Values, headless, migrations, require_known, run_migration

R = TypeVar("R")

#: Taken while migrating, so that of two programs that start at once one migrates. The number is "OSTL".
_MIGRATION_LOCK = 0x4F53544C
_LOCK_TIMEOUT_MS = 10_000
#: Said at every transaction, so that the default of the server or of the role does not decide.
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_HEAD = b"SELECT sequence, horizon, epoch FROM head FOR UPDATE"
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")
#: Codes of a server that is out of something, or starting or stopping.
_NOT_NOW = ("53", "57P")
#: The same in words: a server that refuses a connection sends no code.
_TOO_SOON = (
    "too many clients",
    "too many connections",
    "connection slots are reserved",
    "the database system is ",  # starting up, shutting down, in recovery mode, not yet accepting connections
    "terminating connection",
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
    except pg.UndefinedTable as error:
        raise StoreFailedError(f"a table of the store is gone ({error}); restore it from a backup") from error
    except psycopg.OperationalError as error:
        raise _refusal(error) from error
    except (psycopg.Error, UnicodeError) as error:  # the second for text that is no UTF-8
        raise StoreError(f"the database server could not do this: {error}".strip()) from error


def _refusal(error: psycopg.OperationalError) -> StoreError:
    text = str(error).strip()
    if (error.sqlstate or "").startswith(_NOT_NOW) or ("FATAL:" in text and any(words in text for words in _TOO_SOON)):
        return StoreBusyError(
            f"the database server has too many clients, or is just starting or stopping: {text}; try again in a moment"
        )
    if "FATAL:" in text:
        return StoreError(
            f"the database server refused: {text}; check the user, the password and the database in the address"
        )
    if _cut_off(error):
        return StoreError(f"the database server did not answer: {text}; check the address, and whether the server runs")
    return StoreError(f"the database server could not do this: {text}")


def _cut_off(error: psycopg.OperationalError) -> bool:
    """Without a code the line is dead; 57P is the server's notice that it closes it."""
    return error.sqlstate is None or error.sqlstate.startswith("57P")


@cache
def _percent_style(sql: str) -> bytes:
    """`:name` as psycopg wants it."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%")).encode()


class PostgresConnection(Connection):
    tokens: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"$ID": "UUID", "$SEQ": "BIGINT", "$TEXT": 'TEXT COLLATE "C"', "$NOROWID": ""}
    )

    def __init__(self, address: str, *, read_only: bool = False) -> None:
        self._address = address
        self._read_only = read_only
        self._inside = False
        self._db = self._connect()

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        with mapped_errors():
            db = psycopg.connect(self._address, autocommit=True, application_name="ostler", prepare_threshold=1)
            try:
                for setting in (
                    "TIME ZONE 'UTC'",
                    "synchronous_commit = on",
                    f"lock_timeout = {_LOCK_TIMEOUT_MS}",
                    *(["default_transaction_read_only = on"] if self._read_only else []),
                ):
                    db.execute(f"SET {setting}".encode())
            except BaseException:
                db.close()
                raise
            return db

    @staticmethod
    def id_out(value: UUID) -> UUID:
        return value

    def fetch(self, sql: str, values: Values) -> list[tuple[Any, ...]]:
        with mapped_errors():
            return self._retried(lambda db: db.execute(_percent_style(sql), values).fetchall())

    def execute(self, sql: str, values: Values) -> int:
        with mapped_errors():
            return self._retried(lambda db: db.execute(_percent_style(sql), values).rowcount)

    def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
        with mapped_errors(), self._db.cursor() as cursor:
            cursor.executemany(_percent_style(sql), rows)

    def _retried(self, run: Callable[[psycopg.Connection[tuple[Any, ...]]], R]) -> R:
        """Once more on a new connection if the server had closed an idle one; never inside a transaction."""
        if self._inside:
            return run(self._db)
        if self._db.closed:
            self._db = self._connect()
        try:
            return run(self._db)
        except psycopg.OperationalError as error:
            if not _cut_off(error):
                raise
            self._db.close()
            self._db = self._connect()
            return run(self._db)

    def begin(self) -> Head:
        with mapped_errors():
            self._retried(lambda db: db.execute(_BEGIN))
            self._inside = True
            row = self._db.execute(_HEAD).fetchone()
        if row is None:
            raise headless("PostgreSQL")
        return Head(*row)

    def commit(self) -> None:
        with mapped_errors():
            try:
                done = self._db.execute(b"COMMIT").statusmessage
            except psycopg.OperationalError as error:
                if not _cut_off(error):
                    raise
                lost = f"the database server did not answer at the commit ({str(error).strip()})"
                raise OutcomeUnknownError(f"{lost}; {OutcomeUnknownError.sentence()}") from error
        self._inside = False
        if done != "COMMIT":  # a transaction in which a statement failed ends so, without an error
            raise StoreError(f"the database server answered the commit with {done}; nothing was written")

    def rollback(self) -> None:
        self._inside = False
        if self._db.closed or self._db.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            return
        try:
            self._db.execute(b"ROLLBACK")
        except psycopg.Error:
            self._db.close()  # the next command opens another one

    @property
    def in_transaction(self) -> bool:
        return self._inside and not self._db.closed

    def close(self) -> None:
        self._db.close()

    # --- migrating -------------------------------------------------------------------------------

    def migrate(self, fault: FaultPoint = no_fault) -> None:
        """Bring the database to the newest shape, one transaction per step."""
        with self._migration_lock():
            version = self.version
            require_known(version)
            for migration in migrations():
                if migration.number > version:
                    self._step(migration.number, fault, "up")

    def migrate_down(self, to: int) -> None:
        """Take the database back to an older shape. What the newer shape holds is lost: make a copy first."""
        with self._migration_lock():
            version = self.version
            for migration in reversed(migrations()):
                if to < migration.number <= version:
                    self._step(migration.number, no_fault, "down")

    @contextmanager
    def _migration_lock(self) -> Iterator[None]:
        self.execute("SELECT pg_advisory_lock(:lock)", {"lock": _MIGRATION_LOCK})
        try:
            self.execute("CREATE TABLE IF NOT EXISTS ostler_schema (version BIGINT NOT NULL)", {})
            yield
        finally:
            with suppress(StoreError):
                self.execute("SELECT pg_advisory_unlock(:lock)", {"lock": _MIGRATION_LOCK})

    def stored_version(self) -> int:
        has_schema = self.fetch("SELECT to_regclass('ostler_schema') IS NOT NULL", {})[0][0]
        return self.version if has_schema else 0

    @property
    def version(self) -> int:
        return int(self.fetch("SELECT max(version) FROM ostler_schema", {})[0][0] or 0)

    def _step(self, number: int, fault: FaultPoint, direction: str) -> None:
        migration = next((candidate for candidate in migrations() if candidate.number == number), None)
        if migration is None:
            raise InvalidOperationError(f"there is no migration {number}")
        fault("store.migrate.before")
        with mapped_errors():
            self._db.execute(_BEGIN)
        self._inside = True
        try:
            run_migration(self, migration, fault, direction)
            change = (
                "INSERT INTO ostler_schema (version) VALUES (:number)"
                if direction == "up"
                else "DELETE FROM ostler_schema WHERE version = :number"
            )
            self.execute(change, {"number": number})
            self.commit()
        except BaseException:
            self.rollback()
            raise
        fault("store.migrate.after")
