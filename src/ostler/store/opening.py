"""From a directory or a database address to a store."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Protocol, cast

from ostler.errors import MissingExtraError, ValidationError
from ostler.model import Fault, shown
from ostler.store.engine import EngineStore
from ostler.store.life import Backend, Seams
from ostler.store.sqlite import SqliteSession, migrate

DATABASE_FILE = "ostler.db"
_POSTGRES = ("postgresql://", "postgres://")


class _BackendModule(Protocol):
    def backend(self, address: str) -> Backend: ...


def open_store(where: str | os.PathLike[str], seams: Seams | None = None) -> EngineStore:
    """A store for a home directory (SQLite) or a `postgresql://` address; use it with `async with`."""
    return EngineStore(backend_for(where), seams)


def backend_for(where: str | os.PathLike[str]) -> Backend:
    text = _place(where)
    if text.startswith(_POSTGRES):
        return _postgres().backend(text)
    if is_address(text):
        known = "a directory, or an address that begins with postgresql://"
        raise ValidationError(
            [Fault(field="store", bound=f"must be {known}", value=text.split("://", maxsplit=1)[0] + "://…")]
        )
    return sqlite_backend(home_path(where) / DATABASE_FILE)


def home_path(where: str | os.PathLike[str]) -> Path:
    """The directory that is meant; `~` is the user's own."""
    text = _place(where)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise _no_place("must be a directory that can be found; this user has none", where) from error


def is_address(where: str | os.PathLike[str]) -> bool:
    """Of a database, and not a directory."""
    return "://" in _place(where)


def _place(where: object) -> str:
    """An empty text would be the current directory, and fill it with what nobody expects there."""
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(text, str):  # a path may also be bytes
        raise _no_place("must be a directory or a postgresql:// address, as a text or a Path", where)
    if not (text.strip() if isinstance(where, str) else text):
        raise _no_place("is empty; name a directory, such as ~/.ostler", where)
    if "\0" in text:
        raise _no_place("has a NUL in it, which no path may have; name another", where)
    return text


def _no_place(bound: str, where: object) -> ValidationError:
    return ValidationError([Fault(field="store", bound=bound, value=shown(where))])


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
