"""A store to look at: nothing is created, brought up to date or written, and whoever owns it is not disturbed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from ostler.errors import StoreError, StoreTooNewError
from ostler.store.engine import EngineStore
from ostler.store.homeview import HomeView
from ostler.store.life import Backend, Seams
from ostler.store.opening import DATABASE_FILE, backend_for, home_path, is_address
from ostler.store.port import Session
from ostler.store.queries import migrations
from ostler.store.sqlite import APPLICATION_ID
from ostler.store.sqlsession import SqlSession


def view_store(where: str | os.PathLike[str], seams: Seams | None = None) -> EngineStore:
    """The store of an existing home or address, for reading only; opening it fails where there is none."""
    backend = backend_for(where)
    open_session: Callable[[], Session]
    if is_address(where):
        open_session = partial(_database_session, backend)
    else:
        path = home_path(where) / DATABASE_FILE
        open_session = partial(HomeView, path, partial(_require_ours, path))
    return EngineStore(Backend(open_writer=None, open_reader=open_session), seams)


def _database_session(backend: Backend) -> SqlSession:
    session = cast("SqlSession", backend.open_reader())
    try:
        _require_database(session)
    except BaseException:
        session.close()
        raise
    return session


def _require_ours(path: Path, pragma: Callable[[str], int]) -> None:
    if pragma("application_id") != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program; choose another home")
    _require_shape(pragma("user_version"), "sqlite")


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
