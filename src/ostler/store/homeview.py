"""A home to look at: its file is opened in the mode that leaves no trace, and anew where that mode holds no more."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ostler.errors import StoreBusyError, StoreError
from ostler.store.sqlite import SqliteSession
from ostler.store.sqlitefaults import not_a_file, owner_of
from ostler.store.sqlsession import Row, Values

R = TypeVar("R")

_IMMUTABLE = "ro&immutable=1"
#: So often a file that changes under our eyes is looked at anew before we give up.
_TRIES = 10
_PAUSE_SECONDS = 0.02

#: Which file it is, when it was last written, how large it is, and whether more lies beside it.
_Marks = tuple[int, int, int, bool]


class HomeView(SqliteSession):
    """A reading session on the file of a home.

    Where SQLite was told that nobody changes the file, it believes so for ever: it would answer from pages that are
    old, or half old and half new. Therefore we look at the file before and after every question.
    """

    def __init__(self, path: Path, check: Callable[[Callable[[str], int]], None]) -> None:
        """`check` is given a way to read a pragma of every file that is opened, and raises where it is not ours."""
        self.path = path
        self._check = check
        self._how = ""
        self._marks: _Marks | None = None
        self._is_open = False
        self._steadily(lambda: None)

    def execute(self, sql: str, values: Row | Values) -> Sequence[Row]:
        ask = super().execute
        return self._steadily(lambda: ask(sql, values))

    def select(self, sql: str, values: Row | Values) -> tuple[list[str], list[Values]]:
        ask = super().select
        return self._steadily(lambda: ask(sql, values))

    def _steadily(self, ask: Callable[[], R]) -> R:
        for turn in range(_TRIES):
            if turn:
                time.sleep(_PAUSE_SECONDS)  # whoever opens or closes the home does several things to its files
            try:
                if not self._is_open or self._changed():
                    self._open_anew()
                found = ask()
            except StoreError:
                # What looks damaged may only be half of what somebody is just writing.
                if not self._how or not (self._changed() or _how_to_look(self.path) != self._how):
                    raise
            else:
                if not self._changed():
                    return found
            self._leave()
        raise StoreBusyError(f"the home at {self.path.parent} changes faster than it can be looked at; try again")

    def _changed(self) -> bool:
        """Only where nobody should: in every other mode SQLite notices it by itself."""
        return self._how == _IMMUTABLE and _marks(self.path) != self._marks

    def _open_anew(self) -> None:
        self._leave()
        self._how = ""
        _require_home(self.path)
        self._marks = _marks(self.path)  # before it is opened, so that nothing that changes later is overlooked
        self._how = _how_to_look(self.path)
        super().__init__(self.path, read_only=True, how=self._how)
        self._is_open = True
        try:
            self._check(self._pragma)
        except BaseException:
            self._leave()
            raise

    def _pragma(self, name: str) -> int:
        return int(SqliteSession.execute(self, f"PRAGMA {name}", {})[0][name])

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self.close()


def _how_to_look(path: Path) -> str:
    """The mode in which looking leaves no trace.

    Where we may write, as every other opens it: who closes last clears away what SQLite puts beside the file. To be
    read only, SQLite wants to find these there, or to be told that nobody changes the file.
    """
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "rw"
    for turn in range(_TRIES):
        if turn:
            time.sleep(_PAUSE_SECONDS)  # who closes a home takes the one away a moment before the other
        ahead, shared = _size(_beside(path, "-wal")), _size(_beside(path, "-shm"))
        if ahead is not None and shared is not None:
            return "ro"
        if not ahead:
            return _IMMUTABLE
    raise StoreError(
        f"the home at {path.parent} was not closed, and its last changes can be read only where one may write; "
        f"look at it as {owner_of(path)}, or copy the whole directory to a place of your own and look there"
    )


def _marks(path: Path) -> _Marks | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, bool(_size(_beside(path, "-wal")))


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _size(path: Path) -> int | None:
    """None: it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


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
