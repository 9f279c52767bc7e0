"""Runs that are kept: begun, resumed after any crash, forked at a turn, removed. Every turn is one commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

from ostler.clock import SystemClock
from ostler.errors import InvalidOperationError, SimulationError, SimulationNotFoundError, ValidationError
from ostler.ids import Uuid7Source
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.model.simulation import RunState, SimulationRun, SimulationSettings
from ostler.model.validation import Fault, fault
from ostler.simulation.ask import Failed
from ostler.simulation.history import Kept, find_run, kept_at, require_turn
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.scenario import Scenario
from ostler.simulation.state import SimulationState
from ostler.simulation.turn import Performed, RunReport, TurnReport
from ostler.simulation.turn_record import TurnWriter, restore
from ostler.simulation.view import LifecycleRequest, Operation
from ostler.store import simulations
from ostler.store.store import Store

COMPLETED = "all turns were played"
_IDS = Uuid7Source(SystemClock())


class RecordedOrchestrator(SimulationOrchestrator):
    """Writes every turn down. `KeptRun` commits the rows; a comparison only looks at their digest."""

    writer: TurnWriter

    def __init__(
        self,
        scenario: Scenario,
        settings: SimulationSettings,
        state: SimulationState,
        *,
        digest: str = "",
        manager: AgentLifecycleManager | None = None,
    ) -> None:
        try:
            engine = scenario.engine()
        except BaseException as error:
            raise SimulationError(f"the engine cannot be made: {Failed.of(error).message}") from error
        settings = SimulationSettings.from_json(settings.to_json())  # as a resumed run reads them
        super().__init__(state, engine=engine, settings=settings, brains=scenario.brains, manager=manager)
        self._scenario = scenario
        self.writer = TurnWriter(state, self.engine, digest)
        self._operations.kept = True

    @classmethod
    def restored(
        cls,
        scenario: Scenario,
        settings: SimulationSettings,
        kept: Kept,
        manager: AgentLifecycleManager | None = None,
    ) -> Self:
        """Everything as it was after a turn, with brains and engine made anew."""
        scenario = scenario.checked()
        state = kept.state(scenario.brains, scenario.schema)
        run = cls(scenario, settings, state, digest=kept.digest, manager=manager)
        restore(run.engine, kept.memory, "engine", "the engine")
        run.require_manager()
        run.writer.learn()
        return run

    def join(self, request: LifecycleRequest) -> Performed:
        """An agent of the scenario, which is there from the beginning."""
        return self._operations.perform(request)

    def require_manager(self) -> None:
        """Raise where a brain is managed and there is no lifecycle manager to ask it."""
        for member in self.state.members.values():
            self._active_brains.view_of(member)


class KeptRun(RecordedOrchestrator):
    """A run in a store; given by `begin_run`, `resume_run` and `fork_run`."""

    #: As the store has it.
    record: SimulationRun
    #: The turn with which the run ends; None while it is played by `run` or `play_turn`.
    _last: int | None = None

    def attach(self, store: Store, record: SimulationRun) -> None:
        self.record, self.run_id = record, record.run_id
        # A manager that was replaced can ask none of its agents any more: then a turn counts only for the owner.
        fenced = self._managed is not None and self._managed.manager.store is store
        self._commit: Callable[..., Any] = store.run if fenced else store.run_unfenced

    async def create(self, store: Store, **more: Any) -> None:
        """Put the run into the store, with the state that it begins with."""
        run_id, now = _IDS.new(), datetime.now(UTC)
        whole = self.writer.begin(run_id)
        record = SimulationRun(
            run_id=run_id,
            turn=self.state.turn,
            digest=self.writer.digest,
            settings=self.settings,
            scenario=self._scenario.source,
            created_at=now,
            updated_at=now,
            **more,
        )
        self.attach(store, record.checked())
        self.record = await self._commit(simulations.create_run, self.record, whole)

    async def finish(
        self, turns: int | None = None, *, on_turn: Callable[[TurnReport], None] | None = None
    ) -> RunReport:
        """Play on to this turn, else to the last one of the scenario, and end the run there."""
        last = self._scenario.turns if turns is None else turns
        if type(last) is not int or last < 1:
            raise fault("turns", "must be a whole number from 1", turns)
        if self._running:
            raise InvalidOperationError("this run is being played already; wait for that to end")
        self._last = last
        try:
            report = await self.run(max(last - self.state.turn, 0), on_turn=on_turn)
        finally:
            self._last = None
        if report.ended is None:
            await self._end(COMPLETED)
        report.ended = report.ended or COMPLETED
        return report

    async def _keep(self, report: TurnReport) -> None:
        row, body = self._rows
        ended = COMPLETED if report.turn == self._last else None
        await self._move(simulations.append_turn, row, whole=body, ended=ended)

    async def _end(self, outcome: str) -> None:
        if self.record.state is not RunState.ENDED:
            await self._move(simulations.end_run, outcome)

    async def _move(self, command: Callable[..., SimulationRun], *values: Any, **more: Any) -> None:
        """Also when it is cancelled, the commit is waited for: the run stands at the turn that the store has."""
        committing = asyncio.ensure_future(self._commit(command, self.record, *values, **more))
        try:
            await asyncio.wait((committing,))
        finally:
            if not committing.done():
                await asyncio.wait((committing,))
            self.record = committing.result()
            self._last_complete = self.record.turn


# --- begin, resume, fork -------------------------------------------------------------------------------


@asynccontextmanager
async def begin_run(
    store: Store, scenario: Scenario, *, manager: AgentLifecycleManager | None = None
) -> AsyncIterator[KeptRun]:
    """A new run of a scenario. It is in the store, with all its agents, before the first turn."""
    scenario = scenario.checked()
    state = SimulationState(schema=scenario.schema)
    state.global_state = scenario.global_state
    run = KeptRun(scenario, scenario.settings, state, manager=manager)
    _populate(run, scenario)
    run.require_manager()
    await run.create(store, name=scenario.name)
    async with run:
        yield run


@asynccontextmanager
async def resume_run(
    store: Store, run_id: UUID | str, scenario: Scenario, *, manager: AgentLifecycleManager | None = None
) -> AsyncIterator[KeptRun]:
    """Go on after the last complete turn, with the settings of the run. A run that has ended is opened again."""
    record = await find_run(store, run_id)
    if record.state is RunState.REMOVING:
        raise InvalidOperationError(f"run {record.run_id} is being removed; remove it again to finish that")
    kept = await kept_at(store, record, record.turn)
    run = KeptRun.restored(scenario, record.settings, kept, manager)
    run.attach(store, record)
    async with run:
        yield run


@asynccontextmanager
async def fork_run(
    store: Store,
    run_id: UUID | str,
    scenario: Scenario,
    *,
    at: int,
    settings: SimulationSettings | None = None,
    manager: AgentLifecycleManager | None = None,
) -> AsyncIterator[KeptRun]:
    """A run of its own that begins as another was after a turn; `record.settings.evolve(...)` gives other settings."""
    parent = await find_run(store, run_id)
    require_turn(parent, "at", at)
    kept = await kept_at(store, parent, at)
    chosen = (parent.settings if settings is None else settings).checked()
    if len(kept.agents) > chosen.max_agents:
        raise fault("max_agents", f"must be at least {len(kept.agents)}, the agents at turn {at}", chosen.max_agents)
    run = KeptRun.restored(scenario, chosen, kept, manager)
    await run.create(store, name=scenario.name, parent_id=parent.run_id, forked_at=at)
    async with run:
        yield run


async def remove_run(store: Store, run_id: UUID | str) -> int:
    """Remove a run and its turns; how many turns it had of its own. A run that others were forked from is refused.

    An open run is removed too; the program that plays it is refused at the next turn. A removal that was broken off
    leaves the run in the state `removing`, and is finished by removing it again.
    """
    record = await find_run(store, run_id)
    try:
        await store.run_unfenced(simulations.mark_removing, record.run_id)
    except SimulationNotFoundError:
        return 0  # another program was faster
    while await store.run_unfenced(simulations.remove_turns, record.run_id):
        pass
    return record.turn - (record.forked_at or 0)


def _populate(run: KeptRun, scenario: Scenario) -> None:
    count = sum(group.count for group in scenario.agents)
    if count > run.settings.max_agents:
        bound = f"must be at least {count}, the agents of the scenario"
        raise fault("settings.max_agents", bound, run.settings.max_agents)
    faults: list[Fault] = []
    for place, group in enumerate(scenario.agents):
        more: dict[str, Any] = {"kind": group.kind, "params": group.params, "initial_state": group.initial_state}
        request = LifecycleRequest(operation=Operation.ADD, agent_name=group.name, **more)
        for _ in range(group.count):
            result = run.join(request)
            if not result.done:
                wrong = result.faults or (Fault(field="name", bound=f"cannot join: {result.reason}"),)
                faults += [fault.under(f"agents.{place}") for fault in wrong]
                break
    if faults:
        raise ValidationError(faults)
