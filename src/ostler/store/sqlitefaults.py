"""What SQLite complains about, in our words: which file it is, what is the matter with it, and what to do."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from ostler.errors import StoreBusyError, StoreError, StoreFailedError, StoreFullError

#: SQLite itself opens no file whose path has more bytes, whatever the system allows.
LONGEST_PATH = 504

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: A part of the shape that every migrated file has.
_SHAPE_GONE = ("no such table", "no such column")


def store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """The one place where the driver's errors become ours.

    The file is looked at but never opened: closing it again would drop the locks of a store in this process.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        # The memory that readers share is a file too, and is made larger only where there is no room for it.
        return _told(StoreFullError, error)
    if primary in _BUSY:
        return _told(StoreBusyError, error)
    if primary == sqlite3.SQLITE_IOERR:
        return _told(StoreFailedError, error)
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreFailedError(
            f"{path} is not a database, or is damaged ({error}); restore it from a backup, or choose another home"
        )
    if primary == sqlite3.SQLITE_CORRUPT or any(words in str(error) for words in _SHAPE_GONE):
        return damaged(path, str(error))
    if primary in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}:
        return StoreFailedError(_shut(error, path))
    return _told(StoreError, error)


def damaged(path: Path, what: str) -> StoreFailedError:
    return StoreFailedError(f"{path} is damaged ({what}); restore it from a backup, or choose another home")


def not_a_file(path: Path) -> str:
    what = "a directory" if path.is_dir() else "no regular file"
    return f"{path} is {what}, and should be the database of a home; move it away, or choose another home"


def owner_of(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):  # one without a name, or nothing that can be asked
        return "somebody else"


def _told(kind: type[StoreError], error: sqlite3.Error) -> StoreError:
    return kind(f"{kind.sentence()} ({error})")


def _shut(error: sqlite3.Error, path: Path) -> str:
    """Why a file cannot be opened or written, as far as looking tells."""
    home = path.parent
    size = len(os.fsencode(path.absolute()))
    if size > LONGEST_PATH:
        return f"the path of {path} has {size} bytes, SQLite bears {LONGEST_PATH}; choose a home with a shorter one"
    try:
        path.stat()
    except OSError as reason:
        return f"{path} cannot be opened ({reason.strerror}); check who owns {home}, or choose another home"
    if not path.is_file():
        return not_a_file(path)
    for place, access, may in ((path, os.R_OK, "read"), (path, os.W_OK, "written"), (home, os.W_OK, "written")):
        if not os.access(place, access):
            return (
                f"{place} may not be {may} by this user, it belongs to {owner_of(place)} or is on a read-only disk; "
                "choose another home, or ask for the right"
            )
    return f"{path} cannot be opened ({error}); check who owns it and its -wal and -shm, and how many files are open"
