"""What an agent wrote, line by line with times and cursors, as its level gives it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

from ostler.agents.registry import AgentManifest
from ostler.drivers import driver_of
from ostler.home import HOMES, LOGS
from ostler.isolation.log_files import MAX_LINE, InstanceLogs, LogRange
from ostler.lifecycle.instance import Runtime
from ostler.lifecycle.observe import LastEvent, is_over
from ostler.model.instance import AgentInstance
from ostler.model.log import LogLine, Stream
from ostler.model.spawn import AgentSpawnOptions

#: How often a followed file is looked at.
LOOK_SECONDS = 0.2
_MAX_RENDERED = 8 * 1024 * 1024
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
    #: Only of this stream; a line whose stream is not known is of standard output.
    stream: Stream | None = None
    #: Go on over restarts, until the instance has ended.
    follow: bool = False
    #: As a person reads it; None: as it was written. A line for which it gives None is left out.
    render: Render | None = None
    #: Each character of a text is one byte that was written (ISO 8859-1), the end of the line among them.
    exact: bool = False

    def select(self, line: LogLine) -> LogLine | None:
        """The line as it is shown. Text of several lines stays one line of the log: it has one cursor."""
        if self.stream not in {None, line.stream or "stdout"}:
            return None
        if self.render is None:
            return line
        text = self.render(line.text)
        return None if text is None else line.evolve(text=text)


def logs_of(runtime: Runtime, instance: AgentInstance) -> InstanceLogs:
    options = instance.spawn_options or AgentSpawnOptions()
    return runtime.levels.get(options.isolation_level).logs(instance.instance_id)


async def read_log(runtime: Runtime, instance: AgentInstance, window: LogWindow) -> AsyncIterator[LogLine]:
    """Attempt by attempt, oldest first. It is read in a thread: a log may be long."""
    part = LogRange(
        attempt=window.attempt,
        after=window.after,
        since=window.since,
        max_line=MAX_LINE if window.render is None else _MAX_RENDERED,
        exact=window.exact,
    )
    reader = logs_of(runtime, instance).reader(part)
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


def render_of(manifest: AgentManifest) -> Render | None:
    """How the output of such an agent is shown to people; None: as it is."""
    driver = driver_of(manifest)
    return None if driver is None else driver.render


def remove_logs(home: Path, instance_id: UUID) -> int:
    """Remove the output and the private home of an instance; how many bytes that freed."""
    freed = 0
    for folder in (home / LOGS / str(instance_id), home / HOMES / str(instance_id)):
        with contextlib.suppress(OSError):
            freed += sum(path.lstat().st_size for path in folder.rglob("*"))
            shutil.rmtree(folder)
    return freed
