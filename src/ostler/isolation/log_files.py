"""The files of output of one instance, read line by line: from a place on, or from the end.

Beside a log file lies a file of times: pairs of (position, microseconds), one for each piece that the keeper wrote,
with the stream in the highest byte of the position. A position counts from the beginning of the output, also when the
file was turned over since; a pair with the time 0 says at which position the file begins.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO
from uuid import UUID

from ostler.home import LOGS
from ostler.keeper.output import DROPPED, OURS, STDERR, STDOUT, STREAM_SHIFT, UNKNOWN
from ostler.keeper.output import TIME_PAIR as _PAIR
from ostler.model.log import LogLine, Stream
from ostler.model.text import clean_text
from ostler.model.types import from_micros, micros
from ostler.model.validation import fault

#: A line without an end is given in pieces of this size.
MAX_LINE = 64 * 1024
#: What is read at once from the end of a file.
_BLOCK = 16 * 1024
_NAME = re.compile(r"(\d+)(?:-([0-9a-f]{32}))?\.log")
_CURSOR = re.compile(r"(\d+)-([0-9a-f]{32})?:(\d+)")
_TIMES = ".times"
_PLACE_MASK = (1 << STREAM_SHIFT) - 1
#: As people and programs name them; None: not known, or not written by the agent.
_STREAMS: Mapping[int, Stream] = MappingProxyType({STDOUT: "stdout", STDERR: "stderr"})


#: The line as it is shown; None where it is left out.
Select = Callable[[LogLine], LogLine | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRange:
    """Which part of the output of an instance is read, and how."""

    attempt: int | None = None
    #: The cursor of the last line that was read.
    after: str | None = None
    since: datetime | None = None
    #: A line without an end is given in pieces of this size.
    max_line: int = MAX_LINE
    #: Each character of a text is one byte that was written (ISO 8859-1), the end of the line among them.
    exact: bool = False


class LogReader(ABC):
    """Reads on from where it stopped. It may block: call it in a thread, one call at a time."""

    @abstractmethod
    def read(self, select: Select, *, last: bool) -> Iterator[LogLine]:
        """Whole lines that are new, oldest first. `last`: nothing will follow, so a line without an end is one too."""

    @abstractmethod
    def read_last(self, count: int, select: Select, *, last: bool) -> list[LogLine]:
        """The last of the lines that `read` would give. Those before them count as read."""


class InstanceLogs(ABC):
    """What one instance wrote in those of its attempts whose output is kept, also after its end. It may block."""

    @abstractmethod
    def reader(self, part: LogRange) -> LogReader:
        """Raises `ValidationError` for a cursor that is none."""

    @abstractmethod
    def dropped(self) -> int:
        """Bytes that came faster than `Site.output_rate` allows, and are in no log."""


class NoLogs(InstanceLogs, LogReader):
    """Of a manager without a home."""

    def reader(self, part: LogRange) -> LogReader:
        del part
        return self

    def read(self, select: Select, *, last: bool) -> Iterator[LogLine]:
        del select, last
        return iter(())

    def read_last(self, count: int, select: Select, *, last: bool) -> list[LogLine]:
        del count, select, last
        return []

    def dropped(self) -> int:
        return 0


class FileLogs(InstanceLogs):
    """In a directory of the home."""

    def __init__(self, home: Path, instance_id: UUID) -> None:
        self._folder = home / LOGS / str(instance_id)

    def reader(self, part: LogRange) -> LogReader:
        return FileLogReader(self._folder, part)

    def dropped(self) -> int:
        total = 0
        for file in self._folder.glob(f"*{DROPPED}"):
            with contextlib.suppress(OSError):
                total += int.from_bytes(file.read_bytes()[:8])
        return total


@dataclass(frozen=True, slots=True)
class _File:
    """The output of one attempt, or of one run of a command."""

    attempt: int
    run: str
    path: Path

    def key(self) -> str:
        return f"{self.attempt}-{self.run}"

    def halves(self) -> tuple[Path, Path]:
        """The part that was turned over, and the part that grows."""
        return self.path.with_name(f"{self.path.name}.1"), self.path


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that were written at one time to one stream; `end` is the place behind them."""

    place: int
    end: int
    time: datetime | None
    stream: int


