"""SQLite: one file in WAL mode; every commit is synced."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import UUID

from ostler.errors import OutcomeUnknownError, StoreBusyError, StoreError, StoreFailedError, StoreFullError
from ostler.failpoints import FaultPoint, no_fault
from ostler.store.connection import Connection, Head, Values, headless, migrations, require_known, run_migration

#: "OSTL": tells our file from another program's.
APPLICATION_ID = 0x4F53544C
#: SQLite opens no file whose path has more bytes.
LONGEST_PATH = 504
_BUSY_MS = 10_000
_WAL_LIMIT_BYTES = 64 * 1024 * 1024
_CACHE_KIB = 16 * 1024
#: There are several readers, and the system keeps the file's pages for all of them.
_READER_CACHE_KIB = 2 * 1024
#: 16 MB: pages that are written again and again reach the main file once.
_CHECKPOINT_PAGES = 4096
#: The driver's own, and those that it raises for a value that SQLite cannot hold.
_ERRORS = (sqlite3.Error, OverflowError, UnicodeError)
_HEAD = "SELECT sequence, horizon, epoch FROM head"


class SqliteConnection(Connection):
    tokens: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"$ID": "BLOB", "$SEQ": "INTEGER", "$TEXT": "TEXT", "$NOROWID": "WITHOUT ROWID"}
    )

    def __init__(self, path: Path | None, *, create: bool = False, read_only: bool = False) -> None:
        """`path` None is a database in memory, which lives as long as the connection."""
        self._path = path
        self.where = "memory" if path is None else str(path)
        if path is not None and create:
            _make_private(path)
        with self._mapped():
            self._db = sqlite3.connect(
                ":memory:" if path is None else f"{path.absolute().as_uri()}?mode=rw",
                uri=path is not None,
                isolation_level=None,
                timeout=_BUSY_MS / 1000,
                check_same_thread=False,  # the store decides which thread uses it
                cached_statements=256,
            )
            try:
                for pragma in (
                    "synchronous = FULL",
                    "foreign_keys = ON",
                    f"journal_size_limit = {_WAL_LIMIT_BYTES}",
                    f"cache_size = -{_READER_CACHE_KIB if read_only else _CACHE_KIB}",
                    f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
                    "temp_store = MEMORY",
                    f"query_only = {int(read_only)}",
                ):
                    self._db.execute(f"PRAGMA {pragma}")
            except BaseException:
                self._db.close()
                raise
        #: Which file it is, so that a removed or replaced one is noticed.
        self._file = None if path is None else _identity(path)

    @staticmethod
    def id_out(value: UUID) -> bytes:
        return value.bytes

    # These three are called for every command, so they do without the context manager.

    def fetch(self, sql: str, values: Values) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except _ERRORS as error:
            raise store_error(error, Path(self.where)) from error

    def execute(self, sql: str, values: Values) -> int:
        try:
            return self._db.execute(sql, values).rowcount
        except _ERRORS as error:
            raise store_error(error, Path(self.where)) from error

    def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
        try:
            self._db.executemany(sql, rows)
        except _ERRORS as error:
            raise store_error(error, Path(self.where)) from error

    def begin(self) -> Head:
        self._require_file()
        with self._mapped():
            self._db.execute("BEGIN IMMEDIATE")
            row = self._db.execute(_HEAD).fetchone()
        if row is None:
            raise headless(self.where)
        return Head(*row)

    def commit(self) -> None:
        try:
            with self._mapped():
                self._db.execute("COMMIT")
        except StoreFailedError as error:
            # What was handed to the disk before its sync failed may be there after a restart, or not.
            raise OutcomeUnknownError(f"{OutcomeUnknownError.sentence()} ({error})") from error

    def rollback(self) -> None:
        # A full disk rolls back by itself, and a second rollback is an error.
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def close(self) -> None:
        with self._mapped():
            self._db.close()

    def filter_clause(self, clause: str, *, first: bool) -> str:
        return clause if first else f"+{clause}"

    def _require_file(self) -> None:
        """SQLite goes on writing into a file that was removed; what is acknowledged then is lost."""
        if self._path is not None and _identity(self._path) != self._file:
            raise StoreFailedError(
                f"{self._path} was removed, emptied or replaced under this program; nothing more is written. "
                "Restore it from a backup, or choose another home"
            )

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise store_error(error, Path(self.where)) from error

    # --- migrating -------------------------------------------------------------------------------

    def migrate(self, fault: FaultPoint = no_fault) -> None:
        """Bring the file to the newest shape. Each step is one transaction: a kill leaves the old shape or the new."""
        self._require_ours()
        if self._path is not None and (mode := self._switch_to_wal()) != "wal":
            raise StoreError(
                f"{self._path.parent} is on a file system without shared memory (journal mode {mode}); "
                "choose a local directory"
            )
        for migration in migrations():
            if migration.number > self.version:
                self._step(migration.number - 1, fault, migration.number, "up")
        self._file = None if self._path is None else _identity(self._path)

    def migrate_down(self, to: int) -> None:
        """Take the file back to an older shape. What the newer shape holds is lost: make a copy first."""
        for migration in reversed(migrations()):
            if to < migration.number <= self.version:
                self._step(migration.number, no_fault, migration.number - 1, "down")

    @property
    def version(self) -> int:
        with self._mapped():
            return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def stored_version(self) -> int:
        self._require_ours()
        return self.version

    def _step(self, before: int, fault: FaultPoint, after: int, direction: str) -> None:
        number = max(before, after)
        fault("store.migrate.before")
        with self._mapped():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            if self.version == before:  # else another process was faster
                migration = next(candidate for candidate in migrations() if candidate.number == number)
                run_migration(self, migration, fault, direction)
                self.execute(f"PRAGMA application_id = {APPLICATION_ID}", {})
                self.execute(f"PRAGMA user_version = {after}", {})
            self.commit()
        except BaseException:
            self.rollback()
            raise
        fault("store.migrate.after")

    def _require_ours(self) -> None:
        with self._mapped():
            # In this order: a process that migrates between the two queries makes both true at once.
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
        if application not in {0, APPLICATION_ID} or (application == 0 and tables):
            raise StoreError(f"{self.where} is a database of another program; choose another home")
        require_known(self.version)

    def _switch_to_wal(self) -> str:
        """Several programs may open a fresh home at once, and SQLite does not wait for this switch by itself."""
        end = time.monotonic() + _BUSY_MS / 1000
        while True:
            try:
                with self._mapped():
                    return str(self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except StoreBusyError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)


def _identity(path: Path) -> tuple[int, int, bool] | None:
    """The file itself, and whether anything is in it. It is never opened: closing it would drop SQLite's locks."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size > 0


