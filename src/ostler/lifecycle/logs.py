"""What an agent wrote, line by line with times and cursors, from the files that the keeper fills.

Beside a log file lies a file of times: pairs of (position, microseconds), one for each piece that the keeper wrote. A
position counts from the beginning of the output, also when the file was turned over since; a pair with the time 0 says
at which position the file begins.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import shutil
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

from ostler.agents.registry import AgentManifest
from ostler.drivers import driver_of
from ostler.isolation.process.logs import HOMES, LOGS
from ostler.lifecycle.instance import Runtime
from ostler.lifecycle.observe import LastEvent, is_over
from ostler.model.instance import AgentInstance
from ostler.model.record import Record, record
from ostler.model.text import clean_text
from ostler.model.types import Moment, from_micros
from ostler.model.validation import fault

#: How often a followed file is looked at.
LOOK_SECONDS = 0.2
#: A line without an end is given in pieces of this size.
_MAX_LINE = 64 * 1024
_MAX_RENDERED = 8 * 1024 * 1024
_LAST_BYTES = 400
_NAME = re.compile(r"(\d+)(?:-([0-9a-f]{32}))?\.log")
_CURSOR = re.compile(r"(\d+)-([0-9a-f]{32})?:(\d+)")
_PAIR = struct.Struct(">QQ")
_TIMES = ".times"
#: What a driver makes of a line.
Render = Callable[[str], str | None]


@record
class LogLine(Record):
    """One line of output. `cursor` is the place behind it: reading after it goes on with the next line."""

    attempt: int
    text: str
    cursor: str
    time: Moment | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """The output of one attempt, or of one run of a command."""

    attempt: int
    run: str
    path: Path

    def key(self) -> str:
        return f"{self.attempt}-{self.run}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogWindow:
    """Which lines are wanted."""

    #: The cursor of the last line that was read.
    after: str | None = None
    attempt: int | None = None
    #: The number of last lines; None: all.
    tail: int | None = None
    since: datetime | None = None
    #: Go on over restarts, until the instance has ended.
    follow: bool = False
    #: As a person reads it; None: as it was written. A line for which it gives None is left out.
    render: Render | None = None
    #: Each character of a text is one byte that was written (ISO 8859-1), the end of the line among them.
    exact: bool = False


async def read_log(runtime: Runtime, instance: AgentInstance, window: LogWindow) -> AsyncIterator[LogLine]:
    """Attempt by attempt, oldest first."""
    if runtime.home is None:
        return
    folder = runtime.home / LOGS / str(instance.instance_id)
    max_line = _MAX_LINE if window.render is None else _MAX_RENDERED
    reader = _LogReader(folder, window.attempt, window.after, max_line, _exact_text if window.exact else _text)
    first = True
    last_event = LastEvent(runtime.fanout, runtime.clock, instance)
    while True:
        over = not window.follow or await runtime.store.read(is_over, instance.instance_id)
        fresh = reader.read(last=over)
        lines: Iterator[LogLine] | deque[LogLine] = fresh if window.render is None else _rendered(fresh, window.render)
        if window.since is not None:
            since = window.since
            lines = (line for line in lines if line.time is None or line.time >= since)
        if first and window.tail is not None:
            lines = deque(lines, maxlen=window.tail)
        first = False
        for line in lines:
            yield line
        if over:
            return
        await last_event.wait(LOOK_SECONDS)


def _rendered(lines: Iterator[LogLine], render: Render) -> Iterator[LogLine]:
    """Text of several lines stays one line of the log: it has one cursor."""
    for line in lines:
        text = render(line.text)
        if text is not None:
            yield line.evolve(text=text)


class _LogReader:
    """Remembers how far each file was read."""

    def __init__(
        self,
        folder: Path,
        attempt: int | None,
        after: str | None,
        max_line: int = _MAX_LINE,
        decode: Callable[[bytes], str] | None = None,
    ) -> None:
        self._folder = folder
        self._max_line = max_line
        self._decode = decode or _text
        self._attempt = attempt
        self._places: dict[str, int] = {}
        self._skip_until: str | None = None
        if after is not None:
            match = _CURSOR.fullmatch(after)
            if match is None:
                raise fault("after", "must be the cursor of a line", after)
            self._skip_until = f"{match[1]}-{match[2] or ''}"
            self._places[self._skip_until] = int(match[3])

    def read(self, *, last: bool) -> Iterator[LogLine]:
        """Whole lines that are new. `last`: nothing more will come, so a line without an end is one too."""
        for file in self.files():
            if self._skip_until is not None:
                if file.key() != self._skip_until:
                    continue  # before the cursor
                self._skip_until = None
            yield from self._lines(file, last=last)

    def files(self) -> list[_File]:
        files: list[tuple[int, int, _File]] = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match is not None and self._attempt in {None, int(match[1])}:
                    file = _File(int(match[1]), match[2] or "", path)
                    files.append((file.attempt, _begun(path), file))
        return [file for _, _, file in sorted(files, key=lambda entry: entry[:2])]

    def _lines(self, file: _File, *, last: bool) -> Iterator[LogLine]:
        place = self._places.get(file.key(), 0)
        for path in (file.path.with_name(f"{file.path.name}.1"), file.path):
            times = _read_times(path)
            begins = times[0][0] if times and times[0][1] == 0 else 0
            try:
                with path.open("rb") as opened:
                    opened.seek(max(place - begins, 0))
                    place = max(place, begins)
                    while piece := opened.readline(self._max_line):
                        whole = piece.endswith(b"\n") or len(piece) == self._max_line
                        if not whole and not last and path == file.path:
                            break  # its end is not written yet; a file that was turned over grows no more
                        place += len(piece)
                        yield LogLine(
                            attempt=file.attempt,
                            text=self._decode(piece),
                            cursor=f"{file.key()}:{place}",
                            time=_time_at(times, place - 1),
                        )
            except FileNotFoundError:
                continue
        self._places[file.key()] = place


def _begun(path: Path) -> int:
    times = _read_times(path.with_name(f"{path.name}.1")) or _read_times(path)
    first = next((micros for _, micros in times if micros), None)
    if first is not None:
        return first
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns // 1000
    return 0


def _read_times(path: Path) -> list[tuple[int, int]]:
    """The pairs of a file; of `X.log.1` they are in `X.log.times.1`."""
    name = path.name.removesuffix(".1")
    suffix = ".1" if path.name.endswith(".1") else ""
    try:
        raw = path.with_name(f"{name}{_TIMES}{suffix}").read_bytes()
    except OSError:
        return []
    return [(place, micros) for place, micros in _PAIR.iter_unpack(raw[: len(raw) // _PAIR.size * _PAIR.size])]


def _time_at(times: list[tuple[int, int]], place: int) -> datetime | None:
    """When the byte at that position was written."""
    index = bisect.bisect_right(times, (place, 2**63)) - 1
    return from_micros(times[index][1]) if index >= 0 and times[index][1] else None


def _text(line: bytes) -> str:
    return clean_text(line.decode("utf-8", "replace")).rstrip("\r\n")


def _exact_text(line: bytes) -> str:
    return line.decode("latin-1")


def render_of(manifest: AgentManifest) -> Render | None:
    """How the output of such an agent is shown to people; None: as it is."""
    driver = driver_of(manifest)
    return None if driver is None else driver.render


def last_line(home: Path, instance: AgentInstance) -> str | None:
    """The last line that the present attempt wrote."""
    files = _LogReader(home / LOGS / str(instance.instance_id), instance.attempt, None).files()
    if not files:
        return None
    with contextlib.suppress(OSError), files[-1].path.open("rb") as opened:
        opened.seek(0, 2)
        opened.seek(max(opened.tell() - _LAST_BYTES, 0))
        lines = opened.read().splitlines()
        return _text(lines[-1]) if lines else None
    return None


def remove_logs(home: Path, instance_id: UUID) -> int:
    """Remove the output and the private home of an instance; how many bytes that freed."""
    freed = 0
    for folder in (home / LOGS / str(instance_id), home / HOMES / str(instance_id)):
        with contextlib.suppress(OSError):
            freed += sum(path.lstat().st_size for path in folder.rglob("*"))
            shutil.rmtree(folder)
    return freed
