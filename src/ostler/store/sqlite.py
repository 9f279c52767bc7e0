"""SQLite: one file in WAL mode, every commit synced."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

from ostler.errors import StoreBusyError, StoreError, StoreFailedError, StoreTooNewError
from ostler.model import from_micros, micros
from ostler.seams import FaultPoint, no_fault
from ostler.store.mapper import Dialect
from ostler.store.port import Head
from ostler.store.queries import migrations, queries, statements
from ostler.store.sqlitefaults import not_a_file, store_error
from ostler.store.sqlsession import HEADLESS, Row, SqlSession, Values

#: "OSTL": tells our file from somebody else's.
APPLICATION_ID = 0x4F53544C
_BUSY_MS = 10_000
_WAL_LIMIT_BYTES = 64 * 1024 * 1024
_CACHE_KIB = 16 * 1024
#: There are several readers, and the system keeps the file's pages for all of them.
_READER_CACHE_KIB = 2 * 1024
#: 16 MB: pages that are written again and again reach the main file once.
_CHECKPOINT_PAGES = 4096
_HEAD = queries()["head"]

SQLITE = Dialect(
    name="sqlite",
    true="1",
    uuid_out=lambda value: value.int.to_bytes(16, "big"),  # what `bytes` does, without calling it
    uuid_in=lambda value: UUID(bytes=value),
    id_out=lambda value: value.to_bytes(16, "big"),
    time_out=micros,
    time_in=from_micros,
    flag_out=int,
)


@contextlib.contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error


class SqliteSession(SqlSession):
    dialect = SQLITE

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False, how: str = "rwc") -> None:
        """`how` is the mode of SQLite's address of the file, and what else stands there."""
        self.path = path
        if create:
            _make_private(path)
        with mapped_errors(path):
            # The pool decides which thread uses it; sqlite3 only has to bear closing from another one.
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={how}",
                uri=True,
                isolation_level=None,
                timeout=_BUSY_MS / 1000,
                check_same_thread=False,
                cached_statements=256,
            )
            try:
                self._settle(read_only=read_only)
            except BaseException:
                self._connection.close()
                raise

    def _settle(self, *, read_only: bool) -> None:
        self._connection.row_factory = sqlite3.Row
        for pragma in (
            "synchronous = FULL",
            "foreign_keys = ON",
            f"journal_size_limit = {_WAL_LIMIT_BYTES}",
            f"cache_size = -{_READER_CACHE_KIB if read_only else _CACHE_KIB}",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            "temp_store = MEMORY",
            f"query_only = {int(read_only)}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")

    @property
    def connection(self) -> sqlite3.Connection:
        return self._connection

    # Spelled out rather than wrapped in a context manager: these run for every command.

    def execute(self, sql: str, values: Row | Values) -> Sequence[Row]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise store_error(error, self.path) from error

    def select(self, sql: str, values: Row | Values) -> tuple[list[str], list[Values]]:
        try:
            cursor = self._connection.cursor()
            cursor.row_factory = None
            rows = cursor.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise store_error(error, self.path) from error
        return [column[0] for column in cursor.description], rows

    def execute_many(self, sql: str, rows: Sequence[Values]) -> int:
        if not rows:
            return 0
        try:
            if len(rows) == 1:
                return self._connection.execute(sql, rows[0]).rowcount
            return self._connection.executemany(sql, rows).rowcount
        except sqlite3.Error as error:
            raise store_error(error, self.path) from error

    def unindexed(self, clause: str) -> str:
        return f"+{clause}"

    def begin(self) -> Head:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            row = self._connection.execute(_HEAD).fetchone()
        except sqlite3.Error as error:
            raise store_error(error, self.path) from error

        if row is None:
            raise StoreFailedError(HEADLESS)
        return Head(*row)

    def commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise store_error(error, self.path) from error

    def rollback(self) -> None:
        # A full disk rolls back by itself, and a second rollback would be an error of its own.
        if self._connection.in_transaction:
            with mapped_errors(self.path):
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


def _make_private(path: Path) -> None:
    """Only the owner may read the record."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without opening it: closing any descriptor of the file would drop the locks that another store in this
        # process holds on it, and with them its hold on the write-ahead log.
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                os.mknod(path, stat.S_IFREG | 0o600)
        usable = path.is_file()
    except OSError as error:
        raise StoreError(
            f"a home cannot be made at {path.parent} ({error.strerror}); choose another directory, or check who owns it"
        ) from error
    if not usable:
        raise StoreError(not_a_file(path))


def migrate(session: SqliteSession, fault: FaultPoint = no_fault) -> None:
    """Bring the file to the newest shape. Each step is one transaction: a kill leaves the old shape or the new."""
    known = migrations("sqlite")
    newest = known[-1][0]
    _require_ours(session, _version(session), newest)  # before anything in the file is touched
    mode = _write_ahead(session)
    if mode != "wal":
        raise StoreError(f"{session.path.parent} is on a file system without shared memory; choose a local home")
    while (version := _version(session)) != newest:
        _require_ours(session, version, newest)
        _step(session, version, dict(known), fault)


def _write_ahead(session: SqliteSession) -> str:
    """Several may open a fresh home at once. This switch is the one thing SQLite does not wait for by itself."""
    end = time.monotonic() + _BUSY_MS / 1000
    while True:
        try:
            with mapped_errors(session.path):
                return str(session.connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except StoreBusyError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def _step(session: SqliteSession, version: int, known: dict[int, str], fault: FaultPoint) -> None:
    connection = session.connection
    with mapped_errors(session.path):
        fault("store.migrate.before")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(session) == version:  # else another process was faster
                for statement in statements(known[version + 1]):
                    connection.execute(statement)
                    fault("store.migrate.statement")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            session.rollback()
            raise
        fault("store.migrate.after")


def _version(session: SqliteSession) -> int:
    with mapped_errors(session.path):
        return int(session.connection.execute("PRAGMA user_version").fetchone()[0])


def _require_ours(session: SqliteSession, version: int, newest: int) -> None:
    connection = session.connection
    with mapped_errors(session.path):
        # In this order: a process that migrates between the two looks makes both true at once.
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application not in {0, APPLICATION_ID} or (application == 0 and tables):
        raise StoreError(f"{session.path} is a database of another program; choose another home")
    if version > newest:
        raise StoreTooNewError(
            f"this store has shape {version}, this program knows up to {newest}: it was made by a newer Ostler; "
            "upgrade the program, nothing was changed"
        )
