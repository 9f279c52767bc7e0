"""A level whose cells are held by a `Holder`. Process and container differ only in the holder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import weakref
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from ostler.agents import AgentKind
from ostler.agents.command import identity
from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.drivers import command_of
from ostler.errors import AgentInitializationError, InvalidOperationError, ValidationError
from ostler.isolation.base import (
    Capabilities,
    Cell,
    Console,
    Exit,
    Isolation,
    LeftBehindError,
    Listener,
    Site,
    StartPlan,
)
from ostler.isolation.held.cell import HeldCell, Tasks, cell_name, enforcement_of, require_workdir
from ostler.isolation.held.command_cell import CommandCell
from ostler.isolation.held.console import HeldConsole
from ostler.isolation.held.exit import exit_of
from ostler.isolation.held.python_cell import PythonCell
from ostler.isolation.holder import CellLimits, Holder, HolderError, PythonProgram, StartOrder, UnitExit
from ostler.isolation.process.limits import box_limits, niceness
from ostler.isolation.process.logs import LOG_BYTES, LogFile, log_of, prune
from ostler.isolation.process.sources import source_of
from ostler.isolation.process.umask import own_umask
from ostler.model.attempt import AttemptOutcome

C = TypeVar("C", bound=HeldCell)
_UNKNOWN = Exit(outcome=AttemptOutcome.LOST, detail="no keeper knows of it; it ended, and how is not known")
_ENDED_WITH_MANAGER = Exit(outcome=AttemptOutcome.LOST, detail="it ended with the program of its manager")
_SWEEPS_AT_ONCE = 64


class HeldIsolation(Isolation):
    def __init__(self, clock: Clock, site: Site | None, holder: Holder) -> None:
        super().__init__(clock, site)
        self._holder = holder
        self._tasks = Tasks()
        self._cells: weakref.WeakSet[HeldCell] = weakref.WeakSet()

    def _likely_enforcement(self) -> Mapping[str, str]:
        """Before the holder has said it."""
        return {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            limits=enforcement_of(self._holder.about.get("enforcement") or self._likely_enforcement()),
            freezes=True,
            kills=True,
            outlives_manager=self._site.outlives,
            has_own_process=True,
            has_terminals=self._holder.has_terminals,
            kinds=frozenset(AgentKind),
        )

    def console(self, instance_id: UUID) -> Console:
        return HeldConsole(self._holder, instance_id)

    # --- start ---

    async def prepare(self, plan: StartPlan) -> None:
        if plan.manifest.kind is AgentKind.PYTHON:
            _source_of(plan)
        prune(self._holder.directory, plan)
        await self._holder.open()

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        await self._holder.open()
        if plan.manifest.kind is AgentKind.COMMAND:
            return self._command_cell(plan, listener)
        require_workdir(plan)
        source = _source_of(plan)
        cell = self._remember(self._python_cell(plan, listener))
        try:
            await cell.open(self._order(plan, source), _begin(plan, source))
        except BaseException as error:
            if isinstance(error, HolderError) and error.kind == "taken":
                cell.detach()  # it belongs to another start
                raise AgentInitializationError(f"attempt {plan.attempt} of {plan.name} lives already") from error
            is_ours = isinstance(error, HolderError | OSError)
            reason = self._start_error(plan, source, str(error)) if is_ours else error
            if (left_behind := await self._undo(cell)) is not None:
                raise LeftBehindError(cell, left_behind) from reason
            if reason is error:
                raise
            raise reason from error
        return cell

    async def _undo(self, cell: HeldCell) -> str | None:
        """What could not be ended. In tasks of their own: a second cancellation must not keep it from being undone."""
        stopping = self._tasks.run(cell.stop(timedelta(0)))
        await wait_ignoring_cancel(stopping)
        left_behind: str | None = stopping.result().left_behind
        if left_behind is not None and not cell.is_unanswered:
            return left_behind
        await wait_ignoring_cancel(self._tasks.run(cell.destroy()))  # a holder that hangs ends it when it answers again
        return None

    def _order(self, plan: StartPlan, source: Mapping[str, Any]) -> StartOrder:
        inherited = {name: os.environ[name] for name in self._site.environment if name in os.environ}
        threads = {"OSTLER_MAX_WORKER_THREADS": str(plan.limits.max_worker_threads)}
        cwd = _working_directory()
        return StartOrder(
            unit=cell_name(plan),
            cell=cell_name(plan),
            program=PythonProgram(source=source, env=inherited, cwd=cwd),
            limits=CellLimits(**box_limits(plan)),
            env={**inherited, **plan.env, **identity(plan.instance_id, plan.attempt, plan.workdir), **threads},
            cwd=cwd if plan.workdir is None or plan.owns_workdir else str(plan.workdir),
            log=log_of(self._holder.directory, plan),
            log_bytes=LOG_BYTES,
            log_rate=self._site.output_rate,
            nice=niceness(plan),
            umask=own_umask(),
            options=plan.options,
        )

    def _start_error(self, plan: StartPlan, source: Mapping[str, Any], text: str) -> AgentInitializationError:
        """One sentence; the traceback of the child goes into the log and is the cause."""
        lines = text.strip().splitlines()
        if not lines or not lines[0].startswith("Traceback"):
            return AgentInitializationError(f"its process could not be started: {text}")
        LogFile(log_of(self._holder.directory, plan)).write(text)
        kind, _, reason = lines[-1].partition(": ")
        if kind.startswith("ostler.errors."):
            return AgentInitializationError(f"its process could not be started: {reason}")
        return AgentInitializationError(
            f"its process could not load {source['module']}: {lines[-1]}; the module must be one that another process "
            "can import (installed, or beside your program), and importing it must not fail"
        )

    def _python_cell(self, plan: StartPlan, listener: Listener) -> PythonCell:
        return PythonCell(
            self._clock, self._holder, self._tasks, plan, listener, level=self.level, epoch=self._site.epoch
        )

    def _command_cell(self, plan: StartPlan, listener: Listener) -> CommandCell:
        try:
            spec = command_of(plan.manifest)
            if spec is None:
                raise AgentInitializationError(f"the definition of {plan.name} names no command")
            cell = CommandCell(
                self._clock,
                self._holder,
                self._tasks,
                plan,
                listener,
                spec=spec,
                level=self.level,
                log_rate=self._site.output_rate,
            )
        except ValidationError as error:
            raise AgentInitializationError(f"{plan.name} cannot be started: {error}") from error
        return self._remember(cell)

    def _remember(self, cell: C) -> C:
        self._cells.add(cell)
        return cell

    # --- recovery ---

    async def adopt(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        is_command = plan.manifest.kind is AgentKind.COMMAND
        # A command without a run has no process that could have ended, so it lives on although no holder does.
        start = is_command and self._site.outlives
        if self._site.directory is None or not await self._holder.open(start=start):
            return _ENDED_WITH_MANAGER
        cell = self._command_cell(plan, listener) if is_command else self._python_cell(plan, listener)
        how: Exit | None = None
        try:
            if isinstance(cell, CommandCell):
                await self._adopt_command(cell, handle)
            else:
                how = await self._adopt_python(cell, plan)
        except HolderError as error:
            cell.detach()
            raise InvalidOperationError(f"it cannot be known now what became of it: {error}") from error
        except BaseException:
            cell.detach()
            raise
        if how is not None:
            cell.detach()
            return how
        return self._remember(cell)

    async def _adopt_python(self, cell: PythonCell, plan: StartPlan) -> Exit | None:
        try:
            status = await self._holder.attach(cell.name, cell.unit_ended)
        except HolderError as error:
            if error.kind != "unknown":
                raise
            return await cell.adopt_record(UnitExit(by="lost"), _UNKNOWN)
        if status.exit is not None:
            return await cell.adopt_record(status.exit, exit_of(status.exit, plan.limits.max_memory_mb))
        how = await cell.adopt(status)
        return None if how is None else cell.adopt_ended(how)

    async def _adopt_command(self, cell: CommandCell, handle: Mapping[str, Any] | None) -> None:
        """Between two runs there is no process, so there is always a cell."""
        for status in await self._holder.units(cell.name):
            await cell.adopt(status)
        cell.report(handle)

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        if not await self._holder.open(start=False):
            return 0
        kept = {f"{instance_id.hex}.{attempt}" for instance_id, attempt in keep}
        kept |= {cell.name for cell in self._cells if not cell.is_released}
        lived: dict[str, bool] = {}
        try:
            statuses = await self._holder.units()
        except HolderError as error:
            raise InvalidOperationError(f"the keeper does not say what it holds: {error}") from error
        for status in statuses:
            if status.cell not in kept:
                lived[status.cell] = lived.get(status.cell, False) or status.exit is None
        slots = asyncio.Semaphore(_SWEEPS_AT_ONCE)
        await asyncio.gather(*(self._sweep_cell(name, slots) for name in lived))
        return sum(lived.values())

    async def _sweep_cell(self, name: str, slots: asyncio.Semaphore) -> None:
        async with slots:
            with contextlib.suppress(HolderError):
                await self._holder.stop(name, 0.0)
            with contextlib.suppress(HolderError):
                await self._holder.forget(name)

    async def close(self) -> None:
        for cell in list(self._cells):
            cell.detach()
        await self._tasks.wait(5.0)
        await self._holder.close(leave=self._site.outlives)


def _begin(plan: StartPlan, source: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent learns about itself."""
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


def _source_of(plan: StartPlan) -> Mapping[str, Any]:
    return source_of(plan.maker) if plan.source is None else plan.source


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "/"
