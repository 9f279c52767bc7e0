"""From the output pipes of a unit into its log: bounded in size, rate, and in the keeper's time."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from ostler.keeper.loop import Loop, Timer

#: Bytes per second that a unit may write for long, and for how many seconds of it at once.
RATE, BURST_SECONDS = 2 << 20, 4
#: The end of the name of the file beside a log that holds how many bytes were dropped, as eight bytes.
DROPPED = ".dropped"
#: How often that is noted while nothing else is written.
_NOTE_SECONDS = 0.5
_COUNT = struct.Struct(">Q")
_CHUNK = 256 << 10
#: Beside each log stands `.times`: pairs of position and microseconds since 1970, one at each place where the time or
#: the stream changes. The stream is in the highest byte of the position; logs of earlier versions have 0 there.
TIME_PAIR, STREAM_SHIFT = struct.Struct(">QQ"), 56
#: Streams: not known (a terminal, an earlier version), standard output, standard error, and what we added ourselves.
UNKNOWN, STDOUT, STDERR, OURS = range(4)
_TIME_STEP = 0.01
#: How often it is looked whether the log was removed.
_LOOK_SECONDS = 1.0
_DRAIN = 4 << 20
#: Bytes that cannot begin a character of UTF-8.
_CONTINUATION = bytes(range(0x80, 0xC0))
#: Of what was written last, so many bytes are told to the manager, at most so often, of so many units at once.
_TAIL_BYTES, _REPORT_SECONDS, _REPORTED_AT_ONCE = 400, 0.5, 256
_REPORT_PAUSE = 0.02
#: So long a stream waits for the other one to end its line, before that line is broken.
_LINE_SECONDS = 0.1


class Log:
    """A file and the one before it, each of at most `limit` bytes; made by the first output. Path None: keeps nothing.

    A line is of one stream: where another one begins in the middle of a line, a line end is added and noted as `OURS`.
    """

    def __init__(self, path: str | None, limit: int) -> None:
        self.path = path
        self.limit = max(4096, limit)
        self.stream = UNKNOWN  #: of the last byte
        self.ends_line = True
        self._file = self._times = -1
        self._size = self._begins = self._times_size = 0
        self._noted: tuple[float, int] = (0.0, -1)  #: time and stream of the last pair
        self._looked = 0.0  #: when the file was last known to be there

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        path = str(self.path)
        try:
            self._file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            _make_directory(os.path.dirname(path))
            self._file = os.open(path, flags, 0o600)
        self._size = os.fstat(self._file).st_size
        with contextlib.suppress(OSError):  # output without times is better than none
            self._times = os.open(f"{path}.times", flags, 0o600)
            self._times_size = os.fstat(self._times).st_size
            if self._begins and not self._times_size:
                self._write_pair(self._begins, 0)

    def write(self, data: bytes, stream: int = UNKNOWN) -> int:
        """How many bytes were written; a full disk takes none. Never raises."""
        if self.path is None:
            return 0
        count = 0
        try:
            if self._file < 0:
                self._open()
            if not self.ends_line and stream != self.stream:
                self._put(b"\n", OURS)
            rest = memoryview(data)
            while rest:
                taken = self._put(rest, stream)
                count += taken
                rest = rest[taken:]
        except OSError:
            pass
        return count

    def _put(self, data: bytes | memoryview, stream: int) -> int:
        if self._size >= self.limit or self._times_size >= self.limit:
            self._rotate()
        now = time.time()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if not os.fstat(self._file).st_nlink:
                self._begin_anew()
        if self._times >= 0 and (stream != self._noted[1] or now - self._noted[0] >= _TIME_STEP):
            self._noted = (now, stream)
            self._write_pair(self._begins + self._size | stream << STREAM_SHIFT, int(now * 1_000_000))
        count = os.write(self._file, data[: self.limit - self._size])
        self._size += count
        self.stream = stream
        self.ends_line = data[count - 1] == ord("\n")
        return count

    def _write_pair(self, place: int, micros: int) -> None:
        with contextlib.suppress(OSError):
            self._times_size += os.write(self._times, TIME_PAIR.pack(place, micros))

    def _rotate(self) -> None:
        os.rename(str(self.path), f"{self.path}.1")
        with contextlib.suppress(OSError):
            os.rename(f"{self.path}.times", f"{self.path}.times.1")
        self._begin_anew()

    def _begin_anew(self) -> None:
        """In a new file; also when the one that was open was removed."""
        self._begins += self._size
        self._noted = (0.0, -1)
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


def _make_directory(path: str) -> None:
    """With the one above it, but no more: a home that was removed does not come back."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        for directory in (os.path.dirname(path), path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)


