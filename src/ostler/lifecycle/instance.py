"""The task that owns one instance: its messages one after the other, its record, its timers, its operations.

Handlers await nothing but the store. Work that takes time is an operation, which reports by a message. So a handler
never asks after an await whether its phase still holds, and there is no lock.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec
from uuid import UUID

from ostler.agents.messages import WaitAnswer
from ostler.agents.registry import AgentManifest
from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.errors import AgentGoneError, InvalidOperationError, OstlerError, StaleWriterError, StoreError
from ostler.failpoints import FaultPoint
from ostler.ids import IdSource
from ostler.isolation.base import Cell, Isolation
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.definitions import Definitions
from ostler.lifecycle.disk import DiskMeter
from ostler.lifecycle.liveness import Counters, ObservedLiveness, Outbox
from ostler.lifecycle.messages import (
    Call,
    Due,
    Message,
    Operation,
    OperationDone,
    Phase,
    Process,
    Verb,
    WaitRequested,
    Withdraw,
    WriteFailed,
)
from ostler.lifecycle.observe import Fanout
from ostler.lifecycle.phases import Backoff, Detached, Ended, OpenWait
from ostler.lifecycle.settings import LifecycleSettings
from ostler.lifecycle.start_gate import StartGate
from ostler.model.access import Workspace
from ostler.model.attempt import AttemptOutcome
from ostler.model.instance import AgentInstance, AgentMetrics
from ostler.model.spawn import AgentSpawnOptions, HealthCheckConfig, ResourceLimits
from ostler.model.states import AgentState, moves_between
from ostler.model.wait import Wait
from ostler.store.attempts import AttemptEnd
from ostler.store.instances import Failure, error_event, fail_instance
from ostler.store.moves import Move, move_instance
from ostler.store.requests import RequestEnd
from ostler.store.store import Store
from ostler.store.transaction import Transaction
from ostler.telemetry.log import LifecycleLog
from ostler.telemetry.metrics import LifecycleMetrics

P = ParamSpec("P")
Handler = Callable[["Instance", Any], Awaitable[None] | None]
Table = Mapping[type[Message], Mapping[type[Phase] | None, Handler]]

#: How long until a fact that could not be written is written again.
RETRY_SECONDS = 1.0
#: Timers follow the boot clock, which goes on while the machine sleeps; they look at it at least this often.
_LOOK_SECONDS = 60.0


class ActorEndedError(OstlerError):
    """The task of this instance has ended; its record says what is so now."""


@dataclass(kw_only=True, eq=False)
class Runtime:
    """What all instances of one manager share."""

    store: Store
    definitions: Definitions
    levels: IsolationLevels
    clock: Clock
    chance: random.Random
    ids: IdSource
    fault: FaultPoint
    log: LifecycleLog
    metrics: LifecycleMetrics
    settings: LifecycleSettings
    fanout: Fanout
    table: Table
    #: Where the private workdirs and the logs of instances are; None for a store without a directory.
    home: Path | None
    loop: asyncio.AbstractEventLoop
    start_gate: StartGate
    restart_gate: StartGate
    disk: DiskMeter
    #: What was done because the home is not where it was; see `ostler.lifecycle.identity`.
    home_notice: str | None = None
    instances: dict[UUID, Instance] = field(default_factory=dict)
    #: Reservations that have no instance yet.
    reserving: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    workspaces: dict[UUID, Workspace] = field(default_factory=dict)
    #: Why nothing new is accepted; None while the manager is open.
    closing: OstlerError | None = None
    #: Tries again what recovery could not do.
    recovering: asyncio.Task[Any] | None = None
    #: Attempts of earlier managers that recovery has not found yet, or whose end is not committed yet.
    unfinished: set[tuple[UUID, int]] = field(default_factory=set)
    #: What recovery could not do, by instance.
    unrecovered: dict[UUID, str] = field(default_factory=dict)
    #: Hooks whose last run failed, by name: since when, and why.
    hook_failures: dict[str, tuple[datetime, str]] = field(default_factory=dict)
    #: Instance, attempt and principal: who typed into the agent of another.
    typists: set[tuple[UUID, int, UUID]] = field(default_factory=set)
    #: When the manager before this one was last known to own the store.
    last_owned: datetime | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A background task of the manager; its failure is logged."""
        task = self.loop.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.emit("background_error", task=task.get_name(), error=repr(error))

    def require_open(self) -> None:
        if self.closing is not None:
            raise type(self.closing)(str(self.closing))  # an error object for each caller


