"""What all verbs share: the store, the levels, the clock, and the lives that are under this roof."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from ostler.agents import AgentManifest, AgentRegistry
from ostler.errors import InvalidOperationError, OstlerError, StaleWriterError, StoreClosedError, StoreError
from ostler.isolation import IsolationLevels
from ostler.lifecycle.life import Life
from ostler.lifecycle.settings import LifecycleSettings
from ostler.lifecycle.timers import Timers
from ostler.lifecycle.turnstile import Turnstile
from ostler.model import HOME_WORKSPACE_ID, AgentInstance, AgentState, TerminationResult, Wait, WaitKind, Workspace
from ostler.seams import Clock, FaultPoint, IdSource
from ostler.store import SYSTEM, Actor, Store
from ostler.store.commands import Beside, Command, MoveInstance
from ostler.telemetry import LifecycleLog, LifecycleMetrics

T = TypeVar("T")

_RETRY_SECONDS = 1.0
#: As many processes are started at a time as keep the cores busy; the more, the later comes one that is urgent.
_STARTS_AT_ONCE = 8
#: How long a workspace's plan is believed without looking again.
_PLAN_SECONDS = 1.0


@dataclass(kw_only=True, eq=False, slots=True)
class Parting:
    """All who ask at the same time for the end of one instance; they share its result, however late they get there."""

    instance_id: UUID
    askers: int = 0
    result: TerminationResult | None = None


@dataclass(kw_only=True, eq=False)
class House:
    store: Store
    registry: AgentRegistry
    levels: IsolationLevels
    clock: Clock
    chance: random.Random
    ids: IdSource
    fault: FaultPoint
    log: LifecycleLog
    metrics: LifecycleMetrics
    settings: LifecycleSettings
    timers: Timers
    #: Where the private directories of instances are made.
    workroom: Path | None
    lives: dict[UUID, Life] = field(default_factory=dict)
    #: Restarts that wait for their definition to be registered, by definition.
    strangers: dict[UUID, dict[UUID, Wait]] = field(default_factory=dict)
    #: Definitions that are in the store as they are registered here.
    told_definitions: dict[UUID, AgentManifest] = field(default_factory=dict)
    #: Terminations of those that have no life here, by instance; all who ask share one.
    burials: dict[UUID, asyncio.Task[TerminationResult]] = field(default_factory=dict)
    partings: dict[UUID, Parting] = field(default_factory=dict)
    #: Why nothing new is taken on; None while the door is open.
    shut: OstlerError | None = None
    restarting: Turnstile = field(init=False)
    #: Where all of it happens: a task of one loop cannot wait for what another does.
    loop: asyncio.AbstractEventLoop = field(init=False)
    #: For starts of processes, which take a core each.
    starting: Turnstile = field(init=False)
    #: In the order of their making.
    _tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    _plans: dict[UUID, tuple[float, Workspace]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings
        self.loop = asyncio.get_running_loop()
        self.restarting = Turnstile(
            self.clock, at_once=settings.restarts_at_once, per_second=settings.restarts_per_second
        )
        self.starting = Turnstile(self.clock, at_once=_STARTS_AT_ONCE)

    # --- background work ------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Let something go on by itself; it is waited for when the house closes."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OstlerError):
            self.log.emit("background_error", task=task.get_name(), error=repr(error))

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Whatever becomes of it, the house does not wait for it."""
        self._tasks.pop(task, None)

    async def settle_down(self, limit: float) -> None:
        """Wait for all that goes on by itself, and for what that started; but an end must come to an end."""
        current, over = asyncio.current_task(), asyncio.get_running_loop().time() + limit
        while others := [task for task in self._tasks if task is not current]:
            left = over - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.wait(others, timeout=left)
                continue
            for task in others:
                task.cancel()
                self.log.emit("background_error", task=task.get_name(), error="it did not end in time and is left")
            await asyncio.wait(others, timeout=1.0)
            return

    async def firm(self, work: Coroutine[Any, Any, T]) -> T:
        """See it through, even when the caller is cancelled meanwhile; the cancellation comes after."""
        task = self.run(work, "ostler-firm")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            raise

    async def insist(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What has happened must be written down. A store that cannot now is asked again, until the house closes."""
        while True:
            try:
                return await work()
            except (StoreClosedError, StaleWriterError):
                raise
            except StoreError as error:
                if self.shut is not None:
                    raise
                self.log.emit("death_unwritten", instance_id="", error=str(error))
                await self.clock.sleep(_RETRY_SECONDS)

    # --- the record -----------------------------------------------------------------------------

    def require_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # none runs here
            if asyncio.get_running_loop() is self.loop:
                return
        raise InvalidOperationError(
            "this manager belongs to the event loop that opened it; hand the call over to that loop with "
            "asyncio.run_coroutine_threadsafe, or open a manager of a home of its own here"
        )

    def require_open(self) -> None:
        if self.shut is not None:
            raise type(self.shut)(str(self.shut))  # one of its own for each who asks

    async def workspace(self, workspace_id: UUID) -> Workspace | None:
        known = self._plans.get(workspace_id)
        now = self.clock.mono()
        if known is not None and now - known[0] < _PLAN_SECONDS:
            return known[1]
        found = await self.store.get_workspace(workspace_id)
        if found is not None:
            self._plans[workspace_id] = (now, found)
        return found

    async def move(
        self, life: Life, to: AgentState, *, by: Actor = SYSTEM, beside: Beside | None = None, **said: Any
    ) -> AgentInstance:
        """One step of one life, durable when this returns. Hold `life.lock`."""
        before = life.record.state
        command = MoveInstance(by=by, instance_id=life.instance_id, attempt=life.attempt, to=to, beside=beside, **said)
        await self.commit(life, command)
        self.log.emit("state_changed", instance_id=life.instance_id, from_state=before, to_state=to)
        return life.record

    async def commit(self, life: Life, command: Command[AgentInstance]) -> AgentInstance:
        """A command about one life. What it answers is the life's record, also when nobody waits for it any more."""

        async def write() -> AgentInstance:
            before = life.state
            life.record = await self.store.commit(command)
            if life.state is not before:
                life.moved = self.clock.mono()
            return life.record

        return await self.firm(write())

    def new_wait(self, record: AgentInstance, kind: WaitKind, **said: Any) -> Wait:
        return Wait(
            wait_id=self.ids.new(),
            workspace_id=record.workspace_id or HOME_WORKSPACE_ID,
            instance_id=record.instance_id,
            kind=kind,
            created_at=self.clock.wall(),
            **said,
        )

    def living(self) -> Iterator[Life]:
        """A copy, for lives come and go while one looks at them."""
        return iter(list(self.lives.values()))

    def life(self, record: AgentInstance) -> Life:
        """The life behind a record that says it is active."""
        found = self.lives.get(record.instance_id)
        if found is None:
            raise InvalidOperationError(
                f"instance {record.instance_id} is {record.state} and not under this manager", current=record.state
            )
        return found

    def drop(self, life: Life) -> None:
        self.lives.pop(life.instance_id, None)

    @contextlib.contextmanager
    def parting(self, instance_id: UUID) -> Iterator[Parting]:
        found = self.partings.setdefault(instance_id, Parting(instance_id=instance_id))
        found.askers += 1
        try:
            yield found
        finally:
            found.askers -= 1
            if not found.askers:
                self.partings.pop(instance_id, None)

    def parted(self, result: TerminationResult) -> TerminationResult:
        """It has ended; whoever asks for that at this moment is told the same."""
        known = self.partings.get(result.final_instance.instance_id) if result.final_instance else None
        if known is not None:
            known.result = result
        return result

    def forget_stranger(self, wait: Wait) -> None:
        """It no longer waits for its definition."""
        for waiting in self.strangers.values():
            waiting.pop(wait.wait_id, None)
