"""From a unit's output pipe into its log: bounded in size, rate, and in the keeper's time."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable

from ostler.keeper.loop import Loop

#: Bytes per second that a unit may write for long, and for how many seconds of it at once.
RATE, BURST_SECONDS = 2 << 20, 4
#: The end of the name of the file beside a log that holds how many bytes were dropped, as eight bytes.
DROPPED = ".dropped"
#: How often that is noted while nothing else is written.
_NOTE_SECONDS = 0.5
_COUNT = struct.Struct(">Q")
_CHUNK = 256 << 10
#: Beside each log stands `.times`: pairs of position and microseconds since 1970.
_TIME_PAIR = struct.Struct(">QQ")
_TIME_STEP = 0.01
_DRAIN = 4 << 20


class Log:
    """A file and the one before it, each of at most `limit` bytes; made by the first output. Path None: keeps nothing."""

    def __init__(self, path: str | None, limit: int) -> None:
        self.path = path
        self.limit = max(4096, limit)
        self._file = self._times = -1
        self._size = self._begins = 0
        self._timed = 0.0
        self.ends_line = True

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        path = str(self.path)
        try:
            self._file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
        self._size = os.fstat(self._file).st_size
        with contextlib.suppress(OSError):  # output without times is better than none
            self._times = os.open(f"{path}.times", flags, 0o600)
            if self._begins and not os.fstat(self._times).st_size:
                os.write(self._times, _TIME_PAIR.pack(self._begins, 0))

    def write(self, data: bytes) -> int:
        """How many bytes were written; a full disk takes none. Never raises."""
        if self.path is None:
            return 0
        rest = memoryview(data)
        try:
            if self._file < 0:
                self._open()
            while rest:
                if self._size >= self.limit:
                    self._rotate()
                self._note_time()
                count = os.write(self._file, rest[: self.limit - self._size])
                self._size += count
                rest = rest[count:]
        except OSError:
            return len(data) - len(rest)
        self.ends_line = data.endswith(b"\n")
        return len(data)

    def _note_time(self) -> None:
        now = time.time()
        if self._times >= 0 and now - self._timed >= _TIME_STEP:
            self._timed = now
            with contextlib.suppress(OSError):
                os.write(self._times, _TIME_PAIR.pack(self._begins + self._size, int(now * 1_000_000)))

    def _rotate(self) -> None:
        os.rename(str(self.path), f"{self.path}.1")
        with contextlib.suppress(OSError):
            os.rename(f"{self.path}.times", f"{self.path}.times.1")
        self._begins += self._size
        self.close()
        self._open()

    def note_dropped(self, count: int) -> None:
        """How many bytes were dropped so far, in a file beside the log. Never raises."""
        if self.path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            file = os.open(f"{self.path}{DROPPED}", flags, 0o600)
            try:
                os.pwrite(file, _COUNT.pack(count), 0)
            finally:
                os.close(file)

    def close(self) -> None:
        descriptors = (self._file, self._times)
        self._file = self._times = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


class Output:
    """Reads the pipe of one unit; owns `fd`, which is -1 after the end."""

    def __init__(
        self, loop: Loop, fd: int, log: Log, rate: int = RATE, tap: Callable[[bytes], bytes] | None = None
    ) -> None:
        """`tap` sees all that is read, and returns what of it goes into the log."""
        self.fd = fd
        self.written = self.dropped = 0
        self._unmarked = 0  #: dropped and not marked in the log yet
        self._loop = loop
        self._log = log
        self._rate = rate
        self._tap = tap
        self._allowed = float(rate * BURST_SECONDS)
        self._noted = 0.0
        self._counted = time.monotonic()
        os.set_blocking(fd, False)
        loop.watch(fd, self._readable, urgent=False)

    def _readable(self) -> None:
        """One read per turn, so that a flood costs its neighbours nothing."""
        if self._read() is None:
            self._close()

    def _read(self) -> int | None:
        """Bytes read; 0: nothing now; None: the end."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not data:
            return None
        count = len(data)
        if self._tap is not None and not (data := self._tap(data)):
            return count
        now = time.monotonic()
        self._allowed = min(float(self._rate * BURST_SECONDS), self._allowed + (now - self._counted) * self._rate)
        self._counted = now
        if self._allowed < len(data):
            self._drop(len(data))
        else:
            self._allowed -= len(data)
            self._mark_gap()
            written = self._log.write(data)
            self.written += written
            self._drop(len(data) - written)
        return count

    def _drop(self, count: int) -> None:
        if not count:
            return
        self.dropped += count
        self._unmarked += count
        if self._counted - self._noted >= _NOTE_SECONDS:
            self._noted = self._counted
            self._log.note_dropped(self.dropped)

    def _mark_gap(self) -> None:
        if self._unmarked and self._log.path is not None:
            self._log.note_dropped(self.dropped)
            start = "" if self._log.ends_line else "\n"
            self._log.write(f"{start}[ostler: {self._unmarked} bytes dropped]\n".encode())
            self._unmarked = 0

    def finish(self) -> None:
        """All writers are dead: read the rest, mark what is missing, close. Harmless twice."""
        rest = _DRAIN
        while self.fd >= 0 and rest > 0 and (count := self._read()):
            rest -= count
        self._close()
        self._mark_gap()
        self._log.close()

    def _close(self) -> None:
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)
