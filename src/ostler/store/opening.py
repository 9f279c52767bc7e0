"""From a directory or a database address to a store."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

from ostler.errors import MissingExtraError, ValidationError
from ostler.model import Fault
from ostler.store.engine import EngineStore
from ostler.store.life import Backend, Seams
from ostler.store.sqlite import SqliteSession, migrate

DATABASE_FILE = "ostler.db"
_POSTGRES = ("postgresql://", "postgres://")


class _BackendModule(Protocol):
    def backend(self, address: str) -> Backend: ...


def open_store(where: str | Path, seams: Seams | None = None) -> EngineStore:
    """A store for a home directory (SQLite) or a `postgresql://` address; use it with `async with`."""
    return EngineStore(backend_for(where), seams)


def backend_for(where: str | Path) -> Backend:
    text = str(where)
    if text.startswith(_POSTGRES):
        return _postgres().backend(text)
    if "://" in text:
        known = "a directory, or an address that begins with postgresql://"
        raise ValidationError(
            [Fault(field="store", bound=f"must be {known}", value=text.split("://", maxsplit=1)[0] + "://…")]
        )
    return sqlite_backend(Path(where).expanduser() / DATABASE_FILE)


def sqlite_backend(path: Path) -> Backend:
    return Backend.migrating(
        lambda: SqliteSession(path, create=True), migrate, lambda: SqliteSession(path, read_only=True)
    )


def _postgres() -> _BackendModule:
    """Found by name and imported at the first use: most homes never need the driver."""
    try:
        return cast("_BackendModule", importlib.import_module("ostler.store.postgres"))
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("psycopg"):
            raise MissingExtraError("a PostgreSQL store", "postgres") from error
        raise
