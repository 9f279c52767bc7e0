"""A command: each request is one run, a unit of its own in the cell of the instance.

Between two runs there is no process, and the cell is alive. A run that has ended keeps its exit record and its log with
the holder until the manager acknowledges the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID, uuid4

from ostler.agents import AgentContext, CommandSpec
from ostler.agents.command import (
    STOP_GRACE_S,
    Place,
    Start,
    answer_of,
    place_of,
    prompt_file_of,
    prompt_of,
    require_runnable,
    start_of,
)
from ostler.agents.failures import execution_error
from ostler.clock import Clock
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.isolation.base import Exit, Listener, StartPlan, Usage, Verb
from ostler.isolation.held.cell import HeldCell, Tasks, enforcement_of, require_workdir, wake
from ostler.isolation.held.exit import LOST, ending_of
from ostler.isolation.holder import CellLimits, Command, Holder, HolderError, StartOrder, UnitExit, UnitStatus
from ostler.isolation.mailbox import Mailbox
from ostler.isolation.process.limits import box_limits, niceness
from ostler.isolation.process.logs import LOG_BYTES, log_of, prune_runs, read_output, remove_log
from ostler.isolation.process.umask import own_umask
from ostler.keeper.terminal import DEFAULT_SIZE
from ostler.model.context import ContextData
from ostler.model.states import IsolationLevel

_TERM = "xterm-256color"
_TERM_SECONDS = 3600.0


class _Run:
    """One request, until its answer is acknowledged."""

    def __init__(self, cell: CommandCell, call_id: UUID, place: Place) -> None:
        self.call_id = call_id
        self.unit = f"{cell.name}.{call_id.hex}"
        self.place = place
        self.record: UnitExit | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.given_up = False

    @property
    def is_running(self) -> bool:
        return not self.over.done()


class CommandCell(HeldCell):
    def __init__(
        self,
        clock: Clock,
        holder: Holder,
        tasks: Tasks,
        plan: StartPlan,
        listener: Listener,
        *,
        spec: CommandSpec,
        level: IsolationLevel,
        log_rate: int,
    ) -> None:
        super().__init__(clock, holder, tasks, plan, listener)
        self._spec = spec
        self._level = level
        self._log_rate = log_rate
        self._started_at: str | None = holder.identity
        self._quiet = False
        self._enforcement = enforcement_of(holder.about.get("enforcement") or {})
        self._context = AgentContext(
            instance_id=plan.instance_id,
            attempt=plan.attempt,
            definition_id=plan.manifest.id,
            name=plan.name,
            data=ContextData(plan.context),
            limits=plan.limits,
            clock=clock,
            voice=Mailbox(self._loop, listener, plan.attempt),
            directory=plan.workdir,
            owns_directory=plan.owns_workdir,
            env=plan.env,
        )
        self._runs: dict[UUID, _Run] = {}
        self._starting: set[asyncio.Future[Any]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._changing = asyncio.Lock()
        self._cpu_before = 0.0

    # --- adoption ---

    async def adopt(self, status: UnitStatus) -> None:
        """A run that an earlier manager began."""
        call_id = UUID(hex=status.unit.rpartition(".")[2])
        run = self._runs[call_id] = _Run(self, call_id, self._old_place(call_id))
        status = await self._holder.attach(run.unit, lambda record: self._run_ended(run, record))
        self._frozen = self._frozen or status.frozen
        if self._frozen:
            self._thawed.clear()
        if status.exit is not None:
            self._run_ended(run, status.exit)
            if status.exit.by in {"stop", "lease"}:  # nobody waits for the answer of a run that was stopped
                self.ack([call_id])

    def report(self, handle: Mapping[str, Any] | None) -> None:
        """All runs of the earlier manager are adopted."""
        self._started_at = (handle or {}).get("holder")
        calls = dict.fromkeys(self._runs, Verb.PROCESS)
        self._loop.call_soon(self._listener.on_report, self._plan.attempt, calls, frozenset())

    def _old_place(self, call_id: UUID) -> Place:
        workdir = self._plan.workdir
        if workdir is None:
            return Place(cwd=self._holder.directory, workdir=self._holder.directory)
        return Place(cwd=workdir, workdir=workdir, prompt_file=prompt_file_of(workdir, call_id.hex))

    # --- the contract ---

    @property
    def handle(self) -> Mapping[str, Any]:
        who = {"instance_id": str(self._plan.instance_id), "attempt": self._plan.attempt}
        return {"level": self._level.value, **who, "holder": self._started_at}

    @property
    def may_have_lost_calls(self) -> bool:
        return self._started_at != self._holder.identity

    @property
    def is_stuck(self) -> bool:
        return any(run.given_up for run in self._running)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._closing

    @property
    def _running(self) -> list[_Run]:
        return [run for run in self._runs.values() if run.is_running]

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if self._closing:
            raise AgentGoneError
        try:
            match verb:
                case Verb.INITIALIZE:
                    require_workdir(self._plan)
                    require_runnable(self._spec, self._context)
                case Verb.PROCESS:
                    return await self._process(payload, call_id)
                case Verb.CLEANUP:
                    return []
                case Verb.SHUTDOWN:
                    await asyncio.gather(*(self._kill(STOP_GRACE_S, run.unit) for run in self._running))
        except (AgentExecutionError, AgentGoneError):
            raise
        except Exception as error:
            raise execution_error(error, ours=__file__) from error
        return None

    async def _process(self, payload: Any, call_id: UUID | None) -> dict[str, Any]:
        run = self._runs.get(call_id) if call_id is not None else None
        if run is None:
            prompt = prompt_of(payload, self._plan.manifest.prompt)
            require_workdir(self._plan)
            number = call_id or uuid4()
            run = self._runs[number] = _Run(self, number, place_of(self._spec, self._context, prompt, number.hex))
            try:
                await self._start(run, prompt)
            except BaseException:
                self._forget(run)
                raise
        try:
            await asyncio.wait((run.over,))
        except asyncio.CancelledError:
            await self._stop_run(run)
            raise
        try:
            if run.record is None or self._stopping is not None:
                raise AgentGoneError
            return self._answer(run, run.record)
        finally:
            if call_id is None:
                self.ack([run.call_id])

    async def _start(self, run: _Run, prompt: str) -> None:
        """A cancelled start is undone by the holder's stop."""
        await self._thawed.wait()
        if self._closing:
            raise AgentGoneError
        await self._holder.open()
        start = start_of(self._spec, self._context, run.place, prompt)
        log = log_of(self._holder.directory, self._plan, run.call_id)
        remove_log(log)
        order = StartOrder(
            unit=run.unit,
            cell=self.name,
            program=self._program(start),
            limits=CellLimits(**box_limits(self._plan)),
            env=self._environment(start),
            cwd=str(start.cwd),
            log=log,
            log_bytes=max(LOG_BYTES, self._spec.max_output_bytes),
            log_rate=self._log_rate,
            nice=niceness(self._plan),
            umask=own_umask(),
            options=self._plan.options,
        )
        starting = self._tasks.run(self._start_unit(run, order))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            status = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(HolderError):
                await starting
            await self._stop_run(run)
            raise
        except HolderError as error:
            if error.kind == "lost" or self._closing:
                raise AgentGoneError from error
            raise AgentExecutionError(f"{start.argv[0]} cannot be run: {error}") from error
        self._enforcement = enforcement_of(status.enforcement)

    def _environment(self, start: Start) -> Mapping[str, str]:
        return {**start.env, "TERM": _TERM} if self._plan.terminal and start.env["TERM"] == "dumb" else start.env

    def _program(self, start: Start) -> Command:
        terminal = self._plan.terminal or (DEFAULT_SIZE if start.pty else None)
        return Command(argv=start.argv, stdin=start.stdin, open_stdin=self._plan.open_stdin, terminal=terminal)

    async def _start_unit(self, run: _Run, order: StartOrder) -> UnitStatus:
        try:
            return await self._holder.start(order, lambda record: self._run_ended(run, record))
        except HolderError as error:
            if error.kind != "taken":
                raise
        # An earlier manager was killed while it began the same call.
        await self._holder.stop(run.unit, 0.0)
        await self._holder.forget(run.unit)
        return await self._holder.start(order, lambda record: self._run_ended(run, record))

    def _run_ended(self, run: _Run, record: UnitExit) -> None:
        run.place.remove()
        if record.by == "taken":
            self.detach()
        elif record.by == "lost":
            self._end_unasked(LOST)
        else:
            run.record = record
        wake(run.over)
        if run.given_up:
            self._forget(run)

    def _answer(self, run: _Run, record: UnitExit) -> dict[str, Any]:
        """From the record and the log, so that every manager answers the same. Raises for a run that failed."""
        log = log_of(self._holder.directory, self._plan, run.call_id)
        output, missing = read_output(log, record.written, self._spec.max_output_bytes)
        return answer_of(self._spec, ending_of(record), output, record.lasted, missing + record.dropped)

    async def _stop_run(self, run: _Run) -> None:
        """The caller was cancelled; further cancelling does not shorten the wait, which the holder bounds."""
        if run.is_running:
            stopping = self._tasks.run(self._kill(0.0 if self._frozen else STOP_GRACE_S, run.unit))
            while not stopping.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((stopping,))
            run.given_up = bool(stopping.result())
        if not run.given_up:
            self._forget(run)

    def ack(self, calls: Collection[UUID] = (), message: int = 0) -> None:
        for call_id in calls:
            run = self._runs.get(call_id)
            if run is not None and not run.is_running:
                self._forget(run)

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run.call_id, None)
        run.place.remove()
        if not self._closing:
            self._tasks.run(self._forget_unit(run))

    async def _forget_unit(self, run: _Run) -> None:
        prune_runs(self._holder.directory, self._plan, self._runs)
        with contextlib.suppress(HolderError):
            await self._holder.forget(run.unit)

    async def ping(self) -> None:
        if self._closing:
            raise AgentGoneError

    async def usage(self) -> Usage:
        if not self._running:
            return Usage(cpu_seconds=self._cpu_before)
        try:
            return await super().usage()
        except AgentGoneError:
            return Usage(cpu_seconds=self._cpu_before)

    async def freeze(self) -> None:
        async with self._changing:
            self._frozen = True
            self._thawed.clear()
            while self._starting:  # a process frozen before its program begins would never answer its start
                await asyncio.wait(self._starting)
            if not self._running:
                return
            try:
                await super().freeze()
            except AgentGoneError:  # the cell went with its last run; the next run waits all the same
                if self._ended is not None:
                    raise
            except InvalidOperationError:
                self._frozen = False
                self._thawed.set()
                raise

    async def thaw(self) -> None:
        async with self._changing:
            with contextlib.suppress(AgentGoneError):  # the cell went with its last run
                await super().thaw()
            self._frozen = False
            self._thawed.set()

    # --- the end ---

    async def _end(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        self._thawed.set()
        if not self._running:
            return True, []
        if not over.done() and (left := await self._terminate(over, _TERM_SECONDS)) is not None:
            return True, left
        return False, await self._kill()

    def _release(self, how: Exit | None) -> None:
        self._thawed.set()
        for run in self._runs.values():
            wake(run.over)

    def _disconnect(self) -> None:
        return
