"""The exit records: on the disk before anybody hears of them, and known to the next keeper of the home."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

#: More are not kept; a manager forgets what it has heard of, so nobody comes near this.
MAX_RECORDS = 20_000
_MAX_BYTES = 4 * 1024 * 1024
Record = Mapping[str, Any]


class Journal:
    """Lines of JSON: records, {"forget": box}, {"forget_unit": unit}. One write and one sync for all of a turn."""

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self.known: dict[str, Record] = {}
        self._waiting: list[bytes] = []
        self._unsynced = False
        self._read()
        self._file = self._rewrite()
        self._size = os.fstat(self._file).st_size

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
                self.known.pop(str(entry["forget_unit"]), None)
            else:
                entry["box"] = str(entry["box"])
                self.known[str(entry["unit"])] = entry
        except (ValueError, KeyError, TypeError):
            return  # the last line of a keeper that was killed while it wrote

    def _rewrite(self) -> int:
        """Only what is still of use, under the same name; what was written before stays until this is whole."""
        for name in list(self.known)[:-MAX_RECORDS]:
            del self.known[name]
        fresh = f"{self._path}.new"
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, b"".join(_line(one) for one in self.known.values()))
            os.fsync(file)
            os.rename(fresh, self._path)  # noqa: PTH104 - no pathlib here
        finally:
            os.close(file)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def add(self, record: Record) -> None:
        self.known[str(record["unit"])] = record
        self._waiting.append(_line(record))
        self._unsynced = True

    def forget(self, box: str) -> None:
        """Not worth a sync of its own: at worst, after a crash of the machine, it is remembered again."""
        if self._drop(box):
            self._waiting.append(_line({"forget": box}))

    def forget_unit(self, unit: str) -> None:
        if self.known.pop(unit, None) is not None:
            self._waiting.append(_line({"forget_unit": unit}))

    def _drop(self, box: str) -> bool:
        gone = [name for name, record in self.known.items() if record["box"] == box]
        for name in gone:
            del self.known[name]
        return bool(gone)

    def flush(self) -> None:
        """A disk that takes nothing costs the record of the past, not the care for the present."""
        if not self._waiting:
            return
        body = b"".join(self._waiting)
        self._waiting.clear()
        try:
            _write_all(self._file, body)
            if self._unsynced:
                os.fdatasync(self._file)
            self._size += len(body)
            if self._size > _MAX_BYTES:
                file = self._rewrite()
                os.close(self._file)
                self._file = file
                # As much room again before the next time, or a full journal would be written at every turn.
                self._size = max(0, os.fstat(file).st_size - _MAX_BYTES)
        except OSError as error:
            self._warn(f"exit records could not be written: {error}")
        self._unsynced = False

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(OSError):
            os.close(self._file)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _write_all(file: int, body: bytes) -> None:
    left = memoryview(body)
    while left:
        left = left[os.write(file, left) :]