class Instance:
    """Only its own handlers change its phase, its record and its calls."""

    def __init__(self, runtime: Runtime, record: AgentInstance, manifest: AgentManifest, level: Isolation) -> None:
        self.runtime = runtime
        self.record = record
        self.manifest = manifest
        self.level = level
        self.options = record.spawn_options or AgentSpawnOptions()
        self.limits = self.options.resource_limits or ResourceLimits()
        self.check = self.options.health_check or HealthCheckConfig()
        #: What is true. The row may be one commit behind.
        self.state = record.state
        self.moved_at = runtime.clock.mono()
        self.phase: Phase = Ended()
        self.cell: Cell | None = None
        #: Calls at the agent, by their id there; and those that wait for a slot.
        self.calls: dict[UUID, Call] = {}
        self.backlog: deque[Call] = deque()
        #: Calls with a request id, until their answer is durable.
        self.requests: dict[str, Call] = {}
        self.waits: dict[UUID, OpenWait] = {}
        self.liveness = ObservedLiveness(runtime.clock, runtime.chance, self.check)
        self.counters = Counters()
        #: What could not be written is tried again soon.
        self.retry_pending = False
        #: Ends of requests that could not be written, by their request id.
        self.pending_ends: dict[str, RequestEnd] = {}
        self.outbox = Outbox()
        #: The request that it was spawned for, since it was last asked.
        self.job: Process | None = None
        #: The last answer; what is kept as the final state of a command.
        self.last_answer: Any = None
        self.task: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._tasks: asyncio.TaskGroup | None = None
        #: Operations and calls that have not ended, in the order in which they were begun.
        self._running: dict[asyncio.Task[None], None] = {}
        self._over = False

    @property
    def instance_id(self) -> UUID:
        return self.record.instance_id

    @property
    def attempt(self) -> int:
        return self.record.attempt

    @property
    def label(self) -> str:
        return self.record.name or str(self.instance_id)

    @property
    def is_over(self) -> bool:
        """Its task takes no message any more; a verb on the instance needs a new one."""
        return self._over

    # --- messages --------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        if self._over:
            _refuse_late(message)
        else:
            self._messages.put_nowait(message)

    async def ask(self, verb: Verb) -> Any:
        """Post a verb and wait for its reply. A cancelled caller withdraws it, and waits until that is dealt with."""
        self.post(verb)
        waiting = {verb.reply} if self.task is None else {verb.reply, self.task}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.withdraw(verb)
            raise
        if not verb.reply.done():
            raise ActorEndedError
        return verb.reply.result()

    async def withdraw(self, verb: Verb) -> None:
        """Its caller has gone. Cancelling again does not shorten this."""
        withdrawal = Withdraw(of=verb)
        self.post(withdrawal)
        await wait_ignoring_cancel(withdrawal.done, *([] if self.task is None else [self.task]))

    def start(self, begin: Callable[[Instance], None]) -> None:
        """Begin to serve messages; `begin` sets the first phase."""
        self.runtime.instances[self.instance_id] = self
        self.task = self.runtime.loop.create_task(self._run(begin), name=f"ostler-instance-{self.instance_id}")

    async def _run(self, begin: Callable[[Instance], None]) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                begin(self)
                while not self._is_done():
                    await self._handle(await self._messages.get())
                self._finish()
        except* Exception as group:  # noqa: BLE001 - whatever it is, it ends this instance only
            await self._abandon(group.exceptions[0])
        finally:
            self._finish()

    def _is_done(self) -> bool:
        if isinstance(self.phase, Backoff):
            # A failed instance without a restart to come needs no task; a verb makes a new one.
            return self.phase.wait is None and self._messages.empty() and not self.backlog
        return isinstance(self.phase, Ended | Detached)

    async def _handle(self, message: Message) -> None:
        row = self.runtime.table[type(message)]
        handler = row.get(type(self.phase)) or row[None]
        try:
            waiting = handler(self, message)
            if inspect.isawaitable(waiting):
                await waiting
        except StaleWriterError as error:
            refuse_with(message, error)
            self.lose_ownership(error)
        except OstlerError as error:
            # An intent that was not written was not acted on: its caller is told, and the phase stays.
            if refuse_with(message, error):
                return
            if not isinstance(error, StoreError):
                raise
            self.post(WriteFailed(error=error))

    def _finish(self) -> None:
        """No caller is left without an answer."""
        if self._over:
            return
        if self.runtime.instances.get(self.instance_id) is self:
            del self.runtime.instances[self.instance_id]
        self.enter(self.phase if isinstance(self.phase, Detached) else Ended())
        self._over = True
        while not self._messages.empty():
            _refuse_late(self._messages.get_nowait())
        gone = AgentGoneError(f"instance {self.label} ended before it answered; look at why, and restart it")
        for call in dict.fromkeys((*self.calls.values(), *self.backlog, *self.requests.values())):
            self.drop_call(call, gone)
        for waiting in self.waits.values():
            _drop_wait(waiting)
        for task in tuple(self._running):
            task.cancel()

    async def _abandon(self, error: BaseException) -> None:
        """A bug in a handler ends this instance only: its process by force, its record as failed."""
        text = f"its task ended with {error!r}"
        self.runtime.log.emit("background_error", task=f"instance {self.instance_id}", error=repr(error))
        self._finish()
        if self.cell is not None:
            await self.cell.destroy()
            self.cell = None
        end = AttemptEnd(outcome=AttemptOutcome.UNKNOWN, detail=text)
        failure = Failure(end=end, error=error_event(self.current(), text), reason=text)
        try:
            await self.runtime.store.run(fail_instance, self.current(), failure, catch_up=True)
        except OstlerError as refused:
            self.runtime.unrecovered[self.instance_id] = f"{text}; its record could not be written: {refused}"

    def lose_ownership(self, error: StaleWriterError) -> None:
        """Another manager owns the store: leave the agent alone, or end it where it cannot go on without us."""
        cell, self.cell = self.cell, None
        for verb in self.phase.waiting:
            verb.refuse(error)
        self.enter(Detached())
        if cell is None:
            pass
        elif self.level.capabilities.outlives_manager:
            cell.detach()
        else:
            self.runtime.run(cell.destroy(), "ostler-disowned")
        gone = AgentGoneError(f"another manager owns instance {self.label} now; ask it ({error})")
        for call in (*self.calls.values(), *self.backlog):
            self.drop_call(call, gone)

    # --- phases, timers, operations --------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Leave the present phase; its timer goes with it."""
        before, self.phase = self.phase, phase
        if before.timer is not None:
            before.timer.cancel()
            before.timer = None
        for message in before.deferred:
            self.post(message)
        before.deferred.clear()

    def set_timer(self, seconds: float) -> None:
        """Post `Due` for the present phase after so long by the boot clock."""
        phase, clock = self.phase, self.runtime.clock
        target = clock.boot() + seconds

        def fire() -> None:
            left = target - clock.boot()
            if left <= 0:
                self.post(Due(phase=phase))
            else:
                phase.timer = clock.call_later(min(left, _LOOK_SECONDS), fire)

        if phase.timer is not None:
            phase.timer.cancel()
        phase.timer = clock.call_later(min(max(seconds, 0.0), _LOOK_SECONDS), fire)

    def set_timer_until(self, wait: Wait) -> None:
        """Until the wait is due by the wall clock, but never longer than it was meant to be in all."""
        if wait.due_at is not None:
            left = min(wait.due_at - self.runtime.clock.wall(), wait.due_at - wait.created_at)
            self.set_timer(left.total_seconds())

    def operate(self, name: str, work: Coroutine[Any, Any, Any]) -> Operation:
        """Run it beside the messages; it reports by `OperationDone` and never raises."""
        operation = Operation(name, self.attempt)
        operation.task = self.run_beside(
            work, name, lambda result, error: OperationDone(operation=operation, result=result, error=error)
        )
        return operation

    def run_beside(
        self, work: Coroutine[Any, Any, Any], name: str, report: Callable[[Any, BaseException | None], Message]
    ) -> asyncio.Task[None]:
        """A task of this instance. Its end is posted as the message that `report` makes, however it ends."""
        ended: list[tuple[Any, BaseException | None]] = []

        async def run() -> None:
            try:
                ended.append((await work, None))
            except BaseException as error:  # noqa: BLE001 - reported; a cancelled one reports that too
                ended.append((None, error))

        def done(_: object) -> None:
            work.close()  # one that was cancelled before its first step was never begun
            self._running.pop(task, None)
            self.post(report(*(ended[0] if ended else (None, asyncio.CancelledError()))))

        if self._tasks is None:
            raise RuntimeError("the task of the instance has not begun")
        task = self._tasks.create_task(run(), name=f"ostler-{name}")
        self._running[task] = None
        task.add_done_callback(done)
        return task

    # --- the record ------------------------------------------------------------------------------

    def current(self) -> AgentInstance:
        """The record as its row will be when the commands submitted so far have run."""
        return self.record if self.record.state is self.state else self.record.evolve(state=self.state)

    async def commit(
        self,
        command: Callable[Concatenate[Transaction, AgentInstance, P], dict[str, Any] | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Awaited: durable when this returns."""
        changes = await self.runtime.store.run(command, self.current(), *args, **kwargs)
        if changes and "state" in changes:
            self.moved_to(changes["state"])
        self.apply(changes)

    def write(
        self,
        command: Callable[Concatenate[Transaction, AgentInstance, P], dict[str, Any] | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[dict[str, Any] | None]:
        """Not awaited. What fails is reported by `WriteFailed`, and written again as it is by then."""
        return self._watched(partial(self.runtime.store.submit, command, self.current(), *args, **kwargs))

    def write_lazily(
        self,
        command: Callable[Concatenate[Transaction, AgentInstance, P], dict[str, Any] | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """As `write`, for facts that no caller waits for: it rides on the next commit."""
        self._watched(partial(self.runtime.store.submit_lazy, command, self.current(), *args, **kwargs))

    def write_state(self) -> None:
        """Take the row to the present state, over the steps that it has missed."""
        move = Move(to=self.state, catch_up=True, metrics=self.metrics_now())
        self._watched(partial(self.runtime.store.submit, move_instance, self.record, move))

    def _watched(self, submit: Callable[[], asyncio.Future[Any]]) -> asyncio.Future[Any]:
        try:
            writing = submit()
        except StoreError as error:  # closed, or too much waits already
            writing = self.runtime.loop.create_future()
            writing.set_exception(error)
        writing.add_done_callback(self._written)
        return writing

    def _written(self, writing: asyncio.Future[dict[str, Any] | None]) -> None:
        if writing.cancelled():
            return
        if (error := writing.exception()) is not None:
            self.post(WriteFailed(error=error))
        else:
            self.apply(writing.result())

    def apply(self, changes: Mapping[str, Any] | None) -> None:
        """The row has changed."""
        if not changes:
            return
        before = self.record.state
        self.record = self.record.evolve(**changes)
        for state in moves_between(before, self.record.state):
            self.runtime.log.emit("state_changed", instance_id=self.instance_id, from_state=before, to_state=state)
            before = state

    def moved_to(self, state: AgentState) -> None:
        if state is not self.state:
            self.state = state
            self.moved_at = self.runtime.clock.mono()

    def metrics_now(self) -> AgentMetrics | None:
        """The last sample with the present counts, to be written with the next change of state."""
        return self.liveness.metrics_with(self.counters, len(self.calls), self.runtime.clock.wall())

    # --- callers ---------------------------------------------------------------------------------

    def drop_call(self, call: Call, error: BaseException) -> None:
        """Answer its callers with an error; its work, if any, is cancelled."""
        if call.timer is not None:
            call.timer.cancel()
        if call.task is not None:
            call.task.cancel()
        for caller in call.withdrawn:
            caller.reply.cancel()
        for caller in call.callers:
            caller.refuse(error)

    def refusal(self, doing: str, advice: str) -> InvalidOperationError:
        return InvalidOperationError(
            f"{self.label} is {self.state} and cannot be {doing}; {advice}", current=self.state
        )


def refuse_with(message: Message, error: BaseException) -> bool:
    """Answer the message with an error; False where it is no message that is answered."""
    if isinstance(message, Verb):
        message.refuse(error)
        return True
    if isinstance(message, WaitRequested):
        if not message.reply.done():
            message.reply.set_exception(error)
            message.reply.exception()
        return True
    return False


def _refuse_late(message: Message) -> None:
    if isinstance(message, Withdraw):
        message.finish()
    refuse_with(message, ActorEndedError())


def _drop_wait(waiting: OpenWait) -> None:
    if waiting.timer is not None:
        waiting.timer.cancel()
    if waiting.reply is not None and not waiting.reply.done():
        waiting.reply.set_exception(AgentGoneError("the manager has let go of this agent"))
        waiting.reply.exception()


def deliver_answer(waiting: OpenWait, answer: WaitAnswer) -> None:
    if waiting.reply is not None and not waiting.reply.done():
        waiting.reply.set_result(answer)
