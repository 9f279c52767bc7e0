"""A store to look at: nothing is created, brought up to date or written, and whoever owns it is not disturbed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ostler.errors import StoreError, StoreTooNewError
from ostler.store.engine import EngineStore
from ostler.store.life import Backend, Seams
from ostler.store.opening import DATABASE_FILE, backend_for, home_path
from ostler.store.queries import migrations
from ostler.store.sqlite import APPLICATION_ID, SqliteSession
from ostler.store.sqlitefaults import not_a_file, owner_of
from ostler.store.sqlsession import SqlSession


def view_store(where: str | Path, seams: Seams | None = None) -> EngineStore:
    """The store of an existing home or address, for reading only; opening it fails where there is none."""
    backend = backend_for(where)
    if "://" in str(where):
        open_session = _viewer(lambda: cast("SqlSession", backend.open_reader()), _require_database)
    else:
        path = home_path(where) / DATABASE_FILE
        open_session = _viewer(lambda: _home_session(path), lambda session: _require_ours(session, path))
    return EngineStore(Backend(open_writer=None, open_reader=open_session), seams)


def _viewer(connect: Callable[[], SqlSession], check: Callable[[SqlSession], None]) -> Callable[[], SqlSession]:
    def open_session() -> SqlSession:
        session = connect()
        try:
            check(session)
        except BaseException:
            session.close()
            raise
        return session

    return open_session


def _home_session(path: Path) -> SqlSession:
    _require_home(path)
    return SqliteSession(path, read_only=True, how=_how(path))


def _how(path: Path) -> str:
    """The mode in which looking leaves no trace.

    Where we may write, as every other opens it: who closes last clears away what SQLite puts beside the file. To be
    read only, SQLite wants to find these there, or to be told that nobody changes the file.
    """
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "rw"
    ahead, shared = (path.with_name(path.name + ending) for ending in ("-wal", "-shm"))
    if ahead.exists() and shared.exists():
        return "ro"
    if ahead.exists() and ahead.stat().st_size:
        raise StoreError(
            f"the home at {path.parent} was not closed, and its last changes can be read only where one may write; "
            f"look at it as {owner_of(path)}, or copy the whole directory to a place of your own and look there"
        )
    return "ro&immutable=1"


def _require_home(path: Path) -> None:
    """Before connecting, for SQLite says of many things only that it cannot.

    The file is not opened here: closing it again would drop the locks of a store that this process has open.
    """
    home = path.parent
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(
            f"there is no Ostler home at {home}; check the path, or make one with ostler.open_store"
        ) from None
    except OSError as error:
        raise StoreError(f"the home at {home} cannot be read ({error.strerror}); check who owns it") from error
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(not_a_file(path))
    if not os.access(path, os.R_OK):
        raise StoreError(f"the home at {home} cannot be read (Permission denied); it belongs to {owner_of(path)}")
    if not found.st_size:
        raise StoreError(f"{path} is empty, so it is not a database; restore it from a backup, or choose another home")


def _require_ours(session: SqlSession, path: Path) -> None:
    application = session.execute("PRAGMA application_id", {})[0]["application_id"]
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program; choose another home")
    _require_shape(int(session.execute("PRAGMA user_version", {})[0]["user_version"]), "sqlite")


def _require_database(session: SqlSession) -> None:
    if not session.execute("SELECT to_regclass('ostler_schema') IS NOT NULL AS here", {})[0]["here"]:
        raise StoreError("there is no Ostler store in this database; check the address, or make one with open_store")
    found = session.execute("SELECT max(version) AS version FROM ostler_schema", {})[0]["version"]
    _require_shape(int(found or 0), "postgres")


def _require_shape(version: int, dialect: str) -> None:
    newest = migrations(dialect)[-1][0]
    if version > newest:
        raise StoreTooNewError(
            f"this store has shape {version}, this program knows up to {newest}: it was made by a newer Ostler; "
            "upgrade the program, nothing was changed"
        )
    if version < newest:
        raise StoreError(
            f"this store has shape {version}, this program reads {newest}; open it once with ostler.open_store, "
            "which brings it up to date"
        )
