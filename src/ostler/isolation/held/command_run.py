"""One run of a command: from its start to the acknowledgement of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents import CommandSpec
from ostler.agents.command import Place, answer_of, prompt_file_of, temp_of
from ostler.drivers import driver_named
from ostler.isolation.base import StartPlan
from ostler.isolation.held.exit import ended_at, ending_of
from ostler.isolation.holder import UnitExit
from ostler.isolation.mailbox import Mailbox
from ostler.isolation.process.driven import LOOK_SECONDS, DrivenRun, Journal
from ostler.isolation.process.logs import journal_of, read_output


class Run:
    """Exists until its answer is acknowledged, also when its process has ended."""

    def __init__(self, cell: str, call_id: UUID, place: Place, log: Path) -> None:
        self.call_id = call_id
        self.unit = f"{cell}.{call_id.hex}"
        self.place = place
        self.log = log
        #: The holder was asked to start it.
        self.is_asked = False
        #: The holder has answered that it runs.
        self.is_started = False
        #: An exit that came before that answer. It may be that of an earlier run of the same name.
        self.early: UnitExit | None = None
        self.record: UnitExit | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Its caller was cancelled, and it could not be ended.
        self.given_up = False
        #: The holder did not answer: what was begun is ended when it does.
        self.is_late = False
        self.driven: DrivenRun | None = None
        self.reading: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return not self.over.done()

    def answer(self, spec: CommandSpec, record: UnitExit, memory_mb: int) -> dict[str, Any]:
        """From the record and the log, so that every manager answers the same. Raises for a run that failed."""
        ending = ending_of(record, memory_mb)
        if self.driven is not None:
            return self.driven.answer(ending, now=ended_at(record), seconds=record.lasted, dropped=record.dropped)
        output, missing = read_output(self.log, record.written, spec.max_output_bytes)
        return answer_of(spec, ending, output, record.lasted, missing + record.dropped)


class DriverOutput:
    """Reads what a coding agent writes while it runs, and sends it to the listener."""

    def __init__(self, home: Path, plan: StartPlan, spec: CommandSpec, driver: str, mailbox: Mailbox) -> None:
        self.driver = driver_named(driver)
        self._max_output_bytes = spec.max_output_bytes
        self._mailbox = mailbox
        self.journal = Journal(journal_of(home, plan), mailbox)

    def follow(self, run: Run, is_detached: Callable[[], bool]) -> None:
        reader = self.driver.reader(self.journal.before(run.call_id.hex), self._max_output_bytes)
        run.driven = DrivenRun(run.call_id.hex, run.log, reader, self.journal)
        run.reading = asyncio.get_running_loop().create_task(self._read(run, run.driven, is_detached))

    async def _read(self, run: Run, driven: DrivenRun, is_detached: Callable[[], bool]) -> None:
        """Until the run is over, and then to the end of its log."""
        try:
            while not is_detached():
                is_over = not run.is_running
                if driven.catch_up(last=is_over):
                    await asyncio.sleep(0)
                elif is_over:
                    self._mailbox.catch_up()
                    return
                else:
                    await asyncio.wait((run.over,), timeout=LOOK_SECONDS)
        finally:
            driven.close()

    def end(self, run: Run) -> None:
        """Its answer is acknowledged, or it never began."""
        if run.driven is not None and run.reading is not None:
            end = run.driven.end
            run.reading.add_done_callback(lambda _: end())  # its log may not be read to the end yet
        else:
            self.journal.end(run.call_id.hex)


def adopted_place(plan: StartPlan, spec: CommandSpec, call_id: UUID) -> Place:
    """Of a run that an earlier manager began: what is to be removed after it."""
    temp = None if spec.driver is None else temp_of(call_id.hex)
    if plan.workdir is None:
        return Place(cwd=Path("/"), workdir=Path("/"), temp=temp)
    prompt_file = prompt_file_of(plan.workdir, call_id.hex)
    return Place(cwd=plan.workdir, workdir=plan.workdir, prompt_file=prompt_file, temp=temp)
