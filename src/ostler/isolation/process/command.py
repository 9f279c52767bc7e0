"""A command at level process: each request is one process tree at the keeper, in the box of the instance.

Between two runs there is no process, so that a cell without a run is alive. A run that has ended is kept, with its exit
record at the keeper and its log, until the manager confirms its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from ostler.agents import AgentContext, CommandSpec
from ostler.agents.command import STOP_GRACE_S, Place, Start, place_of, prompt_of, require_runnable, start_of
from ostler.agents.failures import execution_error
from ostler.clock import Clock
from ostler.drivers import driver_named
from ostler.drivers.start import Wishes, driven_start, require_installed
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.isolation.base import Exit, Listener, StartPlan, Usage, Verb
from ostler.isolation.mailbox import Mailbox
from ostler.isolation.process.driven import LOOK_SECONDS, DrivenRun, Journal
from ostler.isolation.process.ending import KeptCell, enforcement_of, require_workdir
from ostler.isolation.process.exits import LOST, was_ended_by_us
from ostler.isolation.process.home import KeeperHome
from ostler.isolation.process.link import Answer, KeeperError
from ostler.isolation.process.logs import HOMES, journal_of, log_of, prune_runs, remove_log
from ostler.isolation.process.runs import Run, in_memory, old_place
from ostler.model.context import ContextData

#: As long as a keeper waits at most; the manager's own clock says when it is enough.
_PATIENCE_SECONDS = 3600.0


class CommandCell(KeptCell):
    def __init__(self, clock: Clock, home: KeeperHome, plan: StartPlan, listener: Listener, spec: CommandSpec) -> None:
        super().__init__(clock, home, plan, listener)
        self._spec = spec
        self._driver = None if spec.driver is None else driver_named(spec.driver)
        self._voice = Mailbox(self._loop, listener, plan.attempt)
        self._journal = None if self._driver is None else Journal(journal_of(home.directory, plan), self._voice)
        self._enforcement = enforcement_of(home.about.get("enforcement") or {})
        self._context = AgentContext(
            instance_id=plan.instance_id,
            attempt=plan.attempt,
            definition_id=plan.manifest.id,
            name=plan.name,
            data=ContextData(plan.context),
            limits=plan.limits,
            clock=clock,
            voice=self._voice,
            directory=plan.workdir,
            owns_directory=plan.owns_workdir,
            env=plan.env,
        )
        #: Every run whose answer is not confirmed; and of these, those that an earlier manager began.
        self._runs: dict[UUID, Run] = {}
        self._found: dict[UUID, Run] = {}
        #: Starts that the keeper was asked for and has not answered; a freeze waits for them.
        self._starts: set[asyncio.Future[Answer]] = set()
        #: The keeper was told to freeze the box. `_frozen` alone means that a run that would begin waits.
        self._box_frozen = False
        self._changing = asyncio.Lock()
        #: Done when the cell is thawed or closed.
        self._released: asyncio.Future[None] = self._loop.create_future()
        #: Of boxes that went with their last run.
        self._cpu_before = 0.0
        self._forgetting: dict[UUID, asyncio.Task[None]] = {}
        self._tidying = asyncio.Lock()
        self._quiet = False
        self._keeper = home.keeper_identity
        self._started_at_keeper: str | None = self._keeper

    @property
    def may_have_lost_calls(self) -> bool:
        return self._started_at_keeper != self._keeper

    def adopt(self, handle: Mapping[str, Any] | None, statuses: Iterable[Mapping[str, Any]]) -> None:
        """The runs that an earlier manager began."""
        self._started_at_keeper = (handle or {}).get("keeper")
        for status in statuses:
            call_id = UUID(hex=str(status["unit"]).rpartition(".")[2])
            run = self._found[call_id] = self._add(call_id, old_place(self._plan, self._spec, call_id))
            self._follow(run)
            run.is_asked = True
            run.has_started()
            self._frozen = self._box_frozen = self._frozen or bool(status.get("frozen"))
            before = self._home.move_in(run.unit, run)
            if isinstance(before, Run):
                before.owner.detach()
                self._home.move_in(run.unit, run)
            if status.get("exit"):
                run.has_ended(status["exit"])
                if was_ended_by_us(status["exit"]):  # no manager waits for the answer of a run that it has stopped
                    self.confirm(call_id)

    def _add(self, call_id: UUID, place: Place) -> Run:
        run = self._runs[call_id] = Run(self, call_id, place, log_of(self._home.directory, self._plan, call_id))
        return run

    # --- what a driver reads -------------------------------------------------------------------------

    def _follow(self, run: Run) -> None:
        """Read its log while it runs, where a driver knows what it says."""
        if self._driver is None or self._journal is None:
            return
        reader = self._driver.reader(self._journal.before(run.leaf), self._spec.max_output_bytes)
        run.driven = DrivenRun(run.leaf, run.log, reader, self._journal)
        run.following = self._loop.create_task(self._read_on(run, run.driven), name="ostler-follow")

    async def _read_on(self, run: Run, driven: DrivenRun) -> None:
        """Until the run is over, and then to the end of its log."""
        try:
            while not self._detached:
                is_over = not run.is_running
                if driven.catch_up(last=is_over):
                    await asyncio.sleep(0)
                elif is_over:
                    self._voice.catch_up()
                    return
                else:
                    await asyncio.wait((run.over,), timeout=LOOK_SECONDS)
        finally:
            driven.close()

    def confirm_heard(self, number: int) -> None:
        if self._journal is not None:
            self._journal.confirm(number)

    # --- the contract --------------------------------------------------------------------------------

    @property
    def handle(self) -> Mapping[str, Any]:
        return {
            "level": "process",
            "instance_id": str(self._plan.instance_id),
            "attempt": self._plan.attempt,
            "keeper": self._keeper,
        }

    @property
    def is_stuck(self) -> bool:
        return any(run.given_up for run in self._running)

    @property
    def _running(self) -> list[Run]:
        return [run for run in self._runs.values() if run.is_running]

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
                return await self._told(self._process(call_id, payload))
            case Verb.CLEANUP:
                return []
            case Verb.SHUTDOWN:
                await asyncio.gather(*(self._force(STOP_GRACE_S, run.leaf) for run in self._running if run.is_asked))
            case _:
                return None
        return None

    async def rejoin(self, call_id: UUID) -> Any:
        run = self._found.pop(call_id, None)
        if run is None:
            return await super().rejoin(call_id)
        return await self._told(self._answered(run))

    def confirm(self, call_id: UUID) -> None:
        run = self._runs.get(call_id)
        if run is not None and not run.is_running and not self._closing:
            self._forget_later(run)

    async def ping(self) -> None:
        if self._closing:
            raise AgentGoneError

    def alive_now(self) -> bool | None:
        return None if self._running else not self._closing

    async def usage(self) -> Usage:
        if not self._runs:
            return Usage(cpu_seconds=self._cpu_before)
        is_running = bool(self._running)
        try:
            used = await super().usage()
        except AgentGoneError:
            if self._closing:
                raise
            return Usage(cpu_seconds=self._cpu_before)  # no run has begun, or the last one took the box along
        return Usage(
            cpu_seconds=self._cpu_before + used.cpu_seconds,
            memory_bytes=used.memory_bytes if is_running else 0,
            thread_count=used.thread_count if is_running else 0,
        )

    # --- freezing ------------------------------------------------------------------------------------

    async def freeze(self) -> None:
        async with self._changing:
            before, self._frozen = self._frozen, True  # from here on a run that would begin waits
            while self._starts and not self._closing:
                # A process that is frozen half-way into its program would never answer for its start.
                waiting: list[asyncio.Future[Any]] = [*self._starts, self._released]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._closing:
                raise AgentGoneError
            if not self._running:
                return
            held, self._box_frozen = self._box_frozen, True  # also when the caller does not wait for the answer
            try:
                await self._ask_box("freeze")
            except InvalidOperationError:
                self._frozen, self._box_frozen = before, held
                self._release_waiting()
                raise

    async def thaw(self) -> None:
        async with self._changing:
            if self._box_frozen:
                await self._ask_box("thaw")
            self._frozen = self._box_frozen = False
            self._release_waiting()

    async def _ask_box(self, op: str) -> None:
        """A box that went with its last run needs neither to be frozen nor to be thawed."""
        try:
            await self._ask(op, box=self.box)
        except AgentGoneError:
            await self._home.settled()  # of a keeper that was lost it is known now what it took along
            if self._how is not None:
                raise

    def _release_waiting(self) -> None:
        if not self._frozen or self._closing:
            released, self._released = self._released, self._loop.create_future()
            released.set_result(None)

    async def _until_thawed(self) -> None:
        while self._frozen and not self._closing:
            await asyncio.wait((self._released,))
        if self._closing:
            raise AgentGoneError

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
        require_workdir(self._plan)
        if self._driver is not None:
            require_installed(self._driver, self._spec, self._context)
        require_runnable(self._spec, self._context)

    async def _process(self, given: UUID | None, payload: Any) -> dict[str, Any]:
        call_id = given or uuid4()
        while (forgetting := self._forgetting.get(call_id)) is not None:
            await asyncio.wait((forgetting,))  # the same call again: what was confirmed is gone before it begins
        before = self._runs.get(call_id)
        if before is not None:
            if before.is_running and call_id not in self._found:
                raise InvalidOperationError(f"call {call_id} was made before; rejoin it")
            self._found.pop(call_id, None)
            return await self._answered(before)
        if self._closing:
            raise AgentGoneError
        prompt = prompt_of(payload, self._plan.manifest.prompt)
        wishes = Wishes() if self._driver is None else Wishes.of(payload)
        require_workdir(self._plan)
        place = place_of(self._spec, self._context, prompt, call_id.hex)
        try:
            start = self._start_of(place, prompt, wishes)
        except BaseException:
            place.remove()
            raise
        if self._journal is not None:
            self._journal.begin(call_id.hex, wishes.session, wishes.session_usage)
        try:
            return await self._answered(self._add(call_id, place), start)
        finally:
            if given is None:
                self.confirm(call_id)

    def _start_of(self, place: Place, prompt: str, wishes: Wishes) -> Start:
        if self._driver is None:
            return start_of(self._spec, self._context, place, prompt)
        homes = self._home.directory / HOMES
        return driven_start(self._driver, self._spec, self._context, place, prompt, wishes, homes)

    async def _answered(self, run: Run, start: Start | None = None) -> dict[str, Any]:
        """Through to its end; `start` when it does not run yet. The run of a cancelled caller is stopped."""
        try:
            if start is not None:
                await self._begin(run, start)
                self._follow(run)
            await asyncio.wait((run.over,))
            if run.following is not None:
                await asyncio.wait((run.following,))
        except asyncio.CancelledError:
            await self._end(run)
            raise
        except BaseException:
            self._forget_later(run)
            raise
        finally:
            if not run.is_running and not self._detached:
                run.place.remove()
        if run.record is None or self._stopping is not None:
            raise AgentGoneError
        return run.answer(self._spec, run.record, self._plan.limits.max_memory_mb)

    async def _begin(self, run: Run, start: Start, *, again: bool = False) -> None:
        while self._frozen or not self._home.is_linked:
            await self._home.open()
            await self._until_thawed()
        if self._closing:
            raise AgentGoneError
        remove_log(run.log)  # of an earlier run of the same call
        self._home.move_in(run.unit, run)
        run.is_asked = True
        try:
            with contextlib.ExitStack() as held:
                fds = [] if start.stdin is None else [held.enter_context(in_memory(start.stdin)).fileno()]
                asked = run.asked(self._plan, self._spec, start, self._home.output_rate)
                answer = self._home.ask("start", fds=fds, stdin=bool(fds), **asked)
            self._starts.add(answer)
            answer.add_done_callback(partial(self._start_answered, run))
            said, _ = await asyncio.shield(answer)
        except KeeperError as error:
            if error.kind == "lost" or self._closing:
                raise AgentGoneError from error
            if error.kind == "late":  # should it begin yet, it is to end
                self._home.run(self._force(leaf=run.leaf))
            if error.kind != "taken" or again:
                raise AgentExecutionError(f"{start.argv[0]} cannot be run: {error}") from error
            await self._clear(run)
            await self._begin(run, start, again=True)
        else:
            self._enforcement = enforcement_of(said.get("enforcement") or {})

    async def _clear(self, run: Run) -> None:
        """An earlier manager was killed while it began the same call, and something is left of that."""
        self._home.move_out(run.unit, run)
        run.early = None
        with contextlib.suppress(KeeperError):
            await self._home.strike(self.box, run.leaf)
            await self._home.request("forget", unit=run.unit)

    def _start_answered(self, run: Run, answer: asyncio.Future[Answer]) -> None:
        self._starts.discard(answer)
        if not answer.cancelled() and answer.exception() is None:
            run.has_started()

    async def _end(self, run: Run) -> None:
        """The caller was cancelled. More cancelling does not shorten the wait, which the keeper bounds."""
        if run.is_running and run.is_asked:
            # What is frozen cannot heed a signal, and its neighbours must not be thawed for it.
            grace = 0.0 if self._frozen else STOP_GRACE_S
            ending = self._home.run(self._is_ended(run, grace))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((ending,))
            run.given_up = not (ending.result() or run.over.done())
        if not run.given_up:
            self._forget_later(run)

    async def _is_ended(self, run: Run, grace_seconds: float) -> bool:
        forcing = self._home.run(self._force(grace_seconds, run.leaf))
        return await self._home.is_answered(forcing) and not forcing.result()

    # --- after it ------------------------------------------------------------------------------------

    def _forget_later(self, run: Run) -> None:
        """It is over and confirmed, so that no records gather. With the last one the box goes too."""
        if self._runs.get(run.call_id) is not run:
            return
        del self._runs[run.call_id]
        self._found.pop(run.call_id, None)
        self._home.move_out(run.unit, run)
        run.finish()
        if run.driven is not None and run.following is not None:
            ended = run.driven.end
            run.following.add_done_callback(lambda _: ended())  # it may still have to read to the end
        elif self._journal is not None:
            self._journal.end(run.leaf)
        if run.is_asked and not self._closing:
            task = self._forgetting[run.call_id] = self._home.run(self._tidy(run), before_close=True)
            task.add_done_callback(partial(self._forgotten, run.call_id))

    def _forgotten(self, call_id: UUID, _: object) -> None:
        del self._forgetting[call_id]

    async def _tidy(self, run: Run) -> None:
        prune_runs(self._home.directory, self._plan, self._runs)
        async with self._tidying:
            with contextlib.suppress(KeeperError):
                await self._forget(run)

    async def _forget(self, run: Run) -> None:
        if not self._runs:
            used: Mapping[str, Any] = {}
            with contextlib.suppress(KeeperError):  # of a box that only its records are left of nothing is known
                used = await self._home.request("usage", box=self.box)
            if not self._runs:
                await self._home.request("forget", box=self.box)
                self._cpu_before += float(used.get("cpu_seconds", 0.0))
                return
        await self._home.request("forget", unit=run.unit)

    # --- the end -------------------------------------------------------------------------------------

    def lose(self) -> None:
        self._die(LOST)

    def _shut(self) -> None:
        super()._shut()
        self._release_waiting()

    async def _wind_up(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        if not any(run.is_asked for run in self._running):
            return True, []
        if not over.done() and (left := await self._signal(over, _PATIENCE_SECONDS)) is not None:
            return True, left
        return False, await self._force()

    def _release(self, how: Exit | None) -> None:
        del how
        for run in self._runs.values():
            run.finish()

    def _close(self) -> None:
        for run in self._runs.values():
            self._home.move_out(run.unit, run)
