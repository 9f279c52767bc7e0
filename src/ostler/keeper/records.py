"""The exit records: on the disk before anybody hears of them, and known to the next keeper of the home."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

#: More are not kept; a manager forgets what it has heard of, so nobody comes near this.
MAX_RECORDS = 20_000
_MAX_BYTES = 4 * 1024 * 1024
#: After a failure, what waits is tried again so often, or at once when something new comes.
_AGAIN_SECONDS = 1.0
Record = Mapping[str, Any]


class Journal:
    """Lines of JSON: records, {"forget": box}, {"forget_unit": unit}. One write and one sync for all of a turn.

    A disk that takes nothing costs no record as long as the keeper lives: what could not be written waits, and is
    written as soon as there is room again.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self.known: dict[str, Record] = {}
        #: Of these, by box, those that name who outlived them. Hardly ever there is one.
        self._haunted: dict[str, dict[str, Record]] = {}
        self._waiting: list[bytes] = []
        self._unsynced = False
        #: On the monotonic clock, while the disk takes nothing: when what waits is tried again.
        self._again: float | None = None
        #: -1 as long as there is no file: then the next one begins with all that is known.
        self._file = -1
        #: How much of it is whole lines; what a failed write left behind them must not be read as one with the next.
        self._good = 0
        #: When it is longer than this, only what is still of use is written anew.
        self._most = 0
        self._read()
        self._guarded(self._rewrite)

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:  # noqa: PTH123 - pathlib is not worth its import here
                for line in file:
                    self._take(line)
        except FileNotFoundError:
            return

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if "forget" in entry:
                self._drop(entry["forget"])
            elif "forget_unit" in entry:
                self._drop_unit(str(entry["forget_unit"]))
            else:
                entry["box"] = str(entry["box"])
                if "survivors" in entry:
                    entry["survivors"] = [[int(pid), int(began)] for pid, began in entry["survivors"]]
                self._know(entry)
        except (ValueError, KeyError, TypeError):
            return  # of a keeper that was killed while it wrote, or of a disk that was full

    def outlived(self, box: str) -> Mapping[str, Record]:
        """By unit, the ends in a box that something has outlived."""
        return self._haunted.get(box, {})

    def _know(self, record: Record) -> None:
        unit = str(record["unit"])
        self.known[unit] = record
        if record.get("survivors"):
            self._haunted.setdefault(str(record["box"]), {})[unit] = record

    def add(self, record: Record) -> None:
        self._know(record)
        self._unsynced = True
        self._wait(record)

    def forget(self, box: str) -> None:
        """Not worth a sync of its own: at worst, after a crash of the machine, it is remembered again."""
        if self._drop(box):
            self._wait({"forget": box})

    def forget_unit(self, unit: str) -> None:
        if self._drop_unit(unit):
            self._wait({"forget_unit": unit})

    def _drop_unit(self, unit: str) -> bool:
        record = self.known.pop(unit, None)
        if record is None:
            return False
        self._haunted.get(str(record["box"]), {}).pop(unit, None)
        return True

    def _wait(self, entry: Mapping[str, Any]) -> None:
        self._waiting.append(_line(entry))
        if self._again is not None:
            self._again = 0.0

    def _drop(self, box: str) -> bool:
        gone = [name for name, record in self.known.items() if record["box"] == box]
        for name in gone:
            del self.known[name]
        self._haunted.pop(box, None)
        return bool(gone)

    # --- the disk ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Also called when nothing is new: what could not be written waits for it."""
        if self._again is None:
            if self._waiting:
                self._guarded(self._write)
        elif time.monotonic() >= self._again:
            self._guarded(self._write)

    def _guarded(self, deed: Callable[[], None]) -> None:
        """A disk that takes nothing must not keep us from the care for the living."""
        failed_before = self._again is not None
        try:
            deed()
        except OSError as error:
            self._again = time.monotonic() + _AGAIN_SECONDS
            if sum(map(len, self._waiting)) > _MAX_BYTES:
                self._let_go()
            if not failed_before:
                self._warn(f"exit records cannot be written, and are kept in memory until they can: {error}")
        else:
            self._again = None
            if failed_before:
                self._warn("exit records are written again")

    def _write(self) -> None:
        if self._file < 0:
            self._rewrite()
            return
        if self._again is not None:
            self._mend()
        body = b"".join(self._waiting)
        _write_all(self._file, body)
        if self._unsynced:
            os.fdatasync(self._file)
        self._good += len(body)
        self._waiting.clear()
        self._unsynced = False
        if self._good > self._most:
            # As much room again where there is none for this: nothing is lost, it is only longer than it need be.
            self._most = self._good + _MAX_BYTES
            with contextlib.suppress(OSError):
                self._rewrite()

    def _mend(self) -> None:
        """What a failed write left of a line goes; where that is refused, the next line begins on one of its own."""
        try:
            os.ftruncate(self._file, self._good)
        except OSError:
            _write_all(self._file, b"\n")
            self._good = os.fstat(self._file).st_size

    def _rewrite(self) -> None:
        """Only what is still of use, under the same name; what was written before stays until this is whole."""
        for name in list(self.known)[:-MAX_RECORDS]:
            self._drop_unit(name)
        body = b"".join(_line(one) for one in self.known.values())
        fresh = f"{self._path}.new"
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, body)
            os.fsync(file)
            os.rename(fresh, self._path)  # noqa: PTH104 - no pathlib here
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(fresh)  # noqa: PTH108 - no pathlib here
            raise
        before, self._file = self._file, file
        if before >= 0:
            os.close(before)
        self._good = len(body)
        # As much room again before the next time, or a full journal would be written at every turn.
        self._most = self._good + _MAX_BYTES
        self._waiting.clear()
        self._unsynced = False

    def _let_go(self) -> None:
        """The next time all that is known is written anew, so that what waits does not grow without end."""
        self._waiting.clear()
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def close(self) -> None:
        self._again = None if self._again is None else 0.0
        self.flush()
        self._let_go()


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _write_all(file: int, body: bytes) -> None:
    left = memoryview(body)
    while left:
        left = left[os.write(file, left) :]