def _make_private(path: Path) -> None:
    """Only the owner may read the record."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                os.mknod(path, stat.S_IFREG | 0o600)
        usable = path.is_file()
    except OSError as error:
        if len(os.fsencode(path.absolute())) > LONGEST_PATH:
            raise StoreError(_too_long(path)) from error
        raise StoreError(
            f"a home cannot be made at {path.parent} ({error.strerror}); choose another directory, or check who owns it"
        ) from error
    if not usable:
        raise StoreError(_not_a_file(path))


# --- SQLite's errors in our words --------------------------------------------------------------------

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: Parts of the shape that every migrated file has.
_SHAPE_GONE = ("no such table", "no such column")


def store_error(error: Exception, path: Path) -> StoreError:
    """The one place where the driver's errors become ours."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        # The memory that readers share is a file too; it grows only where there is room for it.
        return StoreFullError(f"{StoreFullError.sentence()} ({error})")
    if primary in _BUSY:
        return StoreBusyError(f"{StoreBusyError.sentence()} ({error})")
    if primary == sqlite3.SQLITE_IOERR:
        return StoreFailedError(f"{StoreFailedError.sentence()} ({error})")
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreFailedError(
            f"{path} is not a database, or is damaged ({error}); restore it from a backup, or choose another home"
        )
    if primary == sqlite3.SQLITE_CORRUPT or any(words in str(error) for words in _SHAPE_GONE):
        return StoreFailedError(f"{path} is damaged ({error}); restore it from a backup, or choose another home")
    if primary in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}:
        return StoreFailedError(_cannot_open(error, path))
    return StoreError(f"{StoreError.sentence()} ({error})")


def _not_a_file(path: Path) -> str:
    what = "a directory" if path.is_dir() else "no regular file"
    return f"{path} is {what}, and should be the database of a home; move it away, or choose another home"


def _too_long(path: Path) -> str:
    size = len(os.fsencode(path.absolute()))
    return f"the path of {path} has {size} bytes, SQLite allows {LONGEST_PATH}; choose a home with a shorter path"


def _cannot_open(error: Exception, path: Path) -> str:
    """Why a file cannot be opened or written, as far as looking tells."""
    if len(os.fsencode(path.absolute())) > LONGEST_PATH:
        return _too_long(path)
    try:
        path.stat()
    except OSError as reason:
        return f"{path} cannot be opened ({reason.strerror}); check who owns {path.parent}, or choose another home"
    if not path.is_file():
        return _not_a_file(path)
    for place, access, verb in (
        (path, os.R_OK, "read"),
        (path, os.W_OK, "written"),
        (path.parent, os.W_OK, "written"),
    ):
        if not os.access(place, access):
            return (
                f"{place} may not be {verb} by this user, it belongs to {_owner_of(place)} or is on a read-only disk; "
                "choose another home, or ask for the right"
            )
    return f"{path} cannot be opened ({error}); check who owns it and its -wal and -shm, and how many files are open"


def _owner_of(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return "another user"
