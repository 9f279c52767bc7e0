"""What agents write, from their pipe or terminal into a file: bounded in size, in rate, and in the keeper's time."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from typing import Any

from ostler.keeper.loop import Loop

#: What one agent may write on and on, in bytes for each second, and for how many seconds of it at once.
RATE, BURST_SECONDS = 2 * 1024 * 1024, 4
#: The end of the name of the file beside a log that holds how many bytes were dropped, as eight bytes.
DROPPED = ".dropped"
#: How often it is noted how much was dropped, while nothing else is written.
_NOTE_SECONDS = 0.5
_COUNT = struct.Struct(">Q")
_READ_AT_ONCE = 256 * 1024
#: A position and the microseconds since 1970 at which it was written; not more often than every so many seconds.
_PAIR = struct.Struct(">QQ")
_TIME_GRAIN = 0.01
#: What can be left in a pipe when its writers are gone is far less.
_DRAIN = 4 * 1024 * 1024


class Log:
    """A file and the one before it, each of at most `limit` bytes. A path of None keeps nothing."""

    def __init__(self, path: str | None, limit: int) -> None:
        self.path = path
        self.limit = max(4096, limit)
        self._file = -1
        self._size = 0
        #: Where the file begins in all that was ever written, and when each piece of it was; see `lifecycle/logs.py`.
        self._begins = 0
        self._times = -1
        self._timed = 0.0
        self.ends_line = True
        if path is not None:
            self._open()

    def _open(self) -> None:
        assert self.path is not None  # noqa: S101 - who calls this has looked
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)  # noqa: PTH103, PTH120 - no pathlib here
            self._file = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._file).st_size
        self._open_times(flags)

    def _open_times(self, flags: int) -> None:
        """Never raises: output without times is better than none."""
        with contextlib.suppress(OSError):
            self._times = os.open(f"{self.path}.times", flags, 0o600)
            if self._begins and not os.fstat(self._times).st_size:
                os.write(self._times, _PAIR.pack(self._begins, 0))

    def _note_time(self) -> None:
        now = time.time()
        if self._times >= 0 and now - self._timed >= _TIME_GRAIN:
            self._timed = now
            with contextlib.suppress(OSError):
                os.write(self._times, _PAIR.pack(self._begins + self._size, int(now * 1_000_000)))

    def write(self, data: bytes) -> int:
        """How much of it was taken; a full disk takes nothing. Never raises."""
        if self.path is None:
            return 0
        left = memoryview(data)
        try:
            if self._file < 0:
                self._open()  # the last time it could not be had
            while left:
                if self._size >= self.limit:
                    self._turn_over()
                self._note_time()
                done = os.write(self._file, left[: self.limit - self._size])
                self._size += done
                left = left[done:]
        except OSError:
            return len(data) - len(left)
        self.ends_line = data.endswith(b"\n")
        return len(data)

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

    def _turn_over(self) -> None:
        os.rename(str(self.path), f"{self.path}.1")  # noqa: PTH104 - no pathlib here
        with contextlib.suppress(OSError):
            os.rename(f"{self.path}.times", f"{self.path}.times.1")  # noqa: PTH104 - no pathlib here
        self._begins += self._size
        self.close()
        self._open()

    def close(self) -> None:
        """Never raises. The number is forgotten first: it is somebody else's as soon as it is closed."""
        files = (self._file, self._times)
        self._file = self._times = -1
        for file in files:
            if file >= 0:
                with contextlib.suppress(OSError):  # what a full disk says at last
                    os.close(file)


class Output:
    """The reading end of one agent's output. `fd` belongs to it; -1 when that has ended."""

    def __init__(self, loop: Loop, fd: int, log: Log, rate: int = RATE) -> None:
        self.fd = fd
        self.written = 0
        self.dropped = 0
        self._gap = 0
        self._noted = 0.0
        self._loop = loop
        self._log = log
        self._rate = rate
        self._allowed = float(rate * BURST_SECONDS)
        self._counted = time.monotonic()
        if fd >= 0:
            os.set_blocking(fd, False)
            loop.watch(fd, self._readable, urgent=False)

    def _readable(self) -> None:
        """One read for a turn, so that one that writes without end gets no more turns than another."""
        if self._read() is None:
            self._let_go()

    def _read(self) -> int | None:
        """How much was read; 0 for nothing now, None for the end."""
        try:
            data = os.read(self.fd, _READ_AT_ONCE)
        except BlockingIOError:
            return 0
        except OSError:  # what a terminal says when its last writer has gone
            return None
        if not data:
            return None
        self._keep(data)
        return len(data)

    def _keep(self, data: bytes) -> None:
        now = time.monotonic()
        self._allowed = min(float(self._rate * BURST_SECONDS), self._allowed + (now - self._counted) * self._rate)
        self._counted = now
        if self._allowed < len(data):
            self._miss(len(data))
            return
        self._allowed -= len(data)
        self._mark_gap()
        taken = self._log.write(data)
        self.written += taken
        if taken < len(data):
            self._miss(len(data) - taken)

    def _miss(self, count: int) -> None:
        self.dropped += count
        self._gap += count
        now = time.monotonic()
        if now - self._noted >= _NOTE_SECONDS:
            self._noted = now
            self._log.note_dropped(self.dropped)

    def _mark_gap(self) -> None:
        if self._gap and self._log.path is not None:
            self._log.note_dropped(self.dropped)
            start = "" if self._log.ends_line else "\n"
            self._log.write(f"{start}[ostler: {self._gap} bytes dropped]\n".encode())
            self._gap = 0

    def finish(self) -> None:
        """Its writers are dead: take what they left, mark what is missing, close. Safe twice; never raises."""
        if self.fd >= 0:
            left = _DRAIN
            while left > 0 and (count := self._read()):
                left -= count
        self._let_go()
        self._mark_gap()
        self._log.close()

    def _let_go(self) -> None:
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)

    # --- for the keeper that takes over ------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "fd": self.fd,
            "path": self._log.path,
            "limit": self._log.limit,
            "written": self.written,
            "dropped": self.dropped,
            "gap": self._gap,
            "rate": self._rate,
        }

    @classmethod
    def resumed(cls, loop: Loop, state: dict[str, Any]) -> Output:
        found = cls(loop, state["fd"], Log(state["path"], state["limit"]), state.get("rate", RATE))
        found.written, found.dropped, found._gap = state["written"], state["dropped"], state["gap"]
        return found


class Tail:
    """The last that somebody wrote, in memory: what a template said before it died."""

    def __init__(self, loop: Loop, fd: int, *, limit: int = 8192) -> None:
        self._loop = loop
        self._fd = fd
        self._limit = limit
        self._kept = b""
        os.set_blocking(fd, False)
        loop.watch(fd, self._readable, urgent=False)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._kept = (self._kept + data)[-self._limit :]

    def text(self) -> str:
        if self._fd >= 0:
            self._readable()
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