class _Times:
    """When and to which stream each byte of a file was written. Pairs are unpacked as needed: there may be many."""

    def __init__(self, path: Path) -> None:
        """Of `X.log.1` they are in `X.log.times.1`."""
        suffix = ".1" if path.name.endswith(".1") else ""
        self._raw = b""
        with contextlib.suppress(OSError):
            self._raw = path.with_name(f"{path.name.removesuffix('.1')}{_TIMES}{suffix}").read_bytes()
        self._count = len(self._raw) // _PAIR.size
        place, written_at = self._pair(0) if self._count else (0, 1)
        #: Where the file begins in the whole output.
        self.begins = place if written_at == 0 else 0
        self._last = _Piece(0, 0, None, UNKNOWN)

    def _pair(self, index: int) -> tuple[int, int]:
        place, written_at = _PAIR.unpack_from(self._raw, index * _PAIR.size)
        return place, written_at

    def _place(self, index: int) -> int:
        return self._pair(index)[0] & _PLACE_MASK

    def at(self, place: int) -> _Piece:
        """The piece with the byte at that position; mostly it is that of the line before."""
        if not self._last.place <= place < self._last.end:
            index = bisect.bisect_right(range(self._count), place, key=self._place) - 1
            first, written_at = self._pair(index) if index >= 0 else (0, 0)
            self._last = _Piece(
                first & _PLACE_MASK,
                self._place(index + 1) if index + 1 < self._count else 1 << STREAM_SHIFT,
                from_micros(written_at) if written_at else None,
                first >> STREAM_SHIFT,
            )
        return self._last

    def end_before(self, moment: datetime) -> bool:
        """Whether each byte is known to be older."""
        if not self._count or self.at(self.begins).time is None:
            return False
        until = micros(moment)
        return all(written_at < until for _, written_at in _PAIR.iter_unpack(self._raw[: self._count * _PAIR.size]))


