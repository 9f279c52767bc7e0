"""`SimulationOrchestrator`: plays turns. What a kept run adds to it is in `runs.py`.

Turns of plain brains are played in one worker thread, as many as were asked for, so that a turn costs no hand-over
between threads. They come back to the event loop after each turn where the caller wants every report or the turn is
committed, and before a turn that needs the loop: with an async or managed brain, or with an async engine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from pydantic_core import from_json

from ostler.errors import InvalidOperationError, OstlerError, SimulationError, ValidationError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.simulation import OnIdle, SimulationSettings
from ostler.model.validation import fault, shown
from ostler.simulation.active_brains import ActiveBrains, failures_by_place
from ostler.simulation.ask import Asker, Failed, Round, discard
from ostler.simulation.brains import Brains, Managed
from ostler.simulation.managed import ManagedBrains
from ostler.simulation.membership import AddResult, LifecycleManager, LifecycleValidator
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.turn import (
    Operations,
    Performed,
    RunReport,
    Turn,
    TurnReport,
    apply_failures,
    apply_requests,
)
from ostler.simulation.turn_record import TurnWriter, restore
from ostler.simulation.view import Decisions, LifecycleRequest, MergeEngine, Operation, World

#: Why a run ends in which no agent is active, and none will resume by itself.
NONE_ACTIVE = "no agent is active"


class SimulationOrchestrator:
    """Use it with `async with`. Operations from outside are done between turns."""

    #: Of a recorded run: writes every turn down, which then goes back to the event loop to be committed.
    writer: TurnWriter | None = None

    def __init__(
        self,
        state: SimulationState | None = None,
        *,
        engine: Any = None,
        settings: SimulationSettings | None = None,
        lifecycle_manager: LifecycleManager | None = None,
        brains: Brains | Mapping[str, Any] | None = None,
        manager: AgentLifecycleManager | None = None,
    ) -> None:
        """`manager` keeps the instances of `Managed` brains."""
        if engine is not None and (isinstance(engine, type) or not callable(getattr(engine, "update", None))):
            raise fault("engine", "must be an object with a method `update`", engine)
        self.state = SimulationState() if state is None else state
        self.settings = (settings or SimulationSettings()).checked()
        self.engine: Any = MergeEngine() if engine is None else engine
        validator = LifecycleValidator(self.settings.max_agents)
        self.lifecycle_manager = lifecycle_manager or LifecycleManager(validator)
        self.brains = brains if isinstance(brains, Brains) else Brains(brains)
        self.world = World(self.state, self.settings.seed, self.settings.parameters)
        limit = self.settings.decision_timeout
        self._asker = Asker(limit=limit.total_seconds(), concurrency=self.settings.concurrency)
        self._managed = None if manager is None else ManagedBrains(manager, limit)
        self._operations = Operations(self.lifecycle_manager, self.state, self.brains)
        self._engine_is_async = inspect.iscoroutinefunction(self.engine.update)
        #: Whether a turn of plain brains needs the event loop all the same.
        self._needs_loop = manager is not None or self._engine_is_async
        #: Tags the instances of managed brains.
        self.run_id = uuid4()
        self._active_brains = ActiveBrains(self.world, self._asker, self._managed)
        #: The types of the answers of the last turn, where no answer was a failure.
        self._answer_types: list[type] = []
        #: Operations from outside since the last turn.
        self._outside: list[Performed] = []
        self._turn_lock = asyncio.Lock()
        self._lock_waiters = 0
        self._holder: asyncio.Task[Any] | None = None
        self._playing = False
        self._running = False
        self._refusal: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    # --- operations from outside -----------------------------------------------------------------

    def add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> str:
        """As `LifecycleManager.add_agent`."""
        result = self.try_add_agent(name, agent, initial_state)
        if result.faults:
            raise ValidationError(result.faults)
        return result.name

    def try_add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> AddResult:
        done = self._ask_for(Operation.ADD, name, agent=agent, initial_state=initial_state)
        return AddResult(added=done.done, name=done.resolved_name or name, reason=done.reason, faults=done.faults)

    def remove_agent(self, name: str) -> bool:
        return self._ask_for(Operation.REMOVE, name).done

    def pause_agent(self, name: str, auto_resume_turns: int | None = None) -> bool:
        return self._ask_for(Operation.PAUSE, name, auto_resume_turns=auto_resume_turns).done

    def resume_agent(self, name: str) -> bool:
        return self._ask_for(Operation.RESUME, name).done

    def _ask_for(self, operation: Operation, name: str, **more: Any) -> Performed:
        return self.perform(LifecycleRequest(operation=operation, agent_name=name, **more))

    def perform(self, request: LifecycleRequest) -> Performed:
        with self.state.lock:
            self._require_between()
            performed = self._operations.perform(request)
            self.note_outside(performed)
        return performed

    def note_outside(self, performed: Performed) -> None:
        self._outside.append(performed)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def _require_between(self) -> None:
        self._require_usable()
        if self._playing:
            raise InvalidOperationError(
                "this cannot be done in the middle of a turn; agents ask through their view, others wait with "
                "`async with orchestrator.between_turns()`"
            )

    @asynccontextmanager
    async def between_turns(self) -> AsyncIterator[None]:
        """Hold the next turn back."""
        async with self._between():
            self._holder = asyncio.current_task()
            try:
                yield
            finally:
                self._holder = None

    @asynccontextmanager
    async def _between(self) -> AsyncIterator[None]:
        """Hold the turn lock; a worker thread that plays many turns lets it go after the turn that it is at."""
        self._lock_waiters += 1
        try:
            await self._turn_lock.acquire()
        finally:
            self._lock_waiters -= 1
        try:
            yield
        finally:
            self._turn_lock.release()

    # --- playing ---------------------------------------------------------------------------------

    async def play_turn(self) -> TurnReport:
        self._require_free()
        async with self._between():
            return await self._play(1, RunReport())

    async def run(self, turns: int, *, on_turn: Callable[[TurnReport], None] | None = None) -> RunReport:
        """Play so many turns, or fewer where the run ends before (`on_idle`)."""
        if type(turns) is not int or turns < 0:
            raise fault("turns", "must be a whole number from 0", turns)
        if self._running:
            raise InvalidOperationError("this population is being run already; wait for that to end")
        self._require_free()
        self._running = True
        try:
            return await self._run(turns, on_turn)
        finally:
            self._running = False

    async def _run(self, turns: int, on_turn: Callable[[TurnReport], None] | None) -> RunReport:
        self._loop = asyncio.get_running_loop()
        total = RunReport()
        while total.played < turns:
            report = None
            async with self._turn_lock:
                self._changed.clear()
                before = self.state.turn
                if not self._is_idle():
                    report = await self._play(turns - total.played if on_turn is None else 1, total)
                elif self.settings.on_idle is not OnIdle.WAIT:
                    total.ended = NONE_ACTIVE
                    await self._end(NONE_ACTIVE)
                    break
            if report is None:
                await self._changed.wait()
                self._require_usable()
                continue
            total.played += report.turn - before
            total.count_failures(report)
            if on_turn is not None:
                on_turn(report)
        total.turn = self.state.turn
        return total

    def _is_idle(self) -> bool:
        """Whether no agent is active, nor will be after the counters that this run lets run."""
        state = self.state
        if len(state.paused_agents) < len(state.members):
            return False
        if self.settings.on_idle is OnIdle.END:
            return all(left > 1 for left in state.auto_resume.values())
        return not state.auto_resume

    async def _play(self, most: int, total: RunReport) -> TurnReport:
        """At least one turn, and at most so many; the report of the last. `total` counts the failures before it."""
        with self.state.lock:
            self._require_usable()
            self._playing = True
        self._last_complete = self.state.turn
        try:
            turn = self._begin_turn()
            if turn.active.all_plain and not self._needs_loop:
                turn = await self._play_in_thread(turn, most, total)
            if not turn.is_over:
                await self._play_on_loop(turn)
            report = turn.report()
            await self._keep(report)
            self._last_complete = turn.number
            if self._managed is not None:
                self._managed.retire({member.number for member in self.state.members.values()})
        except BaseException as error:
            complete = self.state.turn = self._last_complete
            broken = f"turn {complete + 1} was not completed"
            self._refusal = self._refusal or f"{broken}, and the run stands at turn {complete}; resume it from there"
            if isinstance(error, OstlerError) or not isinstance(error, Exception):
                raise
            raise SimulationError(f"{broken}: {Failed.of(error).message}") from error
        finally:
            self.world.listening = False
            self._playing = False
        return report

    async def _play_in_thread(self, turn: Turn, most: int, total: RunReport) -> Turn:
        """The last turn; or one that has begun and needs the event loop."""

        def finish(answers: list[Any]) -> Round | None:
            nonlocal turn, most
            self._conclude(turn, answers)
            self._end_turn(turn)
            if self.writer is not None:
                self._write(self.writer, turn)
                return None
            most -= 1
            if not most or self._lock_waiters or self._refusal is not None or self._is_idle():
                return None
            self._last_complete = turn.number
            if turn.failures:
                total.count_failures(turn.report())
            turn = self._begin_turn()
            return Round(turn.active.plain) if turn.active.all_plain else None

        await self._asker.play(Round(turn.active.plain), finish)
        return turn

    async def _play_on_loop(self, turn: Turn) -> None:
        managed = self._managed
        if managed is not None:  # starting is not thinking, so it comes before the asking
            self.world.listening = False
            members = [member for member in turn.active.members if isinstance(member.agent, Managed)]
            await managed.prepare(self.run_id, members)
            self.world.listening = True
        answers = await self._active_brains.ask(turn.active)
        await self._asker.in_thread(lambda: self._conclude(turn, answers))
        if self._engine_is_async:
            await self._update_async(turn)
        if managed is not None and turn.failed:
            await managed.require_owner()
        self._end_turn(turn)
        if (writer := self.writer) is not None:
            await self._asker.in_thread(lambda: self._write(writer, turn))

    # --- a turn ----------------------------------------------------------------------------------

    def _begin_turn(self) -> Turn:
        state, world = self.state, self.world
        state.turn += 1
        resumed = self.lifecycle_manager.process_auto_resume(state)
        if self._asker.abandoned:
            self._asker.require_room()
        turn = Turn(state, self._active_brains.current(), resumed)
        if self._outside:
            turn.operations, self._outside = self._outside, []
        world.begin_turn()
        return turn

    def _conclude(self, turn: Turn, answers: list[Any]) -> None:
        """With all answers, in a thread: sort failures out, note the decisions, run a plain engine."""
        self.world.listening = False
        turn.decisions = Decisions(turn.active.members, answers)
        types = list(map(type, answers))
        if types != self._answer_types:
            if any(kind is Failed or hasattr(kind, "__await__") for kind in set(types)):
                turn.set_aside(failures_by_place(answers))
            else:
                self._answer_types = types
        if self.writer is not None and (unkept := self.writer.note(turn.decisions)):
            turn.set_aside({place: Failed(False, "UnkeepableError", reason) for place, reason in unkept.items()})
        if not self._engine_is_async:
            try:
                turn.engine_answer = self.engine.update(self.state, turn.decisions, self.world)
            except BaseException as error:
                raise self._engine_error(error) from error

    async def _update_async(self, turn: Turn) -> None:
        task = asyncio.current_task()
        try:
            turn.engine_answer = await self.engine.update(self.state, turn.decisions, self.world)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise self._engine_error(error) from error

    def _end_turn(self, turn: Turn) -> None:
        """Apply refusals of the engine, failures and requests."""
        state, active = self.state, turn.active
        if (
            state.turn != turn.number
            or state.version != active.version
            or len(state.members) != turn.member_count
            or state.paused_agents != active.paused
            or state.auto_resume != turn.counters
        ):
            raise SimulationError(
                f"the engine failed in turn {turn.number}: it has changed who takes part, who is paused, or the turn; "
                "agents ask for that through their views"
            )
        if turn.engine_answer is not None and turn.engine_answer is not state:
            self._take_refusals(turn)
        if turn.failed:
            turn.failures, performed = apply_failures(turn.failed, self.settings, self._operations)
            turn.operations += performed
            for member, answer in turn.failed:
                if answer.timed_out:
                    is_managed = isinstance(member.agent, Managed)
                    stays = state.members.get(member.name) is member and not is_managed
                    self._active_brains.give_up(member, is_late=stays and not self._replace_brain(member))
        if self.world.requests:
            turn.operations += apply_requests(self.world.requests, turn.decisions, self._operations)
        turn.is_over = True

    def _take_refusals(self, turn: Turn) -> None:
        """The engine names the agents whose decision it could not use: these have failed."""
        answer, members = turn.engine_answer, turn.decisions.members
        names = {member.name for member in members}
        if not isinstance(answer, Mapping) or any(
            name not in names or not isinstance(reason, str) for name, reason in answer.items()
        ):
            discard(answer)
            raise SimulationError(
                f"the engine failed in turn {turn.number}: it must return None, or a mapping from names of agents "
                f"that decided to reasons, not {shown(answer)}"
            )
        refused = [(place, member.name) for place, member in enumerate(members) if member.name in answer]
        if refused:
            turn.set_aside({place: Failed(False, "RefusedDecision", answer[name]) for place, name in refused})

    def _engine_error(self, error: BaseException) -> SimulationError:
        return SimulationError(f"the engine failed in turn {self._last_complete + 1}: {Failed.of(error).message}")

    def _replace_brain(self, member: Member) -> bool:
        """As a resumed run makes it. In memory, what a brain has saved is not known; one with `save` is waited for."""
        if member.kind is None or (self.writer is None and hasattr(member.agent, "save")):
            return False
        brain = self.brains.make(member.kind, member.params)
        if self.writer is not None and (memory := self.writer.memory_of(member)):
            restore(brain, {"memory": from_json(memory)}, "memory", f"the brain of {member.name}")
        member.agent = brain
        return True

    def _write(self, writer: TurnWriter, turn: Turn) -> None:
        """In a thread: write the turn as rows. Brains and engines save here, and a large state takes its time."""
        whole = turn.number % self.settings.snapshot_every == 0
        self._rows = writer.write(turn.report(), self.run_id, whole=whole)

    # --- what a kept run does otherwise ----------------------------------------------------------

    async def _keep(self, report: TurnReport) -> None:
        """Commit the rows."""

    async def _end(self, outcome: str) -> None:
        """The run ends between two turns."""

    # --- closing ---------------------------------------------------------------------------------

    async def close(self) -> None:
        self._refusal = self._refusal or "this population is closed; make another, or resume the run"
        self._changed.set()
        if self._managed is not None:
            await self._managed.close()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _require_usable(self) -> None:
        if self._refusal is not None:
            raise InvalidOperationError(self._refusal)

    def _require_free(self) -> None:
        self._require_usable()
        if self._holder is not None and self._holder is asyncio.current_task():
            raise InvalidOperationError("this task holds the turns back with between_turns(); play after that block")
