"""Runs that are kept: begun, resumed after any crash, forked at a turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError, SimulationError, ValidationError
from ostler.lifecycle import AgentLifecycleManager
from ostler.model import Fault, SimulationRun, shown
from ostler.model.validation import faults_of
from ostler.simulation.answers import placed_text
from ostler.simulation.around import Around
from ostler.simulation.checking import require_count, require_kind, require_turn
from ostler.simulation.engine import Engine
from ostler.simulation.foreign import is_call_off
from ostler.simulation.history import Kept, kept_at, remind, require_run
from ostler.simulation.joining import Joining
from ostler.simulation.keeping import Ground, StoreKeeping, grounded
from ostler.simulation.managed import Stable
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.reports import RunReport, TurnReport
from ostler.simulation.scenario import AgentGroup, Scenario
from ostler.simulation.scribe import Scribe
from ostler.simulation.settings import SimulationSettings
from ostler.simulation.state import SimulationState
from ostler.simulation.validator import LifecycleValidator
from ostler.store import Store
from ostler.store.commands import CreateRun

COMPLETED = "all turns were played"


class KeptRun(SimulationOrchestrator):
    """An orchestrator whose every turn is a checkpoint."""

    def __init__(self, parts: Parts, keeping: StoreKeeping, around: Around) -> None:
        super().__init__(
            parts.state,
            engine=parts.engine,
            settings=parts.settings,
            lifecycle_manager=parts.lifecycle_manager,
            brains=parts.scenario.brains,
            around=around,
        )
        self._keeping = keeping
        self._scenario = parts.scenario

    @property
    def record(self) -> SimulationRun:
        """The run as the store has it."""
        return self._keeping.run

    @property
    def run_id(self) -> UUID:
        return self._keeping.run.run_id

    async def reopen(self) -> None:
        """Let a run that has ended go on."""
        await self._keeping.reopen()

    async def finish(
        self, turns: int | None = None, *, on_turn: Callable[[TurnReport], None] | None = None
    ) -> RunReport:
        """Play on to this turn, else to the last one of the scenario, and end the run there."""
        last = self._scenario.turns if turns is None else require_count("turns", turns)
        self._require_no_run()  # whose last turn would be forgotten
        self._keeping.last = (last, COMPLETED)
        try:
            report = await self.run(max(last - self.state.turn, 0), on_turn=on_turn)
        finally:
            self._keeping.last = None
        if report.ended is None:
            await self._keeping.end(COMPLETED)
        return replace(report, ended=report.ended or COMPLETED)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an orchestrator is put together from."""

    scenario: Scenario
    settings: SimulationSettings
    state: SimulationState
    engine: Engine
    lifecycle_manager: LifecycleManager


@asynccontextmanager
async def begin_run(
    ground: Ground | Store, scenario: Scenario, *, manager: AgentLifecycleManager | None = None
) -> AsyncIterator[KeptRun]:
    """A new run of a scenario. It is in the store, with everybody in it, before the first turn."""
    here = grounded(ground, manager)
    require_kind("scenario", scenario, Scenario)
    scenario.validate().require()
    settings = scenario.settled()
    first = SimulationState(global_state=_as_json(scenario.global_state), schema=scenario.schema)
    parts = _parts(scenario, settings, first)
    faults = tuple(_populate(parts))
    if faults:
        raise ValidationError(faults)
    here.require_manager(parts.state)
    scribe = Scribe(parts.state, parts.engine, settings.seed)
    run = await _create(here, parts, scribe, {"name": scenario.name})
    async with _opened(here, parts, run, scribe) as orchestrator:
        yield orchestrator


@asynccontextmanager
async def resume_run(
    ground: Ground | Store, run_id: UUID | str, scenario: Scenario, *, manager: AgentLifecycleManager | None = None
) -> AsyncIterator[KeptRun]:
    """Go on after the last complete turn, with the settings that the run has. One that has ended is opened again."""
    here = grounded(ground, manager)
    run = await require_run(here.store, run_id)
    kept = await kept_at(here.store, run_id, run.turn)
    parts = restored(here, scenario, run_settings(run), kept)
    scribe = Scribe(parts.state, parts.engine, run.seed, kept.digest)
    scribe.learn()
    async with _opened(here, parts, run, scribe) as orchestrator:
        await orchestrator.reopen()
        yield orchestrator


