"""A command: each request is one run, a unit of its own in the cell of the instance.

Between two runs there is no process, and the cell is alive. A run that has ended keeps its exit record and its log with
the holder until the manager acknowledges the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from ostler.agents import CommandSpec
from ostler.agents.command import STOP_GRACE_S, Place, Start, place_of, prompt_of, require_runnable, start_of
from ostler.agents.failures import execution_error
from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.drivers.start import Wishes, driven_start, require_installed
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.home import HOMES
from ostler.isolation.base import Exit, Listener, StartPlan, Usage, Verb
from ostler.isolation.calls import wake
from ostler.isolation.held.cell import HeldCell, Tasks, enforcement_of, require_workdir
from ostler.isolation.held.command_run import DriverOutput, Run, adopted_place
from ostler.isolation.held.exit import LOST
from ostler.isolation.holder import CellLimits, Command, Holder, HolderError, StartOrder, UnitExit, UnitStatus
from ostler.isolation.mailbox import Mailbox, context_of
from ostler.isolation.process.limits import box_limits, niceness
from ostler.isolation.process.logs import LOG_BYTES, log_of, prune_runs, remove_log
from ostler.isolation.process.umask import own_umask
from ostler.keeper.terminal import DEFAULT_SIZE
from ostler.model.states import IsolationLevel

_TERM = "xterm-256color"


class CommandCell(HeldCell):
    TERM_SECONDS = 3600.0

    def __init__(  # noqa: PLR0913 - what every held cell has, and what a command needs
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
        #: The holder that the stored handle names, and the present one.
        self._started_at: str | None = holder.identity
        self._held_by = holder.identity
        self._quiet = False
        self._enforcement = enforcement_of(holder.about.get("enforcement") or {})
        mailbox = Mailbox(self._loop, listener, plan.attempt)
        self._driver = None if spec.driver is None else DriverOutput(holder.directory, plan, spec, spec.driver, mailbox)
        self._context = context_of(plan, clock, mailbox)
        self._runs: dict[UUID, Run] = {}
        self._forgetting: dict[UUID, asyncio.Task[None]] = {}
        self._starting: set[asyncio.Future[Any]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._changing = asyncio.Lock()
        #: CPU seconds of runs whose group is gone, and the most that was ever reported: the count never falls.
        self._cpu_before = self._cpu_reported = 0.0

    # --- adoption ---

    async def adopt(self, status: UnitStatus) -> None:
        """A run that an earlier manager began. Raises `HolderError`."""
        call_id = UUID(hex=status.unit.rpartition(".")[2])
        run = self._add_run(call_id, adopted_place(self._plan, self._spec, call_id))
        run.is_asked = run.is_started = True
        try:
            status = await self._holder.attach(run.unit, partial(self._run_ended, run))
        except HolderError as error:
            if error.kind != "unknown":
                raise
            del self._runs[call_id]  # forgotten meanwhile
            return
        if status.frozen:
            self._frozen = True
            self._thawed.clear()
        self._follow(run)
        if status.exit is not None:
            self._run_ended(run, status.exit)

    def report(self, handle: Mapping[str, Any] | None) -> None:
        """All runs of the earlier manager are adopted."""
        self._started_at = (handle or {}).get("holder")
        self._left = self._left or self.may_have_lost_calls
        # No manager waits for the answer of a run that it stopped. Only now: logs are pruned with it.
        self.ack([run.call_id for run in self._runs.values() if run.record and run.record.by in {"stop", "lease"}])
        calls = dict.fromkeys(self._runs, Verb.PROCESS)
        self._loop.call_soon(self._listener.on_report, self._plan.attempt, calls, frozenset())

    # --- the contract ---

    @property
    def handle(self) -> Mapping[str, Any]:
        who = {"instance_id": str(self._plan.instance_id), "attempt": self._plan.attempt}
        return {"level": self._level.value, **who, "holder": self._held_by}

    @property
    def may_have_lost_calls(self) -> bool:
        return self._started_at != self._held_by

    @property
    def is_stuck(self) -> bool:
        return any(run.given_up for run in self._running)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._closing

    @property
    def _running(self) -> list[Run]:
        return [run for run in self._runs.values() if run.is_running]

    def _units(self) -> list[str]:
        return [run.unit for run in self._runs.values()]

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if self._closing:
            raise AgentGoneError
        try:
            match verb:
                case Verb.INITIALIZE:
                    require_workdir(self._plan)
                    if self._driver is not None:
                        require_installed(self._driver.driver, self._spec, self._context)
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
        number = call_id or uuid4()
        while (forgetting := self._forgetting.get(number)) is not None:
            await asyncio.wait((forgetting,))  # the same call again: what was acknowledged is gone before it begins
        if self._closing:
            raise AgentGoneError
        run, start = self._runs.get(number), None
        if run is None:
            run, start = self._make_run(number, payload)
        await self._complete(run, start)
        try:
            if run.record is None or self._stopping is not None:
                raise AgentGoneError
            return run.answer(self._spec, run.record, self._plan.limits.max_memory_mb)
        finally:
            if call_id is None:
                self.ack([number])

    # --- one run ---

    async def _complete(self, run: Run, start: Start | None) -> None:
        """Until its end; `start` when it does not run yet. The run of a cancelled caller is stopped."""
        try:
            if start is not None:
                await self._start(run, start)
            await asyncio.wait((run.over,))
            if run.reading is not None:
                await asyncio.wait((run.reading,))
        except asyncio.CancelledError:
            await self._stop_run(run)
            raise
        except BaseException:
            self._forget(run)
            raise

    def _make_run(self, call_id: UUID, payload: Any) -> tuple[Run, Start]:
        prompt = prompt_of(payload, self._plan.manifest.prompt)
        wishes = Wishes() if self._driver is None else Wishes.of(payload)
        require_workdir(self._plan)
        place = place_of(self._spec, self._context, prompt, call_id.hex)
        try:
            if self._driver is None:
                start = start_of(self._spec, self._context, place, prompt)
            else:
                homes = self._holder.directory / HOMES
                start = driven_start(self._driver.driver, self._spec, self._context, place, prompt, wishes, homes)
                self._driver.journal.begin(call_id.hex, wishes.session, wishes.session_usage)
        except BaseException:
            place.remove()
            raise
        return self._add_run(call_id, place), start

    def _add_run(self, call_id: UUID, place: Place) -> Run:
        run = self._runs[call_id] = Run(self.name, call_id, place, log_of(self._holder.directory, self._plan, call_id))
        return run

    def _follow(self, run: Run) -> None:
        if self._driver is not None:
            self._driver.follow(run, lambda: self._detached)

    async def _start(self, run: Run, start: Start) -> None:
        """Cancelled, it waits until the holder has answered: a stop that is sent before would miss the run."""
        while True:
            await self._holder.open()
            if self._thawed.is_set():
                break
            await self._thawed.wait()
        starting = self._tasks.run(self._start_unit(run, self._order(run, start)))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await wait_ignoring_cancel(starting)
            if not starting.cancelled():
                starting.exception()  # seen, for this caller has gone
            raise
        except HolderError as error:
            if error.kind == "lost" or self._closing:
                raise AgentGoneError from error
            raise AgentExecutionError(f"{start.argv[0]} cannot be run: {error}") from error
        self._follow(run)

    def _order(self, run: Run, start: Start) -> StartOrder:
        return StartOrder(
            unit=run.unit,
            cell=self.name,
            program=self._program(start),
            limits=CellLimits(**box_limits(self._plan)),
            env=self._environment(start),
            cwd=str(start.cwd),
            log=run.log,
            log_bytes=max(LOG_BYTES, self._spec.max_output_bytes),
            log_rate=self._log_rate,
            nice=niceness(self._plan),
            umask=own_umask(),
            options=self._plan.options,
        )

    async def _start_unit(self, run: Run, order: StartOrder) -> None:
        for is_last in (False, True):
            if self._closing:
                raise AgentGoneError
            remove_log(run.log)  # of an earlier run of the same call
            run.is_asked, run.early = True, None
            try:
                status = await self._holder.start(order, partial(self._run_ended, run))
            except HolderError as error:
                run.is_late = error.kind == "late"
                if error.kind != "taken" or is_last:
                    raise
                # An earlier manager was killed while it began the same call.
                await self._holder.stop(run.unit, 0.0)
                await self._holder.forget(run.unit)
            else:
                break
        run.is_started = True
        self._enforcement = enforcement_of(status.enforcement)
        if run.early is not None:
            self._run_ended(run, run.early)

    def _environment(self, start: Start) -> Mapping[str, str]:
        return {**start.env, "TERM": _TERM} if self._plan.terminal and start.env["TERM"] == "dumb" else start.env

    def _program(self, start: Start) -> Command:
        terminal = self._plan.terminal or (DEFAULT_SIZE if start.pty else None)
        return Command(argv=start.argv, stdin=start.stdin, open_stdin=self._plan.open_stdin, terminal=terminal)

    def _run_ended(self, run: Run, record: UnitExit) -> None:
        if self._detached:
            return
        if record.by == "taken":
            self.detach()
            return
        if not run.is_started and record.by != "lost":
            run.early = record
            return
        run.place.remove()
        self._cpu_before += record.cpu_seconds
        self._left = self._left or bool(record.left)
        if record.by == "lost":
            self._end_unasked(LOST)
        else:
            run.record = record
        wake(run.over)
        if run.given_up:
            self._forget(run)

    async def _stop_run(self, run: Run) -> None:
        """The caller was cancelled; further cancelling does not shorten the wait, which the holder bounds."""
        if run.is_running and run.is_started:
            # A frozen run cannot handle a signal, and thawing for it would thaw the others.
            stopping = self._tasks.run(self._kill(0.0 if self._frozen else STOP_GRACE_S, run.unit))
            await wait_ignoring_cancel(stopping)
            run.given_up = bool(stopping.result()) and run.is_running
        if not run.given_up:
            self._forget(run)

    # --- after it ---

    def ack(self, calls: Collection[UUID] = (), message: int = 0) -> None:
        if message and self._driver is not None:
            self._driver.journal.confirm(message)
        for call_id in calls:
            run = self._runs.get(call_id)
            if run is not None and not run.is_running:
                self._forget(run)

    def _forget(self, run: Run) -> None:
        """Its answer is acknowledged, or it has none: no record of it stays with the holder."""
        if self._detached or self._runs.get(run.call_id) is not run:
            return
        del self._runs[run.call_id]
        run.place.remove()
        wake(run.over)
        if self._driver is not None:
            self._driver.end(run)
        if run.is_asked and not self._closing:
            task = self._forgetting[run.call_id] = self._tasks.run(self._forget_unit(run))
            task.add_done_callback(lambda _: self._forgetting.pop(run.call_id, None))

    async def _forget_unit(self, run: Run) -> None:
        prune_runs(self._holder.directory, self._plan, self._runs)
        if run.is_late:
            await self._erase(run.unit)
            return
        try:
            await self._holder.forget(run.unit)
        except HolderError as error:
            if error.kind == "late":
                await self._erase(run.unit)

    async def ping(self) -> None:
        if self._closing:
            raise AgentGoneError

    async def usage(self) -> Usage:
        used, before = Usage(), self._cpu_before
        if self._running:
            try:
                used = await super().usage()
            except AgentGoneError:
                if self._closing:
                    raise
                before = self._cpu_before  # the group went with the last run
        self._cpu_reported = max(self._cpu_reported, before + used.cpu_seconds)
        return Usage(cpu_seconds=self._cpu_reported, memory_bytes=used.memory_bytes, thread_count=used.thread_count)

    async def freeze(self) -> None:
        async with self._changing:
            before, self._frozen = self._frozen, True
            self._thawed.clear()  # a run that would begin waits
            while self._starting:  # a process frozen before its program begins would never answer its start
                await asyncio.wait(self._starting)
            if self._closing:
                raise AgentGoneError
            if not self._running:
                return
            try:
                await self._freeze_units(was_frozen=before)
            except AgentGoneError:  # the group went with its last run; the next run waits all the same
                if self._ended is not None:
                    raise
            except InvalidOperationError:
                self._frozen = before
                if not before:
                    self._thawed.set()
                raise

    async def thaw(self) -> None:
        async with self._changing:
            try:
                await super().thaw()
            except AgentGoneError:  # the group went with its last run
                if self._ended is not None:
                    raise
            self._frozen = False
            self._thawed.set()

    # --- the end ---

    async def _end(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        self._thawed.set()
        return await self._end_processes(over, is_running=bool(self._running))

    def _release(self, how: Exit | None) -> None:
        del how
        self._thawed.set()
        for run in self._runs.values():
            wake(run.over)

    def _disconnect(self) -> None:
        """There is no channel to a command."""