class Output:
    """Reads the pipes of one unit and owns them: standard output and standard error, or one descriptor for both.

    What one stream wrote stays in order; between the two the order is that of reading. `tap` sees all that is read and
    returns what of it goes into the log.
    """

    #: Set before anything is read.
    tap: Callable[[bytes], bytes] | None = None

    def __init__(self, loop: Loop, descriptors: Sequence[int], log: Log, rate: int = RATE) -> None:
        self.written = self.dropped = 0
        self._unmarked = 0  #: dropped and not marked in the log yet
        self._loop = loop
        self._log = log
        self._rate = rate
        self._allowed = float(rate * BURST_SECONDS)
        self._noted = 0.0
        self._counted = time.monotonic()
        streams = (UNKNOWN,) if len(descriptors) == 1 else (STDOUT, STDERR)
        self._streams = dict(zip(descriptors, streams, strict=True))  #: of what is open
        self._waiting = -1  #: the descriptor that is not read until the other stream has ended its line
        self._waits_until: Timer | None = None
        self._tail = b""
        self._heard = 0.0  #: seconds since 1970
        self.on_data: Callable[[], None] = lambda: None
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._watch(descriptor)

    def _watch(self, descriptor: int) -> None:
        self._loop.watch(descriptor, lambda: self._readable(descriptor), urgent=False)

    def _readable(self, descriptor: int) -> None:
        """One read per turn, so that a flood costs its neighbours nothing."""
        if self._breaks_line(descriptor):
            self._loop.unwatch(descriptor)
            self._waiting = descriptor
            self._waits_until = self._loop.later(_LINE_SECONDS, self._waited)
            return
        self._take(descriptor)
        if self._waiting >= 0 and not self._breaks_line(self._waiting):
            self._go_on()

    def _take(self, descriptor: int) -> None:
        if self._read(descriptor) is None:
            self._close(descriptor)

    def _breaks_line(self, descriptor: int) -> bool:
        """Whether the other stream has just written the beginning of a line and may go on with it."""
        log = self._log
        if log.ends_line or log.stream == self._streams[descriptor] or log.stream not in self._streams.values():
            return False
        return time.monotonic() - self._counted < _LINE_SECONDS

    def _waited(self) -> None:
        waiting = self._waiting
        self._go_on()
        if waiting >= 0:
            self._take(waiting)  # even if it breaks the line

    def _go_on(self) -> None:
        if self._waits_until is not None:
            self._waits_until.cancel()
        waiting, self._waiting = self._waiting, -1
        if waiting >= 0:
            self._watch(waiting)

    def _read(self, descriptor: int) -> int | None:
        """Bytes read; 0: nothing now; None: the end."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not data:
            return None
        count = len(data)
        if self.tap is not None and not (data := self.tap(data)):
            return count
        now = time.monotonic()
        self._allowed = min(float(self._rate * BURST_SECONDS), self._allowed + (now - self._counted) * self._rate)
        self._counted = now
        self._keep_tail(data, self._streams[descriptor])
        if self._allowed < len(data):
            self._drop(len(data))
        else:
            self._allowed -= len(data)
            self._mark_gap()
            written = self._log.write(data, self._streams[descriptor])
            self.written += written
            self._drop(len(data) - written)
        self.on_data()
        return count

    def _keep_tail(self, data: bytes, stream: int) -> None:
        breaks = b"\n" if not self._log.ends_line and self._log.stream != stream else b""
        self._tail = (self._tail + breaks + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self._heard = time.time()

    def last(self) -> dict[str, Any] | None:
        """When it wrote last, the end of that, and how much was dropped so far; None before the first output."""
        if not self._heard:
            return None
        tail = self._tail.lstrip(_CONTINUATION).decode("utf-8", "replace")
        return {"at": self._heard, "tail": tail, "dropped": self.dropped}

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
            self._log.write(f"[ostler: {self._unmarked} bytes dropped]\n".encode(), OURS)
            self._unmarked = 0

    def finish(self) -> None:
        """All writers are dead: read the rest, mark what is missing, close. Harmless twice."""
        self._go_on()
        # First the one whose line is not ended.
        for descriptor in sorted(self._streams, key=lambda descriptor: self._streams[descriptor] != self._log.stream):
            rest = _DRAIN
            while rest > 0 and (count := self._read(descriptor)):
                rest -= count
            self._close(descriptor)
        self._mark_gap()
        self._log.close()

    def _close(self, descriptor: int) -> None:
        self._loop.unwatch(descriptor)
        del self._streams[descriptor]
        os.close(descriptor)


class OutputReporter:
    """Tells the manager what units wrote last: one event for all that changed, and not more than two in a second.

    `tell` returns False when the manager does not read now; then it is told later.
    """

    def __init__(self, loop: Loop, tell: Callable[[Mapping[str, Any]], bool]) -> None:
        self._loop = loop
        self._tell = tell
        self._changed: dict[str, Output] = {}
        self._timer: Timer | None = None
        self._told = 0.0

    def add(self, unit: str, output: Output) -> None:
        """It has written something."""
        self._changed[unit] = output
        if self._timer is None:
            pause = max(_REPORT_PAUSE, self._told + _REPORT_SECONDS - time.monotonic())
            self._timer = self._loop.later(pause, self._report)

    def discard(self, unit: str) -> None:
        self._changed.pop(unit, None)

    def _report(self) -> None:
        self._timer, self._told = None, time.monotonic()
        units = {unit: output.last() for unit, output in islice(self._changed.items(), _REPORTED_AT_ONCE)}
        if units and self._tell({"event": "output", "units": units}):
            for unit in units:
                del self._changed[unit]
        if self._changed:
            self._timer = self._loop.later(_REPORT_SECONDS, self._report)
