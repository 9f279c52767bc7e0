"""What an agent wrote to its standard output and error, read from the files that the keeper fills."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

from ostler.isolation.process.logs import LOGS
from ostler.lifecycle.instance import Runtime
from ostler.model.instance import AgentInstance
from ostler.model.record import Record, record
from ostler.model.states import INACTIVE_STATES
from ostler.model.text import clean_text
from ostler.store import moves

#: How often a followed file is looked at.
_LOOK_SECONDS = 0.2
_CHUNK = 256 * 1024
_NAME = re.compile(r"(\d+)(?:-([0-9a-f]{32}))?\.log")


@record
class LogLine(Record):
    """One line of output."""

    attempt: int
    text: str


async def read_log(
    runtime: Runtime, instance: AgentInstance, *, attempt: int | None = None, follow: bool = False
) -> AsyncIterator[LogLine]:
    """Attempt by attempt, oldest first. With `follow` it goes on until the instance has ended."""
    if runtime.home is None:
        return
    folder = runtime.home / LOGS / str(instance.instance_id)
    places: dict[Path, tuple[int, bytes]] = {}
    while True:
        current = await runtime.store.read(moves.get_instance, instance.instance_id)
        over = not follow or current is None or current.state in INACTIVE_STATES
        for number, path in _files(folder, attempt):
            lines, places[path] = _lines(path, places.get(path, (0, b"")), last=over)
            for line in lines:
                yield LogLine(attempt=number, text=line)
        if over:
            return
        await runtime.clock.sleep(_LOOK_SECONDS)


def _files(folder: Path, attempt: int | None) -> list[tuple[int, Path]]:
    """Files of an attempt, or of one run of a command, in the order of their making."""
    found: list[tuple[int, float, Path]] = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match is not None and attempt in {None, int(match[1])}:
            found.append((int(match[1]), path.stat().st_ctime if match[2] else 0.0, path))
    return [(number, path) for number, _, path in sorted(found)]


def _lines(path: Path, place: tuple[int, bytes], *, last: bool) -> tuple[list[str], tuple[int, bytes]]:
    """Whole lines from a place on, and the place after them; the rest of a line waits for its end."""
    lines: list[str] = []
    offset, rest = place
    try:
        with path.open("rb") as file:
            if offset > path.stat().st_size:  # it was turned over
                offset, rest = 0, b""
            file.seek(offset)
            while chunk := file.read(_CHUNK):
                offset += len(chunk)
                *whole, rest = (rest + chunk).split(b"\n")
                lines += [_text(line) for line in whole]
    except OSError:
        return lines, (offset, rest)
    if last and rest:
        lines.append(_text(rest))
        rest = b""
    return lines, (offset, rest)


def _text(line: bytes) -> str:
    return clean_text(line.decode("utf-8", "replace")).rstrip("\r")
