"""Where the output of agents goes, and how much of it stays."""

from __future__ import annotations

import contextlib
import re
import struct
import threading
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from ostler.agents.command import KeptOutput
from ostler.home import LOGS
from ostler.isolation.base import StartPlan
from ostler.keeper.output import DROPPED, TIME_PAIR, Log

#: A file is turned over at this size, once; so twice as much stays.
LOG_BYTES = 5 * 1024 * 1024
_KEPT_ATTEMPTS = 5
_KEPT_RUNS = 20
_CHUNK = 256 * 1024
_ATTEMPT = re.compile(r"(\d+)[.-].*")


class LogFile:
    """The log of an agent inside the program, bounded and with times as the keeper writes it. From any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._log: Log | None = None

    def write(self, text: str) -> None:
        with self._lock:
            if self._log is None:
                self._log = Log(str(self._path), LOG_BYTES)
            self._log.write(text.encode("utf-8", "backslashreplace"))
            self._log.close()  # ten thousand agents would hold twice as many descriptors


#: Lists and probes ask for the same paths again and again, and making one is slow.
_remembered = lru_cache(maxsize=4096)


@_remembered
def start_log(home: Path, instance_id: UUID, attempt: int) -> Path:
    return home / LOGS / str(instance_id) / f"{attempt}.log"


@_remembered
def run_log(home: Path, instance_id: UUID, attempt: int, run: UUID) -> Path:
    """Of one run of a command."""
    return home / LOGS / str(instance_id) / f"{attempt}-{run.hex}.log"


def log_of(home: Path, plan: StartPlan, run: UUID | None = None) -> Path:
    """Of one start, or of one run of a command."""
    if run is None:
        return start_log(home, plan.instance_id, plan.attempt)
    return run_log(home, plan.instance_id, plan.attempt, run)


def journal_of(home: Path, plan: StartPlan) -> Path:
    """What was told of the runs of one start; see `driven.py`."""
    return home / LOGS / str(plan.instance_id) / f"{plan.attempt}.told"


def begins_at(file: Path, half: str = "") -> int:
    """At which place of the whole output a log file begins, or its older half `.1`. The keeper wrote it down."""
    with contextlib.suppress(OSError, struct.error), file.with_name(f"{file.name}.times{half}").open("rb") as opened:
        place, micros = TIME_PAIR.unpack(opened.read(TIME_PAIR.size))
        return int(place) if micros == 0 else 0
    return 0


def prune(home: Path, plan: StartPlan) -> None:
    """Forget the output of starts that are long past. Never raises."""
    if plan.attempt <= _KEPT_ATTEMPTS:
        return
    with contextlib.suppress(OSError):
        for file in (home / LOGS / str(plan.instance_id)).iterdir():
            match = _ATTEMPT.fullmatch(file.name)
            if match is not None and int(match[1]) <= plan.attempt - _KEPT_ATTEMPTS:
                file.unlink()


def prune_runs(home: Path, plan: StartPlan, running: Collection[UUID] = ()) -> None:
    """A command may run any number of times in one start; the output of the last few stays. Never raises."""
    needed = {log_of(home, plan, run).name for run in running}
    with contextlib.suppress(OSError):
        logs = [log for log in log_of(home, plan).parent.glob(f"{plan.attempt}-*.log") if log.name not in needed]
        if len(logs) <= _KEPT_RUNS:
            return
        for file in sorted(logs, key=lambda log: log.stat().st_mtime_ns)[:-_KEPT_RUNS]:
            remove_log(file)


def remove_log(file: Path) -> None:
    """With its older half and the times of both. Never raises."""
    for suffix in ("", ".1", ".times", ".times.1", DROPPED):
        with contextlib.suppress(OSError):
            file.with_name(f"{file.name}{suffix}").unlink()


def read_output(file: Path, written: int, limit: int) -> tuple[KeptOutput, int]:
    """What a run said, as far as it was kept; and how many bytes of what was written are on no disk any more."""
    output, size = KeptOutput(limit), 0
    for part in (file.with_name(f"{file.name}.1"), file):
        with contextlib.suppress(OSError), part.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                output.feed(chunk)
                size += len(chunk)
    return output, max(written - size, 0)
