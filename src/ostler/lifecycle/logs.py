"""What an agent wrote, line by line with times and cursors, from the files that the keeper fills."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from ostler.agents.registry import AgentManifest
from ostler.drivers import driver_of
from ostler.isolation.process.logs import HOMES, LOGS, run_log, start_log
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.log_files import MAX_LINE, LogLine, LogReader, line_text
from ostler.lifecycle.observe import LastEvent, is_over
from ostler.model.instance import AgentInstance

#: How often a followed file is looked at.
LOOK_SECONDS = 0.2
_MAX_RENDERED = 8 * 1024 * 1024
_LAST_BYTES = 400
#: Lines that are read at once in a thread, and about how many characters of them.
_LINES_AT_ONCE = 500
_CHARACTERS_AT_ONCE = 256 * 1024
#: What a driver makes of a line.
Render = Callable[[str], str | None]


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

    def select(self, line: LogLine) -> LogLine | None:
        """The line as it is shown. Text of several lines stays one line of the log: it has one cursor."""
        if self.render is None:
            return line
        text = self.render(line.text)
        return None if text is None else line.evolve(text=text)


async def read_log(runtime: Runtime, instance: AgentInstance, window: LogWindow) -> AsyncIterator[LogLine]:
    """Attempt by attempt, oldest first. Files are read in a thread: a log may be long."""
    if runtime.home is None:
        return
    reader = LogReader(
        runtime.home / LOGS / str(instance.instance_id),
        attempt=window.attempt,
        after=window.after,
        since=window.since,
        max_line=MAX_LINE if window.render is None else _MAX_RENDERED,
        exact=window.exact,
    )
    tail = window.tail
    last_event = LastEvent(runtime.fanout, runtime.clock, instance)
    while True:
        over = not window.follow or await runtime.store.read(is_over, instance.instance_id)
        if tail is not None:
            for line in await asyncio.to_thread(reader.read_last, tail, window.select, last=over):
                yield line
            tail = None
        else:
            lines = reader.read(window.select, last=over)
            while batch := await asyncio.to_thread(_some, lines):
                for line in batch:
                    yield line
        if over:
            return
        await last_event.wait(LOOK_SECONDS)


def _some(lines: Iterator[LogLine]) -> list[LogLine]:
    """The next few lines; none at the end."""
    batch, characters = [], 0
    for line in lines:
        batch.append(line)
        characters += len(line.text)
        if len(batch) >= _LINES_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            break
    return batch


#: Control sequences of a terminal: those with parameters, strings up to their end, the rest of two or three characters.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*([@-~])|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])")
#: Sequences that move the cursor, so that what follows is another word.
_MOVES = frozenset("ABCDEFGHadefjk")
_GAP = re.compile(r" {3,}")


def visible_text(line: str) -> str | None:
    """What a person reads of a line that a program drew on a terminal; None for nothing."""
    if "\x1b" not in line and "\b" not in line and "\r" not in line:
        return line
    text = _SEQUENCE.sub(lambda match: " " if match[1] in _MOVES else "", line)
    words = "".join(character if character.isprintable() else " " for character in text)
    return _GAP.sub("  ", words).rstrip() or None


def render_of(manifest: AgentManifest) -> Render | None:
    """How the output of such an agent is shown to people; None: as it is."""
    driver = driver_of(manifest)
    return None if driver is None else driver.render


def last_line(home: Path, instance: Instance) -> str | None:
    """The last line that the present attempt wrote. A file is read again only where it has changed."""
    about = home, instance.instance_id, instance.attempt
    paths = [start_log(*about), *(run_log(*about, call_id) for call_id in instance.calls)]
    newest: tuple[int, int, Path] | None = None
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            newest = max(newest or (0, 0, path), (status.st_mtime_ns, status.st_size, path))
    return None if newest is None else _last_line_of(*newest)


@lru_cache(maxsize=1024)
def _last_line_of(modified: int, size: int, path: Path) -> str | None:
    del modified  # with the size it says which content is meant
    with contextlib.suppress(OSError), path.open("rb") as opened:
        opened.seek(max(size - _LAST_BYTES, 0))
        lines = opened.read().splitlines()
        return visible_text(line_text(lines[-1])) if lines else None
    return None


def remove_logs(home: Path, instance_id: UUID) -> int:
    """Remove the output and the private home of an instance; how many bytes that freed."""
    freed = 0
    for folder in (home / LOGS / str(instance_id), home / HOMES / str(instance_id)):
        with contextlib.suppress(OSError):
            freed += sum(path.lstat().st_size for path in folder.rglob("*"))
            shutil.rmtree(folder)
    return freed
