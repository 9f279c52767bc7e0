"""A store to look at: nothing is created, brought up to date or written, and whoever owns it is not disturbed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ostler.errors import StoreError, StoreFailedError, StoreTooNewError
from ostler.store.engine import EngineStore
from ostler.store.life import Backend, Seams
from ostler.store.opening import DATABASE_FILE, backend_for
from ostler.store.queries import migrations
from ostler.store.sqlite import APPLICATION_ID
from ostler.store.sqlsession import SqlSession

_NO_DATABASE = "{path} is not a database; choose another home, or restore it from a backup"


def view_store(where: str | Path, seams: Seams | None = None) -> EngineStore:
    """The store of an existing home or address, for reading only; opening it fails where there is none."""
    backend = backend_for(where)
    if "://" in str(where):
        open_session = _viewer(backend, _require_database)
    else:
        path = Path(where).expanduser() / DATABASE_FILE
        open_session = _viewer(backend, lambda session: _require_ours(session, path), lambda: _require_home(path))
    return EngineStore(Backend(open_writer=None, open_reader=open_session), seams)


def _viewer(
    backend: Backend, check: Callable[[SqlSession], None], before: Callable[[], None] = lambda: None
) -> Callable[[], SqlSession]:
    def open_session() -> SqlSession:
        before()
        session = cast("SqlSession", backend.open_reader())
        try:
            check(session)
        except BaseException:
            session.close()
            raise
        return session

    return open_session


def _require_home(path: Path) -> None:
    """Before connecting, for SQLite makes a missing file.

    The file is not opened here: closing it again would drop the locks of a store that this process has open.
    """
    home = path.parent
    try:
        empty = path.stat().st_size == 0
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(
            f"there is no Ostler home at {home}; check the path, or make one with ostler.open_store"
        ) from None
    except OSError as error:
        raise StoreError(f"the home at {home} cannot be read ({error.strerror}); check who owns it") from error
    if not os.access(path, os.R_OK):
        raise StoreError(f"the home at {home} cannot be read (Permission denied); check who owns it")
    if empty:
        raise StoreError(_NO_DATABASE.format(path=path))


def _require_ours(session: SqlSession, path: Path) -> None:
    try:
        application = session.execute("PRAGMA application_id", {})[0]["application_id"]
    except StoreFailedError as error:  # SQLite calls a foreign file a broken disk
        raise StoreError(_NO_DATABASE.format(path=path)) from error
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
