"""One run of a command at the keeper: what it is started with, how it ends, and what it answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from ostler.agents import CommandSpec
from ostler.agents.command import Place, Start, answer_of, prompt_file_of, temp_of
from ostler.isolation.base import StartPlan
from ostler.isolation.calls import wake
from ostler.isolation.process.driven import DrivenRun
from ostler.isolation.process.exits import ended_at, ending_of, was_lost
from ostler.isolation.process.limits import box_limits, niceness
from ostler.isolation.process.logs import LOG_BYTES, read_output
from ostler.isolation.process.tenants import Tenant
from ostler.isolation.process.umask import own_umask


class Owner(Protocol):
    """The cell of a run."""

    box: str

    def confirm(self, call_id: UUID) -> None: ...
    def lose(self) -> None: ...
    def detach(self) -> None: ...


class Run(Tenant):
    """Exists until its answer is confirmed, also when the process has ended."""

    def __init__(self, owner: Owner, call_id: UUID, place: Place, log: Path) -> None:
        self.owner = owner
        self.call_id = call_id
        self.leaf = call_id.hex
        self.unit = f"{owner.box}.{self.leaf}"
        self.place = place
        self.log = log
        #: The keeper was asked to start it.
        self.is_asked = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.record: Mapping[str, Any] | None = None
        #: The keeper has answered that it runs. An end that is told before may be that of another run of this name.
        self._is_started = False
        self.early: Mapping[str, Any] | None = None
        #: Its caller was cancelled, and it could not be ended.
        self.given_up = False
        #: Where a driver reads its output, and the task in which that happens.
        self.driven: DrivenRun | None = None
        self.following: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return not self.over.done()

    def has_started(self) -> None:
        self._is_started = True
        if self.early is not None:
            self.has_ended(self.early)

    def has_ended(self, record: Mapping[str, Any]) -> None:
        if not self.is_running:
            return  # a keeper that follows another one tells it again
        if not self._is_started and not self.given_up:
            self.early = record
            return
        if was_lost(record):
            self.was_lost()
            return
        self.record = record
        self.place.remove()
        self.finish()
        if self.given_up:
            self.owner.confirm(self.call_id)

    def was_lost(self) -> None:
        if self.is_running:
            self.place.remove()
            self.owner.lose()

    def was_taken(self) -> None:
        self.owner.detach()

    def finish(self) -> None:
        wake(self.over)

    def answer(self, spec: CommandSpec, record: Mapping[str, Any], memory_mb: int) -> dict[str, Any]:
        """By the keeper's record and the log, so that every manager reads the same. Raises for a run that failed."""
        ending = ending_of(record, memory_mb)
        seconds = float(record.get("lasted") or 0.0)
        if self.driven is not None:
            dropped = int(record.get("dropped", 0))
            return self.driven.answer(ending, now=ended_at(record), seconds=seconds, dropped=dropped)
        output, lost = read_output(self.log, int(record.get("written", 0)), spec.max_output_bytes)
        dropped = lost + int(record.get("dropped", 0))
        return answer_of(spec, ending, output, seconds, dropped)

    def asked(self, plan: StartPlan, spec: CommandSpec, start: Start, rate: int) -> dict[str, Any]:
        """What the keeper is told of it."""
        return {
            "unit": self.unit,
            "box": self.owner.box,
            "leaf": self.leaf,
            "limits": box_limits(plan),
            "how": {"argv": list(start.argv)},
            "env": dict(start.env),
            "cwd": str(start.cwd),
            "log": str(self.log),
            "log_bytes": max(LOG_BYTES, spec.max_output_bytes),
            "log_rate": rate,
            "pty": start.pty,
            "channel": False,
            "nice": niceness(plan),
            "umask": own_umask(),
        }


def old_place(plan: StartPlan, spec: CommandSpec, call_id: UUID) -> Place:
    """Of a run that an earlier manager began."""
    temp = None if spec.driver is None else temp_of(call_id.hex)
    if plan.workdir is None:
        return Place(cwd=Path("/"), workdir=Path("/"), temp=temp)
    file = prompt_file_of(plan.workdir, call_id.hex)
    return Place(cwd=plan.workdir, workdir=plan.workdir, prompt_file=file, temp=temp)


def in_memory(text: bytes) -> Any:
    """A file in memory has room for all of it and ends by itself; a pipe would have to be fed."""
    file = os.fdopen(os.memfd_create("ostler-prompt", os.MFD_CLOEXEC), "w+b")
    file.write(text)
    file.seek(0)
    return file