class FileLogReader(LogReader):
    """Remembers how far each file was read."""

    def __init__(self, folder: Path, part: LogRange | None = None) -> None:
        part = part or LogRange()
        self._folder = folder
        self._max_line = part.max_line
        self._is_exact = part.exact
        self._decode = _exact_text if part.exact else line_text
        self._attempt = part.attempt
        self._since = part.since
        #: By file, the place behind the last line that was read.
        self._places: dict[str, int] = {}
        self._first: tuple[int, str] | None = None
        if part.after is not None:
            match = _CURSOR.fullmatch(part.after)
            if match is None:
                raise fault("after", "must be the cursor of a line", part.after)
            key = f"{match[1]}-{match[2] or ''}"
            self._first = int(match[1]), key
            self._places[key] = int(match[3])

    def read(self, select: Select, *, last: bool) -> Iterator[LogLine]:
        for group in self._attempts():
            for file in self._in_order(group):
                yield from self._selected(select, self._forward(file, last=last))

    def read_last(self, count: int, select: Select, *, last: bool) -> list[LogLine]:
        lines: deque[LogLine] = deque()
        for group in reversed(self._attempts()):
            for file in reversed(self._in_order(group)):
                backward = self._backward(file, last=last)
                if len(lines) < count:
                    lines.extendleft(islice(self._selected(select, backward), count - len(lines)))
                elif last:
                    return list(lines)
                else:
                    next(backward, None)  # notes how far the file goes
        return list(lines)

    def _selected(self, select: Select, lines: Iterator[LogLine]) -> Iterator[LogLine]:
        return (shown for line in lines if self._is_recent(line) and (shown := select(line)) is not None)

    def _is_recent(self, line: LogLine) -> bool:
        return self._since is None or line.time is None or line.time >= self._since

    def _attempts(self) -> list[list[_File]]:
        """The files of each attempt, oldest attempt first, without those before the cursor."""
        files: list[_File] = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match is not None and self._attempt in {None, int(match[1])}:
                    files.append(_File(int(match[1]), match[2] or "", path))
        files.sort(key=lambda file: file.attempt)
        groups = [list(group) for _, group in groupby(files, key=lambda file: file.attempt)]
        return [group for group in groups if self._first is None or group[0].attempt >= self._first[0]]

    def _in_order(self, files: list[_File]) -> list[_File]:
        """The runs of one attempt, oldest first, from that of the cursor on."""
        ordered = sorted(files, key=_begun) if len(files) > 1 else files
        keys = [file.key() for file in ordered]
        return ordered[keys.index(self._first[1]) :] if self._first is not None and self._first[1] in keys else ordered

    def _forward(self, file: _File, *, last: bool) -> Iterator[LogLine]:
        key = file.key()
        place = self._places.get(key, 0)
        for half in file.halves():
            is_complete = last or half != file.path  # a file that was turned over grows no more
            with contextlib.suppress(FileNotFoundError), half.open("rb") as opened:
                end = opened.seek(0, io.SEEK_END)
                times = _Times(half)
                if is_complete and self._is_old(times):
                    place = self._places[key] = max(place, times.begins + end)
                    continue
                place = max(place, times.begins)
                pieces = self._pieces_exact if self._is_exact else self._pieces_by_line
                for piece in pieces(opened, place, end, times):
                    if not self._is_exact and not is_complete and self._is_unfinished(piece):
                        break
                    place = self._places[key] = place + len(piece)
                    if (line := self._line(file, piece, place, times)) is not None:
                        yield line

    def _pieces_by_line(self, opened: BinaryIO, place: int, end: int, times: _Times) -> Iterator[bytes]:
        """Not beyond `end`: of what was written since, `times` does not know the stream."""
        rest = end - opened.seek(place - times.begins)
        while rest > 0 and (piece := opened.readline(min(self._max_line, rest))):
            rest -= len(piece)
            yield piece

    def _pieces_exact(self, opened: BinaryIO, place: int, end: int, times: _Times) -> Iterator[bytes]:
        """As it was written, without a look at lines: there may be millions of them."""
        rest = end - opened.seek(place - times.begins)
        while rest > 0 and (piece := opened.read(min(self._max_line, rest, times.at(place).end - place))):
            rest -= len(piece)
            place += len(piece)
            yield piece

    def _is_unfinished(self, piece: bytes) -> bool:
        """Whether the end of the line is not written yet."""
        return not piece.endswith(b"\n") and len(piece) < self._max_line

    def _backward(self, file: _File, *, last: bool) -> Iterator[LogLine]:
        """What `_forward` gives, newest first. At its first step all of it counts as read."""
        key = file.key()
        bound = self._places.get(key, 0)
        for half in reversed(file.halves()):
            is_complete = last or half != file.path
            with contextlib.suppress(FileNotFoundError), half.open("rb") as opened:
                end = opened.seek(0, io.SEEK_END)
                times = _Times(half)
                start = max(bound - times.begins, 0)
                if not is_complete:
                    end -= self._unfinished(opened, start, end)
                self._places[key] = max(self._places.get(key, 0), times.begins + end)
                if is_complete and self._is_old(times):
                    continue
                for offset, line in _lines_backward(opened, start, end):
                    for cut in reversed(range(0, len(line), self._max_line)):
                        piece = line[cut : cut + self._max_line]
                        shown = self._line(file, piece, times.begins + offset + cut + len(piece), times)
                        if shown is not None:
                            yield shown

    def _unfinished(self, opened: BinaryIO, start: int, end: int) -> int:
        """How many bytes at the end are a line whose end is not written yet."""
        for _, line in _lines_backward(opened, start, end):
            return 0 if line.endswith(b"\n") else len(line) % self._max_line
        return 0

    def _is_old(self, times: _Times) -> bool:
        return self._since is not None and times.end_before(self._since)

    def _line(self, file: _File, piece: bytes, place: int, times: _Times) -> LogLine | None:
        """None where it is only the line end that we added."""
        first, last = times.at(place - len(piece)), times.at(place - 1)
        if last.stream == OURS and first.stream != OURS:  # we ended the line, because the other stream began one
            piece, last = piece[:-1], times.at(place - 2)
        elif last.stream == OURS and not (piece := piece.removeprefix(b"\n")):
            return None
        return LogLine(
            attempt=file.attempt,
            text=self._decode(piece),
            cursor=f"{file.key()}:{place}",
            time=last.time,
            stream=_STREAMS.get(first.stream),
        )


def _lines_backward(opened: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines between two offsets of a file with the offset of each, newest first, each with its end."""
    rest = b""  # of a line whose beginning is not read yet
    while end > start:
        size = min(max(_BLOCK, len(rest)), end - start)
        end -= size
        opened.seek(end)
        lines = io.BytesIO(opened.read(size) + rest).readlines()
        place = end + sum(map(len, lines))
        for line in reversed(lines[1:]):
            place -= len(line)
            yield place, line
        rest = lines[0]
    if rest:
        yield start, rest


def _begun(file: _File) -> int:
    """Microseconds since 1970 at the first output."""
    for suffix in (".1", ""):
        with contextlib.suppress(OSError), file.path.with_name(f"{file.path.name}{_TIMES}{suffix}").open("rb") as times:
            while len(pair := times.read(_PAIR.size)) == _PAIR.size:
                written_at: int = _PAIR.unpack(pair)[1]
                if written_at:
                    return written_at
    with contextlib.suppress(OSError):
        return file.path.stat().st_mtime_ns // 1000
    return 0


def line_text(line: bytes) -> str:
    return clean_text(line.decode("utf-8", "replace")).rstrip("\r\n")


def _exact_text(line: bytes) -> str:
    return line.decode("latin-1")
