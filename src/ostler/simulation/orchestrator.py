"""`SimulationOrchestrator`: plays turns. Each is complete, or it did not happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ostler.errors import InvalidOperationError, OstlerError, ValidationError
from ostler.model import Fault, ValidationResult, shown
from ostler.simulation.around import Around
from ostler.simulation.asking import Asking
from ostler.simulation.brains import Brains, Managed
from ostler.simulation.checking import require_count
from ostler.simulation.engine import Engine, MergeEngine, engine_faults
from ostler.simulation.joining import Joining
from ostler.simulation.manager import AddOutcome, LifecycleManager
from ostler.simulation.reports import Performed, RunReport, Tally, TurnReport
from ostler.simulation.rounds import Rounds
from ostler.simulation.settings import OnIdle, SimulationSettings
from ostler.simulation.sprint import Sprint
from ostler.simulation.state import SimulationState
from ostler.simulation.updating import Updating
from ostler.simulation.validator import LifecycleValidator
from ostler.simulation.view import World
from ostler.simulation.wishes import carry_out, deal_with

NOBODY = "nobody is active"
_OTHERS = MappingProxyType(
    {"settings": SimulationSettings, "lifecycle_manager": LifecycleManager, "brains": Brains, "around": Around}
)


class SimulationOrchestrator:
    """Without more, a population in memory. `begin_run` gives one whose every turn is kept."""

    def __init__(
        self,
        state: SimulationState | None = None,
        *,
        engine: Engine | None = None,
        settings: SimulationSettings | None = None,
        lifecycle_manager: LifecycleManager | None = None,
        brains: Brains | None = None,
        around: Around | None = None,
    ) -> None:
        given = (state, engine, settings, lifecycle_manager, brains, around)
        ValidationResult.failure(_faults(*given)).require()
        self.settings = settings or SimulationSettings()
        self.settings.validate().require()
        self.state = SimulationState() if state is None else state
        self.engine: Engine = engine or MergeEngine()
        self.lifecycle_manager = lifecycle_manager or LifecycleManager(LifecycleValidator(self.settings.max_agents))
        self._around = around or Around()
        kept = self._around.keeping
        self.world = World(self.state, self.settings.seed, self.settings.parameters)
        self._joining = Joining(self.lifecycle_manager, self.state, brains or Brains(), kept=kept is not None)
        timeout = self.settings.decision_timeout
        self._asking = Asking(clock=self._around.clock, timeout=timeout, concurrency=self.settings.concurrency)
        self._stable = self._around.housed()
        self._rounds = Rounds(self.world, self._asking, self._stable, timeout, kept.unkept if kept else None)
        #: What was done from outside since the last turn.
        self._outside: list[Performed] = []
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self._playing = False
        #: Whether somebody plays turns in a row by `run`.
        self._is_run = False
        self._broken: str | None = None
        self._stirred = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of threads, and of the instances behind managed brains. Safe twice."""
        self._broken = self._broken or "this orchestrator is closed"
        self._stirred.set()
        if self._outside and self._around.keeping is not None:
            self.lifecycle_manager.log.warning(
                "outside_operations_lost", count=len(self._outside), turn=self.state.turn
            )
            self._outside.clear()
        await self._asking.close()
        if self._stable is not None:
            await self._stable.close()

    # --- the lifecycle, from outside ------------------------------------------------------------

    def add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> str:
        outcome = self.try_add_agent(name, agent, initial_state)
        if outcome.faults:
            raise ValidationError(outcome.faults)
        return outcome.name

    def try_add_agent(self, name: str, agent: Any, initial_state: Mapping[str, Any]) -> AddOutcome:
        """The same, and says whether it is in, under which name, and if not, why not."""
        self._between_turns()
        performed, outcome = self._joining.add(name, agent, initial_state)
        self._did(performed)
        return outcome

    def add_kind(self, name: str, kind: str, params: Mapping[str, Any], initial_state: Mapping[str, Any]) -> AddOutcome:
        """One whose brain is made by an entry of the run's brains."""
        self._between_turns()
        agent = self._joining.brains.make(kind, params)
        performed, outcome = self._joining.add(name, agent, initial_state, made_by=(kind, params))
        self._did(performed)
        return outcome

    def remove_agent(self, name: str) -> bool:
        self._between_turns()
        return self._did(self._joining.remove(name))

    def pause_agent(self, name: str, auto_resume_turns: int | None = None) -> bool:
        self._between_turns()
        return self._did(self._joining.pause(name, auto_resume_turns))

    def resume_agent(self, name: str) -> bool:
        self._between_turns()
        return self._did(self._joining.resume(name))

    def get_active_agents(self) -> dict[str, Any]:
        return self.lifecycle_manager.get_active_agents(self.state)

    def check_invariants(self) -> ValidationResult:
        return self.lifecycle_manager.check_invariants(self.state)

    @asynccontextmanager
    async def between_turns(self) -> AsyncIterator[Self]:
        """Wait for the end of the turn that is being played, and hold the next one back meanwhile."""
        async with self._turn:
            self._holder = asyncio.current_task()
            try:
                yield self
            finally:
                self._holder = None

    def note(self, performed: Performed) -> None:
        """Something from outside that the record of the next turn is to tell of."""
        self._outside.append(performed)

    def _did(self, performed: Performed) -> bool:
        self.note(performed)
        self._stirred.set()
        return performed.done

    def _between_turns(self) -> None:
        if self._playing:
            raise InvalidOperationError(
                "a turn is being played; do this inside `async with orchestrator.between_turns()`, or let an agent ask"
            )
        self._require_sound()

    # --- turns ----------------------------------------------------------------------------------

    async def run(self, turns: int, *, on_turn: Callable[[TurnReport], None] | None = None) -> RunReport:
        """Play so many turns, or fewer when nobody is active and the settings say that the run ends then."""
        wanted = require_count("turns", turns)
        self._require_sound()
        self._require_no_run()
        self._is_run = True
        try:
            return await self._run(wanted, on_turn)
        finally:
            self._is_run = False

    async def _run(self, turns: int, on_turn: Callable[[TurnReport], None] | None) -> RunReport:
        played, tally = 0, Tally()
        while played < turns:
            if not await self._somebody() and not (self._outside and self._around.keeping):
                if self._around.keeping is not None:
                    await self._around.keeping.end(NOBODY)
                return tally.report(turn=self.state.turn, played=played, ended=NOBODY)
            more = turns - played - 1 if on_turn is None and self._may_sprint() else 0
            report, count = await self._next(more)
            played += count
            tally.count(report)
            if on_turn is not None:
                on_turn(report)
        return tally.report(turn=self.state.turn, played=played)

    async def play_turn(self) -> TurnReport:
        """Who goes on by itself, what everybody active decides, what the engine makes of it, who comes and goes."""
        report, _ = await self._next(0)
        return report

    async def _next(self, more: int) -> tuple[TurnReport, int]:
        """A turn, and in a sprint so many more after it: the last of them, and how many they were."""
        if self._holder is not None and self._holder is asyncio.current_task():
            raise InvalidOperationError("this task holds the turns back by `between_turns`; leave that first")
        async with self._turn:
            self._require_sound()
            self._playing = True
            first = self.state.turn + 1
            self.world.begin_turn(first)
            sprint = Sprint(self.world, self.lifecycle_manager)
            try:
                report = await self._play(sprint, more)
            except BaseException as error:
                why = type(error).__name__ if not isinstance(error, OstlerError) else str(error)
                self._broken = f"turn {sprint.turn} was not completed ({why}); the run stands at turn {sprint.turn - 1}"
                raise
            finally:
                self._playing = False
            await self._retire()  # the turn is complete; what this leaves is done after the next one
            return report, report.turn - first + 1

    async def _play(self, sprint: Sprint, more: int) -> TurnReport:
        """One turn; in a sprint the last of several, whose earlier ones brought nothing to tell."""
        state, outside, self._outside = self.state, self._outside, []
        resumed = self.lifecycle_manager.process_auto_resume(state)
        updating = Updating(self.engine, self.world, self._asking)
        sprint.begin(more)
        goes_on = sprint.goes_on if sprint.more else None
        decided = await self._rounds.decide(self.settings.retries, updating.plain, goes_on)
        refused = await updating.finish(decided, sprint)
        decisions = decided.decisions
        failures, performed = deal_with([*decided.failed, *refused], self.settings, self._joining)
        performed += carry_out(decisions, self.world, self._joining)
        report = TurnReport(
            turn=sprint.turn,
            resumed=tuple(resumed),
            decisions=decisions,
            failures=failures,
            operations=(*outside, *performed),
        )
        if self._around.keeping is not None:
            await self._around.keeping.keep(report)
        return report

    def _may_sprint(self) -> bool:
        """Where every turn is kept, or has instances to look after, there is something to do after each."""
        apart = self._around.keeping is None and self._stable is None
        return apart and Sprint.suits(self.lifecycle_manager)

    async def _retire(self) -> None:
        """End the instances behind those who have left."""
        stable = self._stable
        if stable is not None:
            here = {member.number for member in self.state.members.values() if isinstance(member.agent, Managed)}
            await stable.retire([one for one in stable.instances() if one not in here])

    async def _somebody(self) -> bool:
        """Whether there is a turn to play: somebody is active now, or will be by the next count, or it may wait."""
        state = self.state
        while not state.active_count:
            if state.countdown.next_is_due or (self.settings.on_idle is not OnIdle.END and len(state.countdown)):
                return True
            if self.settings.on_idle is not OnIdle.WAIT:
                return False
            self._stirred.clear()
            await self._stirred.wait()
            self._require_sound()
        return True

    def _require_no_run(self) -> None:
        """Two at once would each count the turns of the other."""
        if self._is_run:
            raise InvalidOperationError("turns are played by another `run` of this orchestrator; await that first")

    def _require_sound(self) -> None:
        if self._broken is not None:
            raise InvalidOperationError(f"{self._broken}; resume it from the store, or begin anew")


def _faults(state: Any, engine: Any, *others: Any) -> Iterator[Fault]:
    """Of what an orchestrator is made from; None stands for what is usual."""
    if engine is not None:
        yield from engine_faults(engine)
    named = zip(("state", *_OTHERS), (SimulationState, *_OTHERS.values()), (state, *others), strict=True)
    for field, kind, one in named:
        if one is not None and not isinstance(one, kind):
            yield Fault(field=field, bound=f"must be of type {kind.__name__}", value=shown(one))
