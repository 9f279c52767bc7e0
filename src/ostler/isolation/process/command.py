"""A command at level process: each request is one process tree at the keeper, in the box of the instance.

Between two requests there is nothing that lives, so there is nothing that could die.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID, uuid4

from ostler.agents import AgentContext, CommandSpec
from ostler.agents.child import Start
from ostler.agents.command import STOP_GRACE_S, answer_of, place_of, prompt_of, require_runnable, start_of
from ostler.agents.failures import execution_error
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.isolation.base import Exit, Listener, StartPlan, Usage, Verb
from ostler.isolation.calls import wake
from ostler.isolation.mailbox import Mailbox
from ostler.isolation.process.ending import KeptCell, enforcement_of
from ostler.isolation.process.exits import LOST, ending_of, was_lost
from ostler.isolation.process.home import KeeperHome, Tenant
from ostler.isolation.process.limits import box_limits, niceness
from ostler.isolation.process.link import KeeperError
from ostler.isolation.process.logs import LOG_BYTES, log_of, prune_runs, read_output
from ostler.isolation.process.umask import own_umask
from ostler.model import ContextData
from ostler.seams import Clock

#: As long as a keeper waits at most; the manager's own clock says when it is enough.
_PATIENCE_SECONDS = 3600.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Run(Tenant):
    """One run of the program, from its start until its caller has the answer."""

    def __init__(self, cell: CommandCell, call_id: UUID) -> None:
        self.cell = cell
        self.call_id = call_id
        self.leaf = call_id.hex
        self.unit = f"{cell.box}.{self.leaf}"
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.record: Mapping[str, Any] | None = None
        self.stuck = False

    def has_ended(self, record: Mapping[str, Any]) -> None:
        if was_lost(record):
            self.was_lost()
            return
        self.record = record
        self.finish()

    def was_lost(self) -> None:
        self.cell.lose()

    def was_taken(self) -> None:
        self.cell.let_go()

    def finish(self) -> None:
        wake(self.over)


class CommandCell(KeptCell):
    def __init__(self, clock: Clock, home: KeeperHome, plan: StartPlan, listener: Listener, spec: CommandSpec) -> None:
        super().__init__(clock, home, plan, listener)
        self._spec = spec
        self._enforcement = enforcement_of(home.about.get("enforcement") or {})
        self._context = AgentContext(
            instance_id=plan.instance_id,
            attempt=plan.attempt,
            definition_id=plan.manifest.id,
            name=plan.name,
            data=ContextData(plan.context),
            limits=plan.limits,
            clock=clock,
            voice=Mailbox(self._loop, listener, plan.attempt),
            directory=plan.workspace,
        )
        self._runs: dict[UUID, Run] = {}
        self._found: dict[UUID, Run] = {}
        #: Of boxes that went with their last run.
        self._cpu_before = 0.0
        self._tidying = asyncio.Lock()
        self._quiet = False

    def adopt(self, statuses: Iterable[Mapping[str, Any]]) -> None:
        """The runs that an earlier manager began."""
        for status in statuses:
            run = Run(self, UUID(hex=str(status["unit"]).rpartition(".")[2]))
            self._runs[run.call_id] = self._found[run.call_id] = run
            self._frozen = self._frozen or bool(status.get("frozen"))
            before = self._home.move_in(run.unit, run)
            if isinstance(before, Run):
                before.cell.let_go()
                self._home.move_in(run.unit, run)
            if status.get("exit"):
                run.has_ended(status["exit"])

    # --- the contract --------------------------------------------------------------------------------

    @property
    def handle(self) -> Mapping[str, Any]:
        return {"level": "process", "instance_id": str(self._plan.instance_id), "attempt": self._plan.attempt}

    @property
    def is_stuck(self) -> bool:
        return any(run.stuck for run in self._runs.values())

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        return dict.fromkeys(self._found, Verb.PROCESS)

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if self._closing:
            raise AgentGoneError
        match verb:
            case Verb.INITIALIZE:
                await self._told(self._initialize())
            case Verb.PROCESS:
                return await self._told(self._process(call_id or uuid4(), payload))
            case Verb.CLEANUP:
                return []
            case Verb.SHUTDOWN:
                await asyncio.gather(*(self._force(STOP_GRACE_S, run.leaf) for run in tuple(self._runs.values())))
            case _:
                return None
        return None

    async def rejoin(self, call_id: UUID) -> Any:
        run = self._found.pop(call_id, None)
        if run is None:
            return await super().rejoin(call_id)
        return await self._told(self._answered(run))

    async def ping(self) -> None:
        if self._closing:
            raise AgentGoneError

    def alive_now(self) -> bool | None:
        return None if self._runs else not self._closing

    async def freeze(self) -> None:
        if self._runs:
            await super().freeze()

    async def thaw(self) -> None:
        if self._frozen:
            await super().thaw()

    async def usage(self) -> Usage:
        if not self._runs:
            return Usage(cpu_seconds=self._cpu_before)
        used = await super().usage()
        return Usage(
            cpu_seconds=self._cpu_before + used.cpu_seconds,
            memory_bytes=used.memory_bytes,
            thread_count=used.thread_count,
        )

    # --- one run -------------------------------------------------------------------------------------

    @staticmethod
    async def _told(work: Any) -> Any:
        """What goes wrong comes out as it does at the other levels, where an agent raises it."""
        try:
            return await work
        except (AgentExecutionError, AgentGoneError):
            raise
        except Exception as error:
            raise execution_error(error, ours=__file__) from error

    async def _initialize(self) -> None:
        require_runnable(self._spec, self._context)

    async def _process(self, call_id: UUID, payload: Any) -> dict[str, Any]:
        if call_id in self._runs:
            raise InvalidOperationError(f"call {call_id} was made before; rejoin it")
        prompt = prompt_of(payload, self._plan.manifest.prompt)
        with place_of(self._spec, self._context, prompt) as place:
            start = start_of(self._spec, self._context, place, prompt)
            run = self._runs[call_id] = Run(self, call_id)
            return await self._answered(run, start)

    async def _answered(self, run: Run, start: Start | None = None) -> dict[str, Any]:
        """Through to its end; `start` when it does not run yet. What is not over by then is stopped."""
        began = None if start is None else self._clock.mono()
        try:
            if start is not None:
                await self._begin(run, start)
            await asyncio.wait((run.over,))
        except asyncio.CancelledError:
            await self._end(run)
            raise
        finally:
            if not run.stuck:
                self._part(run)
        record = run.record
        if record is None or self._stopping is not None:
            raise AgentGoneError
        seconds = _lasted(record) if began is None else self._clock.mono() - began
        output, lost = read_output(self._log(run), int(record.get("written", 0)), self._spec.max_output_bytes)
        return answer_of(self._spec, ending_of(record), output, seconds, lost + int(record.get("dropped", 0)))

    async def _begin(self, run: Run, start: Start) -> None:
        await self._home.open()
        self._home.move_in(run.unit, run)
        try:
            with contextlib.ExitStack() as held:
                fds = [] if start.stdin is None else [held.enter_context(_in_memory(start.stdin)).fileno()]
                answer = self._home.ask("start", fds=fds, stdin=bool(fds), **self._asked(run, start))
            said, _ = await answer
        except KeeperError as error:
            if error.kind == "lost":
                raise AgentGoneError from error
            if error.kind == "late":  # should it begin yet, it is to end
                self._home.run(self._force(leaf=run.leaf))
            raise AgentExecutionError(f"{start.argv[0]} cannot be run: {error}") from error
        self._enforcement = enforcement_of(said.get("enforcement") or {})

    def _asked(self, run: Run, start: Start) -> dict[str, Any]:
        return {
            "unit": run.unit,
            "box": self.box,
            "leaf": run.leaf,
            "limits": box_limits(self._plan),
            "how": {"argv": list(start.argv)},
            "env": dict(start.env),
            "cwd": str(start.cwd),
            "log": str(self._log(run)),
            "log_bytes": max(LOG_BYTES, self._spec.max_output_bytes),
            "pty": start.pty,
            "channel": False,
            "nice": niceness(self._plan),
            "umask": own_umask(),
        }

    async def _end(self, run: Run) -> None:
        """More cancelling does not shorten the wait; the keeper bounds it."""
        if run.over.done():
            return
        stopping = self._home.run(self._force(STOP_GRACE_S, run.leaf))
        while not stopping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((stopping,))
        run.stuck = bool(stopping.result())

    def _part(self, run: Run) -> None:
        """It is over, and forgotten, so that no records gather. With the last one the box goes too."""
        self._runs.pop(run.call_id, None)
        self._found.pop(run.call_id, None)
        self._home.move_out(run.unit, run)
        if not self._closing:
            self._home.run(self._tidy(run))

    async def _tidy(self, run: Run) -> None:
        prune_runs(self._home.directory, self._plan, self._runs)
        async with self._tidying:
            await self._forget(run)

    async def _forget(self, run: Run) -> None:
        with contextlib.suppress(KeeperError):
            if self._runs:
                await self._home.request("forget", unit=run.unit)
                return
            used = await self._home.request("usage", box=self.box)
            if not self._runs:
                await self._home.request("forget", box=self.box)
                self._cpu_before += float(used.get("cpu_seconds", 0.0))

    def _log(self, run: Run) -> Any:
        return log_of(self._home.directory, self._plan, run.call_id)

    # --- the end -------------------------------------------------------------------------------------

    def lose(self) -> None:
        self._die(LOST)

    async def _wind_up(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        if not self._runs:
            return True, []
        if not over.done() and (left := await self._signal(over, _PATIENCE_SECONDS)) is not None:
            return True, left
        return False, await self._force()

    def _release(self, how: Exit | None) -> None:
        del how
        for run in self._runs.values():
            run.finish()

    def _close(self) -> None:
        for run in (*self._runs.values(), *self._found.values()):
            self._home.move_out(run.unit, run)


def _in_memory(text: bytes) -> Any:
    """A file in memory has room for all of it and ends by itself; a pipe would have to be fed."""
    file = os.fdopen(os.memfd_create("ostler-prompt", os.MFD_CLOEXEC), "w+b")
    file.write(text)
    file.seek(0)
    return file


def _lasted(record: Mapping[str, Any]) -> float:
    """How long a run took that an earlier manager began: by the machine's own clock, which the kernel noted it with."""
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + float(record.get("start_time") or 0) / _TICKS
    return max(float(record.get("ended") or 0.0) - started, 0.0)
