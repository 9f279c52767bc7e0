"""The level itself: what it can do, how an agent is started at the keeper, and how it is found again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from ostler.agents import AgentKind
from ostler.agents.command import identity
from ostler.clock import Clock
from ostler.drivers import command_of
from ostler.errors import AgentInitializationError, InvalidOperationError, OstlerError, ValidationError
from ostler.isolation.base import Capabilities, Cell, Exit, Isolation, Listener, Site, StartPlan
from ostler.isolation.process.cell import ProcessCell
from ostler.isolation.process.command import CommandCell
from ostler.isolation.process.ending import KeptCell, box_of, enforcement_of, require_workdir
from ostler.isolation.process.exits import exit_of
from ostler.isolation.process.home import KeeperHome
from ostler.isolation.process.limits import box_limits, likely_enforcement, niceness
from ostler.isolation.process.link import KeeperError
from ostler.isolation.process.logs import LOG_BYTES, LogFile, log_of, prune
from ostler.isolation.process.sources import source_of
from ostler.isolation.process.templates import Templates
from ostler.isolation.process.umask import own_umask
from ostler.isolation.walls import harden, is_kept
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import IsolationLevel

C = TypeVar("C", bound=KeptCell)

_UNKNOWN = Exit(outcome=AttemptOutcome.LOST, detail="no keeper knows of it; it ended, and how is not known")
_ENDED_WITH_IT = Exit(outcome=AttemptOutcome.LOST, detail="it ended with the program of its manager")
_AT_ONCE = 64
_FORGET_SECONDS = 5.0


class ProcessIsolation(Isolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.PROCESS

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        super().__init__(clock, site)
        self._home = KeeperHome(clock, self._site)
        self._cells: weakref.WeakSet[KeptCell] = weakref.WeakSet()
        self._likely: Mapping[str, str] | None = None
        self._templates = Templates()
        self._hardened = False
        #: How the units of a keeper that is gone ended; None until it is read.
        self._last_will: Mapping[str, Mapping[str, Any]] | None = None
        self._reading = asyncio.Lock()
        #: Boxes in which nothing lives any more, that the keeper is to forget when their ends are written down.
        self._emptied: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """By what the keeper found out, once there is one; each cell says for itself what holds for it."""
        if self._likely is None:
            self._likely = likely_enforcement()
        return Capabilities(
            limits=enforcement_of(self._home.about.get("enforcement") or self._likely),
            freezes=True,
            kills=True,
            outlives_manager=self._home.outlives,
            kinds=frozenset(AgentKind),
        )

    # --- starting ------------------------------------------------------------------------------------

    async def prepare(self, plan: StartPlan) -> None:
        if plan.manifest.kind is AgentKind.PYTHON:
            source_of(plan.maker)
        prune(self._home.directory, plan)
        await self._open()

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        await self._open()
        if plan.manifest.kind is AgentKind.COMMAND:
            return self._command(plan, listener)
        if self._home.has_tenant(box_of(plan)):
            raise AgentInitializationError(f"attempt {plan.attempt} of {plan.name} lives already")
        require_workdir(plan)
        source = source_of(plan.maker)
        cell = self._noted(ProcessCell(self._clock, self._home, plan, listener, self._site.epoch))
        try:
            await cell.open(self._asked(plan, source), _begin(plan, source))
        except BaseException as error:
            if isinstance(error, KeeperError) and error.kind == "taken":
                cell.detach()  # it belongs to another start, and must not be touched
            else:
                # In a task of its own: a second cancelling must not keep it from being undone.
                await asyncio.shield(self._home.run(cell.destroy()))
            if isinstance(error, KeeperError | OSError):
                raise self._not_started(plan, source, str(error)) from error
            raise
        return cell

    def _not_started(self, plan: StartPlan, source: Mapping[str, Any], told: str) -> AgentInitializationError:
        """One sentence. The traceback of the child, where there is one, goes into the log; it is the cause, too."""
        lines = told.strip().splitlines()
        if not lines or not lines[0].startswith("Traceback"):
            return AgentInitializationError(f"its process could not be started: {told}")
        LogFile(log_of(self._home.directory, plan)).write(told)
        last = lines[-1]
        kind, _, text = last.partition(": ")
        if kind.startswith("ostler.errors."):
            return AgentInitializationError(f"its process could not be started: {text}")
        return AgentInitializationError(
            f"its process could not load {source['module']}: {last}; the module must be one that another process can "
            "import (installed, or beside your program), and importing it must not fail"
        )

    async def _open(self, *, start: bool = True) -> bool:
        if not self._hardened and (start or is_kept(self._home.directory)):  # before there is an agent that could look
            self._hardened = True
            harden()
        return await self._home.open(start=start)

    def _command(self, plan: StartPlan, listener: Listener) -> CommandCell:
        try:
            spec = command_of(plan.manifest)
            if spec is None:
                raise AgentInitializationError(f"the definition of {plan.name} names no command")
            cell = CommandCell(self._clock, self._home, plan, listener, spec)
        except ValidationError as error:
            raise AgentInitializationError(f"{plan.name} cannot be started: {error}") from error
        return self._noted(cell)

    def _noted(self, cell: C) -> C:
        self._cells.add(cell)
        return cell

    def _asked(self, plan: StartPlan, source: Mapping[str, Any]) -> dict[str, Any]:
        """What the keeper is told of it."""
        passed = {name: os.environ[name] for name in self._site.environment if name in os.environ}
        cwd = _working_directory()
        threads = {"OSTLER_MAX_WORKER_THREADS": str(plan.limits.max_worker_threads)}
        own = {**plan.env, **identity(plan.instance_id, plan.attempt, plan.workdir), **threads}
        return {
            "leaf": None,
            "limits": box_limits(plan),
            "how": self._templates.find(source, passed, cwd),
            "env": {**passed, **own},
            "cwd": cwd if plan.workdir is None or plan.owns_workdir else str(plan.workdir),
            "log": str(log_of(self._home.directory, plan)),
            "log_bytes": LOG_BYTES,
            "log_rate": self._site.output_rate,
            "pty": False,
            "channel": True,
            "stdin": False,
            "nice": niceness(plan),
            "umask": own_umask(),
        }

    # --- finding again -------------------------------------------------------------------------------

    async def recover(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        # Where agents end with their program there is a keeper only if an earlier manager had them go on.
        if self._site.directory is None or not await self._open(start=self._home.outlives):
            return await self._ended_with_it(plan)
        if plan.manifest.kind is AgentKind.COMMAND:
            return await self._recovered_command(handle, plan, listener)
        box = box_of(plan)  # the keeper knows it by its instance and attempt
        cell = ProcessCell(self._clock, self._home, plan, listener, self._site.epoch)
        before = self._home.move_in(box, cell)
        try:
            if isinstance(before, ProcessCell):
                before.detach()
                self._home.move_in(box, cell)
            found = await self._adopted(cell, box)
        except BaseException:
            cell.detach()
            raise
        if isinstance(found, Exit):
            cell.detach()
        return found

    async def _ended_with_it(self, plan: StartPlan) -> Exit:
        """It ended with the program of its manager. If its keeper saw how, it has written that down."""
        async with self._reading:
            if self._last_will is None:
                self._last_will = await self._home.read_last_will()
        record = self._last_will.get(box_of(plan))
        return _ENDED_WITH_IT if record is None else exit_of(record, plan.limits.max_memory_mb)

    async def _adopted(self, cell: ProcessCell, box: str) -> Cell | Exit:
        try:
            status, fds = await self._home.ask("attach", unit=box)
        except KeeperError as error:
            if error.kind == "unknown":
                with contextlib.suppress(KeeperError):  # a start whose manager is gone may just be on its way out
                    await self._home.strike(box)
                return _UNKNOWN
            raise InvalidOperationError(f"the keeper of this home does not say what became of it: {error}") from error
        if status.get("exit"):
            for one in fds:
                cell.hear_out(socket.socket(fileno=one))
            return exit_of(status["exit"], cell.memory_mb)
        if cell.is_gone and cell.ended is not None:  # the notice of its end came between the answer and here
            cell.hear_out(socket.socket(fileno=fds[0]))
            return cell.ended
        await cell.adopt(socket.socket(fileno=fds[0]), status)
        # One that has only said that it is about to end is still to be seen to its end.
        return (cell.ended if cell.is_gone else None) or self._noted(cell)

    async def _recovered_command(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell:
        """Between two runs there is nothing that could have died, so there is always a cell."""
        cell = self._command(plan, listener)
        statuses = []
        units = self._home.units_in(box_of(plan))
        if box_of(plan) in units:  # a run of which only so much is known that something outlived it
            units.discard(box_of(plan))
            cell.lose()
        for unit in units:
            with contextlib.suppress(KeeperError):
                status, fds = await self._home.ask("attach", unit=unit)
                _close_all(fds)
                statuses.append(status)
        cell.adopt(handle, statuses)
        return cell

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        if not await self._open(start=False):
            await self._home.sweep_dead()
            return 0
        kept = {f"{instance_id.hex}.{attempt}" for instance_id, attempt in keep} | self._home.boxes_in_use()
        boxes: dict[str, bool] = {}
        try:
            units = (await self._home.request("list")).get("units", ())
        except KeeperError as error:
            raise InvalidOperationError(f"the keeper of this home does not say what it has: {error}") from error
        for one in units:
            if one["box"] not in kept:
                boxes[one["box"]] = boxes.get(one["box"], False) or one.get("exit") is None
        places = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._swept(box, places) for box in boxes))
        return sum(boxes.values())

    async def _swept(self, box: str, places: asyncio.Semaphore) -> None:
        async with places:
            with contextlib.suppress(KeeperError):
                await self._home.strike(box)
            with contextlib.suppress(KeeperError):
                await self._home.request("forget", box=box)

    async def kill_survivors(self, instance_id: UUID) -> str | None:
        left: list[str] = []
        try:
            if not await self._open(start=self._home.was_killed()):  # the next one finds what outlived it
                await self._home.read_remains()
            for box in self._home.remains.of(instance_id):
                await self._open()
                still = await self._home.strike(box)
                left += still
                if not still:
                    self._emptied.add(box)
                    self._clock.call_later(_FORGET_SECONDS, partial(self._forget_later, box))
        except (OstlerError, KeeperError, OSError) as error:
            left.append(f"{error}, and what lives of it is not known")
        return "; ".join(left) or None

    async def forget(self, instance_id: UUID, attempt: int) -> None:
        await self._forget(f"{instance_id.hex}.{attempt}")

    def _forget_later(self, box: str) -> None:
        """Not at once: how it ended may not be written down yet, and then the next manager has to ask."""
        self._home.run(self._forget(box))

    async def _forget(self, box: str) -> None:
        self._emptied.discard(box)
        with contextlib.suppress(KeeperError):
            await self._home.request("forget", box=box)

    async def close(self) -> None:
        for box in tuple(self._emptied):
            await self._forget(box)
        for cell in list(self._cells):
            cell.detach()
        await self._home.close()


def _begin(plan: StartPlan, source: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent is told of itself."""
    return {
        "instance_id": str(plan.instance_id),
        "attempt": plan.attempt,
        "name": plan.name,
        "definition_id": str(plan.manifest.id),
        "context": dict(plan.context),
        "limits": json.loads(plan.limits.to_json()),
        "workdir": None if plan.workdir is None else str(plan.workdir),
        "owns_workdir": plan.owns_workdir,
        "env": dict(plan.env),
        "source": dict(source),
    }


def _working_directory() -> str:
    """The manager's own, as at the other levels; one that was removed cannot be gone to."""
    try:
        return str(Path.cwd())
    except OSError:
        return "/"


def _close_all(fds: list[int]) -> None:
    for one in fds:
        os.close(one)
