"""A run that a driver knows: its log is read while it grows, and what it says is reported once, over all managers.

Beside the logs of an attempt lies its journal: how far the log of each run was reported, and what its sessions have
used. Token counts are numbered, so a manager that was killed between the commit and the journal reports nothing twice:
the listener knows the numbers that were committed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from ostler.agents import Message, MetricReported, TokensUsed, Voice
from ostler.agents.command import Ending
from ostler.drivers.base import COST, Reader, SessionUsage
from ostler.isolation.process.logs import begins_at

#: How often the log of a run is looked at.
LOOK_SECONDS = 0.3
#: A longer line is passed over.
_MAX_LINE = 8 * 1024 * 1024
_CHUNK = 256 * 1024
#: So many lines are read in one turn of the loop.
_LINES_AT_ONCE = 500
_KEPT_SESSIONS = 100


class LogFollower:
    """The lines of a log from a place on. Places count from the beginning of the output, also when the file was
    turned over since.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file: BinaryIO | None = None
        #: Where the next byte is read, and what was read and was not given yet: whole lines, and a line's beginning.
        self._place = 0
        self._lines: deque[tuple[int, bytes]] = deque()
        self._rest = b""
        self._is_skipping = False

    def next_line(self, *, last: bool) -> tuple[int, str] | None:
        """A new line and the place behind it. `last`: nothing more will come, so the rest is a line too."""
        while not self._lines and (chunk := self._read()):
            self._take(chunk)
        if not self._lines and last and self._rest:
            rest, self._rest = self._rest, b""
            self._lines.append((self._place, rest))
        if not self._lines:
            return None
        place, line = self._lines.popleft()
        return place, line.decode("utf-8", "replace").rstrip("\r\n")

    def _take(self, chunk: bytes) -> None:
        place = self._place - len(self._rest)
        self._place += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            place += len(line) + 1
            if not self._is_skipping:
                self._lines.append((place, line))
            self._is_skipping = False
        if len(self._rest) > _MAX_LINE:
            self._rest, self._is_skipping = b"", True

    def _read(self) -> bytes:
        """What is new; of a log that was turned over first the rest of its older half."""
        if self._file is None and not (self._open(".1") or self._open("")):
            return b""
        while self._file is not None:
            if chunk := self._file.read(_CHUNK):
                return chunk
            if not self._is_turned_over() or not self._open(""):
                return b""
        return b""

    def _is_turned_over(self) -> bool:
        try:
            return self._file is not None and os.fstat(self._file.fileno()).st_ino != self._log.stat().st_ino
        except OSError:
            return False

    def _open(self, half: str) -> bool:
        try:
            opened = self._log.with_name(f"{self._log.name}{half}").open("rb")
        except OSError:
            return False
        self.close()
        self._file = opened
        begins = begins_at(self._log, half)
        if begins > self._place:  # what lay between is on no disk any more
            self._place, self._rest = begins, b""
        else:
            opened.seek(self._place - begins)
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Journal:
    """What was reported of the runs of one attempt, and where the next manager goes on."""

    def __init__(self, file: Path, voice: Voice) -> None:
        self._file = file
        self._voice = voice
        data = _read_json(file)
        self._number = int(data.get("number") or 0)
        #: The cost of the runs that are over and confirmed.
        self._ended_cost: float | None = data.get("cost_usd")
        self._runs: dict[str, dict[str, Any]] = dict(data.get("runs") or {})
        self._sessions: dict[str, Any] = dict(data.get("sessions") or {})
        self._costs: dict[str, float] = {}
        #: Numbers that were sent and not confirmed, each with the run and the place behind its line.
        self._unconfirmed: deque[tuple[int, str, int]] = deque()

    def begin(self, run: str, session: str | None, usage: SessionUsage | None) -> SessionUsage | None:
        """Note a run before it starts; what the session that it resumes has used, as far as that is known."""
        noted = self._sessions.get(session) if session is not None else None
        before = usage or (None if noted is None else SessionUsage.from_dict(noted))
        self._runs[run] = {"place": 0, "before": None if before is None else before.to_dict()}
        self._write()
        return before

    def before(self, run: str) -> SessionUsage | None:
        usage = self._runs.get(run, {}).get("before")
        return None if usage is None else SessionUsage.from_dict(usage)

    def place(self, run: str) -> int:
        """Up to there everything was reported and committed."""
        return int(self._runs.get(run, {}).get("place") or 0)

    def tell(self, run: str, place: int, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case TokensUsed():
                    self._number += 1
                    self._unconfirmed.append((self._number, run, place))
                    self._voice.say(replace(message, number=self._number))
                case MetricReported(name=name, value=value) if name == COST:
                    self._costs[run] = value
                    self._voice.say(
                        MetricReported(name=COST, value=(self._ended_cost or 0.0) + sum(self._costs.values()))
                    )
                case _:
                    self._voice.say(message)

    def note_cost(self, run: str, cost: float | None) -> None:
        """Of lines that are read again and not reported again."""
        if cost is not None:
            self._costs[run] = cost

    def confirm(self, number: int) -> None:
        """The manager has committed every count up to this number."""
        before = len(self._unconfirmed)
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            _, run, place = self._unconfirmed.popleft()
            if run in self._runs:
                self._runs[run]["place"] = place
        if len(self._unconfirmed) < before:
            self._write()

    def end(self, run: str, session: str | None = None, usage: SessionUsage | None = None) -> None:
        """The answer of the run is confirmed, or it never began."""
        if self._runs.pop(run, None) is None:
            return
        if (cost := self._costs.pop(run, None)) is not None:
            self._ended_cost = (self._ended_cost or 0.0) + cost
        if session is not None and usage is not None:
            self._sessions.pop(session, None)
            self._sessions[session] = usage.to_dict()
            while len(self._sessions) > _KEPT_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._write()

    def _write(self) -> None:
        """A full disk costs the exact count after a crash, and nothing else."""
        confirmed = self._number - len(self._unconfirmed)
        data = {"number": confirmed, "cost_usd": self._ended_cost, "runs": self._runs, "sessions": self._sessions}
        making = self._file.with_name(f"{self._file.name}.new")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            making.write_text(json.dumps(data))
            making.rename(self._file)


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


class DrivenRun:
    """The reader of one run and its log. Lines that an earlier manager reported are read without a second report."""

    def __init__(self, run: str, log: Path, reader: Reader, journal: Journal) -> None:
        self._run = run
        self._reader = reader
        self._journal = journal
        self._follower = LogFollower(log)

    def catch_up(self, *, last: bool) -> bool:
        """Read what is new; whether there may be more at once."""
        committed = self._journal.place(self._run)
        for _ in range(_LINES_AT_ONCE):
            next_line = self._follower.next_line(last=last)
            if next_line is None:
                return False
            place, line = next_line
            messages = self._reader.feed(line)
            if place > committed:
                self._journal.tell(self._run, place, messages)
            else:
                self._journal.note_cost(self._run, self._reader.cost_usd)
        return True

    def answer(self, ending: Ending, *, now: datetime, seconds: float, dropped: int) -> dict[str, Any]:
        """Once the log was read to its end. Raises for a run that did not end well."""
        return self._reader.finish(ending, now=now, seconds=seconds, dropped=dropped)

    def end(self) -> None:
        """Its answer is confirmed."""
        self._journal.end(self._run, self._reader.session, self._reader.session_usage())

    def close(self) -> None:
        self._follower.close()
