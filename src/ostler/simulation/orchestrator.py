"""`SimulationOrchestrator`: plays turns. What a kept run adds to it is in `runs.py`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from ostler.errors import InvalidOperationError, OstlerError, SimulationError, ValidationError
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.simulation import OnIdle, SimulationSettings
from ostler.model.validation import fault, shown
from ostler.simulation.asking import Asking, Failed, discard, run_all
from ostler.simulation.brains import Brains, Call, Managed, call_of, is_async
from ostler.simulation.lifecycle import AddResult, LifecycleManager, LifecycleValidator
from ostler.simulation.managed import ManagedBrains
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.turn import Operations, Performed, RunReport, Tally, TurnReport, carry_out, deal_with
from ostler.simulation.view import AgentView, Decisions, LifecycleRequest, MergeEngine, Operation, World

#: Why a run ends in which no agent is active, and none will resume by itself.
NOBODY = "no agent is active"
_STILL_RUNS = Failed(True, "TimeoutError", "not asked: it still works on what it was asked in an earlier turn")


@dataclass(slots=True)
class _Seat:
    """How one member is asked; kept as long as it has the same brain."""

    agent: Any
    call: Call
    is_async: bool
    view: AgentView


@dataclass(slots=True)
class _Questions:
    """The active members and how they are asked. Kept until an agent joins, leaves, pauses or resumes."""

    version: int
    paused: set[str]
    members: list[Member]
    #: Places among the members, their calls and their views: of plain brains, and of async and managed ones.
    plain: tuple[list[int], list[Call], list[AgentView]] = field(default_factory=lambda: ([], [], []))
    tasks: tuple[list[int], list[Call], list[AgentView]] = field(default_factory=lambda: ([], [], []))
    #: Agents that cannot be asked, by place.
    unasked: dict[int, Failed] = field(default_factory=dict)


@dataclass(slots=True)
class _Decided:
    members: list[Member]
    values: list[Any]
    failed: list[tuple[Member, Failed]] = field(default_factory=list)
    #: What the engine returned.
    answer: Any = None

    def set_aside(self, wrong: Mapping[int, Failed]) -> None:
        """Take those who failed, by place, out of the decisions."""
        self.failed = sorted(
            [*self.failed, *((self.members[place], why) for place, why in wrong.items())], key=lambda one: one[0].number
        )
        kept = [place for place in range(len(self.members)) if place not in wrong]
        self.members, self.values = [self.members[place] for place in kept], [self.values[place] for place in kept]


class SimulationOrchestrator:
    """Use it with `async with`. Operations from outside are done between turns."""

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
        self._asking = Asking(timeout=limit.total_seconds(), concurrency=self.settings.concurrency)
        self._managed = None if manager is None else ManagedBrains(manager, limit)
        self._operations = self._new_operations()
        self._engine_is_async = inspect.iscoroutinefunction(self.engine.update)
        self._own_id = uuid4()
        self._questions: _Questions | None = None
        self._seats: dict[int, _Seat] = {}
        #: Seats of agents that were given up on and whose brain could not be replaced, by number.
        self._late: dict[int, _Seat] = {}
        #: Operations from outside since the last turn.
        self._outside: list[Performed] = []
        self._turn_lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self._playing = False
        self._running = False
        self._refusal: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    @property
    def run_id(self) -> UUID:
        """Tags the instances of managed brains."""
        return self._own_id

    # --- operations from outside -----------------------------------------------------------------

    def add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> str:
        """As `LifecycleManager.add_agent`."""
        result = self.try_add_agent(name, agent, initial_state)
        if result.faults:
            raise ValidationError(result.faults)
        return result.name

    def try_add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> AddResult:
        return self.add_by(
            LifecycleRequest(operation=Operation.ADD, agent_name=name, agent=agent, initial_state=initial_state)
        )

    def add_by(self, request: LifecycleRequest) -> AddResult:
        """The addition that a request describes, by its brain or by its kind."""
        with self.state.lock:
            self._require_between()
            performed, result = self._operations.add(request)
            self._note_outside(performed)
        return result

    def remove_agent(self, name: str) -> bool:
        return self._do(Operation.REMOVE, name)

    def pause_agent(self, name: str, auto_resume_turns: int | None = None) -> bool:
        return self._do(Operation.PAUSE, name, auto_resume_turns)

    def resume_agent(self, name: str) -> bool:
        return self._do(Operation.RESUME, name)

    def _do(self, operation: Operation, name: str, turns: int | None = None) -> bool:
        with self.state.lock:
            self._require_between()
            performed = self._operations.do(operation, name, turns)
            self._note_outside(performed)
        return performed.done

    def _note_outside(self, performed: Performed) -> None:
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
        async with self._turn_lock:
            self._holder = asyncio.current_task()
            try:
                yield
            finally:
                self._holder = None

    # --- playing ---------------------------------------------------------------------------------

    async def play_turn(self) -> TurnReport:
        self._require_free()
        async with self._turn_lock:
            return await self._play()

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
        tally, played, ended = Tally(), 0, None
        while played < turns:
            report = None
            async with self._turn_lock:
                self._changed.clear()
                if not self._is_idle():
                    report = await self._play()
                elif self.settings.on_idle is not OnIdle.WAIT:
                    ended = NOBODY
                    await self._end(ended)
                    break
            if report is None:
                await self._changed.wait()
                self._require_usable()
                continue
            played += 1
            if report.failures:
                tally.count(report)
            if on_turn is not None:
                on_turn(report)
        return tally.report(turn=self.state.turn, played=played, ended=ended)

    def _is_idle(self) -> bool:
        """Whether no agent is active, nor will be after the counters that this run lets run."""
        state = self.state
        if len(state.paused_agents) < len(state.members):
            return False
        if self.settings.on_idle is OnIdle.END:
            return all(left > 1 for left in state.auto_resume.values())
        return not state.auto_resume

    async def _play(self) -> TurnReport:
        state = self.state
        with state.lock:
            self._require_usable()
            self._playing = True
            outside, self._outside = self._outside, []
            turn = state.turn = state.turn + 1
        try:
            return await self._turn(outside)
        except BaseException as error:
            stands = state.turn = self._last_complete(turn - 1)
            self._refusal = f"turn {turn} was not completed, and the run stands at turn {stands}; resume it from there"
            if isinstance(error, OstlerError) or not isinstance(error, Exception):
                raise
            raise SimulationError(f"turn {turn} was not completed: {Failed.of(error).message}") from error
        finally:
            self.world.listening = False
            self._playing = False

    async def _turn(self, outside: list[Performed]) -> TurnReport:
        state, world = self.state, self.world
        resumed = self.lifecycle_manager.process_auto_resume(state)
        self._asking.require_room()
        questions = self._who_is_asked()
        managed = self._managed
        if managed is not None:  # starting is not thinking, so it comes before the asking
            asked = [member for member in questions.members if isinstance(member.agent, Managed)]
            await managed.prepare(self.run_id, asked)
        world.begin_turn()
        before = (state.turn, state.version, len(state.members), dict(state.auto_resume))
        decided = await self._ask(questions)
        if self._engine_is_async:
            await self._update_async(decided)
        after = (state.turn, state.version, len(state.members), state.auto_resume)
        if before != after or state.paused_agents != questions.paused:
            raise SimulationError(
                f"the engine failed in turn {before[0]}: it has changed who takes part, who is paused, or the turn; "
                "agents ask for that through their views"
            )
        if managed is not None and decided.failed:
            await managed.require_owner()
        if decided.answer is not None and decided.answer is not state:
            self._take_refusals(decided)
        decisions = Decisions(decided.members, decided.values)
        failures, performed = deal_with(decided.failed, self.settings, self._operations)
        for member, why in decided.failed:
            if why.timed_out:
                self._give_up(member)
        performed += carry_out(world.requests, decisions, self._operations)
        operations = [*outside, *performed]
        report = TurnReport(
            turn=state.turn, resumed=resumed, decisions=decisions, failures=failures, operations=operations
        )
        await self._keep(report)
        if managed is not None:
            managed.retire({member.number for member in state.members.values()})
        return report

    # --- asking ----------------------------------------------------------------------------------

    def _who_is_asked(self) -> _Questions:
        state, known = self.state, self._questions
        if known is not None and known.version == state.version and known.paused == state.paused_agents:
            return known
        found = _Questions(state.version, set(state.paused_agents), state.active_members())
        if len(self._seats) > 2 * len(state.members):
            numbers = {member.number for member in state.members.values()}
            self._seats = {number: seat for number, seat in self._seats.items() if number in numbers}
        for place, member in enumerate(found.members):
            seat = self._seats.get(member.number)
            if seat is None or seat.agent is not member.agent:
                seat = self._seats[member.number] = self._new_seat(member)
            late = self._late.get(member.number)
            if late is not None and late.agent is member.agent and self._asking.still_runs(late.view):
                found.unasked[place] = _STILL_RUNS
                continue
            places, calls, views = found.tasks if seat.is_async else found.plain
            places.append(place)
            calls.append(seat.call)
            views.append(seat.view)
        # An agent whose call still runs may be free in the next turn.
        self._questions = None if found.unasked else found
        return found

    def _new_seat(self, member: Member) -> _Seat:
        view, call = AgentView(member, self.world), call_of(member.agent)
        if isinstance(member.agent, Managed):
            if self._managed is None:
                raise InvalidOperationError(
                    f"the brain of {member.name} is managed, and there is no lifecycle manager; pass it as manager="
                )
            return _Seat(member.agent, partial(self._managed.ask, member), is_async=True, view=view)
        if call is None:
            raise InvalidOperationError(f"the agent of {member.name} is no brain; give it one with `decide`")
        return _Seat(member.agent, call, is_async(call), view)

    async def _ask(self, questions: _Questions) -> _Decided:
        members, (places, calls, views) = questions.members, questions.plain
        if len(calls) == len(members):
            decided: _Decided = await self._asking.ask_plain(calls, views, partial(self._conclude, members))
            return decided
        answers: dict[int, Any] = dict(questions.unasked)

        async def ask(places: list[int], asking: Coroutine[Any, Any, list[Any]]) -> None:
            answers.update(zip(places, await asking, strict=True))

        tasks = self._asking.ask_async(*questions.tasks[1:])
        await run_all([ask(places, self._asking.ask_plain(calls, views, list)), ask(questions.tasks[0], tasks)])
        in_order = [answers[place] for place in range(len(members))]
        concluded: _Decided = await self._asking.ask_plain((), (), lambda _: self._conclude(members, in_order))
        return concluded

    def _conclude(self, members: list[Member], answers: list[Any]) -> _Decided:
        """With all answers, in the thread of a worker: sort failures out, note the decisions, run a plain engine."""
        self.world.listening = False
        decided = _Decided(members, answers)
        if any(kind is Failed or hasattr(kind, "__await__") for kind in set(map(type, answers))):
            decided.set_aside({place: one for place, answer in enumerate(answers) if (one := _failure(answer))})
        if unkept := self._note(decided.members, decided.values):
            decided.set_aside({place: Failed(False, "UnkeepableError", why) for place, why in unkept.items()})
        if not self._engine_is_async:
            try:
                decisions = Decisions(decided.members, decided.values)
                decided.answer = self.engine.update(self.state, decisions, self.world)
            except BaseException as error:
                raise self._engine_error(error) from error
        return decided

    async def _update_async(self, decided: _Decided) -> None:
        task = asyncio.current_task()
        try:
            decisions = Decisions(decided.members, decided.values)
            decided.answer = await self.engine.update(self.state, decisions, self.world)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise self._engine_error(error) from error

    def _engine_error(self, error: BaseException) -> SimulationError:
        return SimulationError(f"the engine failed in turn {self.state.turn}: {Failed.of(error).message}")

    def _take_refusals(self, decided: _Decided) -> None:
        """The engine says whose decision it could not use: these agents have failed."""
        answer, names = decided.answer, {member.name for member in decided.members}
        if not isinstance(answer, Mapping) or any(
            name not in names or not isinstance(why, str) for name, why in answer.items()
        ):
            discard(answer)
            raise SimulationError(
                f"the engine failed in turn {self.state.turn}: it must return None, or a mapping from names of agents "
                f"that decided to reasons, not {shown(answer)}"
            )
        refused = [(place, one.name) for place, one in enumerate(decided.members) if one.name in answer]
        decided.set_aside({place: Failed(False, "RefusedDecision", answer[name]) for place, name in refused})

    def _give_up(self, member: Member) -> None:
        """Its time was over: its old view is closed, and a new brain takes its place where one can be made."""
        seat = self._seats.pop(member.number, None)
        self._questions = None
        stays = self.state.members.get(member.name) is member and not isinstance(member.agent, Managed)
        if seat is not None and stays and not self._replace_brain(member):
            self._late[member.number] = seat

    # --- what a kept run does otherwise --------------------------------------------------------------

    def _new_operations(self) -> Operations:
        return Operations(self.lifecycle_manager, self.state, self.brains, kept=False)

    def _note(self, members: Sequence[Member], values: Sequence[Any]) -> dict[int, str]:
        """By place, why a decision cannot be kept. Called before the engine can change what was decided."""
        del members, values
        return {}

    def _replace_brain(self, member: Member) -> bool:
        """In memory, what a brain has saved is not known; so one with `save` is waited for."""
        if member.kind is None or hasattr(member.agent, "save"):
            return False
        member.agent = self.brains.make(member.kind, member.params)
        return True

    async def _keep(self, report: TurnReport) -> None:
        """Make the turn durable."""

    def _last_complete(self, turn: int) -> int:
        return turn

    async def _end(self, outcome: str) -> None:
        """The run ends between two turns."""

    # --- closing ---------------------------------------------------------------------------------

    async def close(self) -> None:
        self._refusal = self._refusal or "this population is closed; make another, or resume the run"
        self._changed.set()
        self._asking.close()
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


def _failure(answer: Any) -> Failed | None:
    if isinstance(answer, Failed):
        return answer
    if not hasattr(type(answer), "__await__"):
        return None
    discard(answer)
    return Failed(False, "TypeError", "a plain brain returned something to await; define its decide as `async def`")