@asynccontextmanager
async def fork_run(
    ground: Ground | Store,
    run_id: UUID | str,
    scenario: Scenario,
    *,
    at: int,
    settings: SimulationSettings | None = None,
    manager: AgentLifecycleManager | None = None,
) -> AsyncIterator[KeptRun]:
    """A run of its own that begins as another was after a turn; `run_settings` gives those to change."""
    here = grounded(ground, manager)
    parent = await require_run(here.store, run_id)
    kept = await kept_at(here.store, run_id, require_turn("at", at))
    chosen = run_settings(parent) if settings is None else settings
    require_kind("settings", chosen, SimulationSettings)
    chosen.validate().require()
    chosen = chosen.evolve(parameters=_as_json(chosen.parameters))
    parts = restored(here, scenario, chosen, kept)
    if len(parts.state.members) > chosen.max_agents:
        bound = f"must be at least {len(parts.state.members)}, the agents there are at turn {at}"
        raise ValidationError([Fault(field="max_agents", bound=bound, value=str(chosen.max_agents))])
    scribe = Scribe(parts.state, parts.engine, chosen.seed, kept.digest)
    run = await _create(here, parts, scribe, {"name": scenario.name, "parent_id": parent.run_id, "forked_at": at})
    async with _opened(here, parts, run, scribe) as orchestrator:
        yield orchestrator


def run_settings(run: SimulationRun) -> SimulationSettings:
    return SimulationSettings.from_json(json.dumps(dict(run.settings)))


def restored(ground: Ground, scenario: Scenario, settings: SimulationSettings, kept: Kept) -> Parts:
    """Everything as it was after a turn, with brains and engine made anew."""
    require_kind("scenario", scenario, Scenario)
    scenario.validate().require()
    missing = sorted({str(one["kind"]) for one in kept.in_order() if one["kind"] not in scenario.brains})
    if missing:
        raise InvalidOperationError(
            f"the run has agents of the kinds {', '.join(missing)}, which this scenario's brains do not have; add them"
        )
    parts = _parts(scenario, settings, kept.state(scenario.brains, scenario.schema))
    ground.require_manager(parts.state)
    remind(parts.engine, kept.memory, "the engine", "engine")
    return parts


def _parts(scenario: Scenario, settings: SimulationSettings, state: SimulationState) -> Parts:
    return Parts(
        scenario=scenario,
        settings=settings,
        state=state,
        engine=_engine(scenario),
        lifecycle_manager=LifecycleManager(LifecycleValidator(settings.max_agents)),
    )


def _engine(scenario: Scenario) -> Engine:
    try:
        engine = scenario.engine()
    except BaseException as error:
        if is_call_off(error):
            raise
        raise SimulationError(f"the engine cannot be made: {placed_text(error)}") from error
    if isinstance(engine, type) or not callable(getattr(engine, "update", None)):
        bound = "must make an object with a method `update`"
        raise ValidationError([Fault(field="engine", bound=bound, value=shown(engine))])
    return engine


def _as_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be after a resume: tuples become lists at once."""
    kept: dict[str, Any] = json.loads(json.dumps(dict(data)))
    return kept


def _populate(parts: Parts) -> Iterator[Fault]:
    wanted = sum(group.count for group in parts.scenario.agents)
    if wanted > parts.settings.max_agents:
        bound = f"must be at least {wanted}, the agents of the scenario"
        yield Fault(field="settings.max_agents", bound=bound, value=str(parts.settings.max_agents))
        return
    joining = Joining(parts.lifecycle_manager, parts.state, parts.scenario.brains, kept=True)
    for place, group in enumerate(parts.scenario.agents):
        params = _as_json(group.params)
        for _ in range(group.count):
            faults = tuple(_join(joining, group, params))
            yield from (fault.under(f"agents.{place}") for fault in faults)
            if faults:
                break


def _join(joining: Joining, group: AgentGroup, params: Mapping[str, Any]) -> Iterator[Fault]:
    try:
        agent = joining.brains.make(group.kind, params)
    except ValidationError as error:
        yield from faults_of(error)
        return
    _, outcome = joining.add(group.name, agent, group.initial_state, made_by=(group.kind, params))
    yield from outcome.faults
    if not outcome and not outcome.faults:
        yield Fault(field="name", bound=f"cannot join: {outcome.reason}", value=shown(group.name))


async def _create(ground: Ground, parts: Parts, scribe: Scribe, more: Mapping[str, Any]) -> SimulationRun:
    now, run_id, first = ground.clock.wall(), ground.new_id(), scribe.begin()
    run = SimulationRun(
        run_id=run_id,
        seed=parts.settings.seed,
        turn=parts.state.turn,
        settings=json.loads(parts.settings.to_json()),
        scenario=parts.scenario.source,
        digest=first.digest,
        created_at=now,
        updated_at=now,
        **more,
    )
    return await ground.store.commit(CreateRun(run=run, first=ground.row(first, run_id)))


@asynccontextmanager
async def _opened(ground: Ground, parts: Parts, run: SimulationRun, scribe: Scribe) -> AsyncIterator[KeptRun]:
    keeping = StoreKeeping(ground, run, scribe, parts.settings.snapshot_every)
    stable = None if ground.manager is None else Stable(ground.manager, run.run_id, clock=ground.clock)
    if stable is not None:
        await stable.sweep(parts.state.members.values())
    around = Around(clock=ground.clock, stable=stable, keeping=keeping)
    async with KeptRun(parts, keeping, around) as orchestrator:
        yield orchestrator
