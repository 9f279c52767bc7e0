"""A run played once more, from its seed: whether the same comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError
from ostler.lifecycle import AgentLifecycleManager
from ostler.simulation.around import Around
from ostler.simulation.bodies import opened
from ostler.simulation.checking import require_turn
from ostler.simulation.history import kept_at, loaded, require_end, require_run, turn_rows
from ostler.simulation.keeping import Ground, grounded
from ostler.simulation.managed import Stable
from ostler.simulation.orchestrator import SimulationOrchestrator
from ostler.simulation.reports import Performed, TurnReport
from ostler.simulation.requests import Operation
from ostler.simulation.rounds import Keepable
from ostler.simulation.runs import restored, run_settings
from ostler.simulation.scenario import Scenario
from ostler.simulation.scribe import Scribe
from ostler.store import Store


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Equal when every turn that was played again had the digest that is kept."""

    turns: int
    differs_at: int | None = None

    @property
    def equal(self) -> bool:
        return self.differs_at is None


class _NothingKept:
    """Writes turns for their digest only."""

    def __init__(self, scribe: Scribe) -> None:
        self.scribe = scribe
        self.unkept: Keepable = scribe.unkept

    async def keep(self, report: TurnReport, ended: str | None = None) -> None:
        del ended
        self.scribe.write(report, whole=False)

    async def end(self, why: str) -> None:
        del why


async def compare_run(
    ground: Ground | Store,
    run_id: UUID | str,
    scenario: Scenario,
    *,
    last: int | None = None,
    manager: AgentLifecycleManager | None = None,
) -> Comparison:
    """Ask every brain again, from the first turn of the run (of a fork: its own first), and stop where it differs.

    Operations from outside are done again where they were done.
    """
    here = grounded(ground, manager)
    run = await require_run(here.store, run_id)
    run_id, begin, end = run.run_id, run.forked_at or 0, run.turn if last is None else require_turn("last", last)
    if not begin <= end <= run.turn:
        raise InvalidOperationError(f"run {run_id} has turns {begin} to {run.turn} of its own; choose one of them")
    kept = await kept_at(here.store, run_id, begin)
    parts = restored(here, scenario, run_settings(run), kept)
    scribe = Scribe(parts.state, parts.engine, run.seed, kept.digest)
    scribe.learn()
    stable = None if here.manager is None else Stable(here.manager, here.new_id(), clock=here.clock)
    around = Around(clock=here.clock, stable=stable, keeping=_NothingKept(scribe))
    async with SimulationOrchestrator(
        parts.state,
        engine=parts.engine,
        settings=parts.settings,
        lifecycle_manager=parts.lifecycle_manager,
        brains=scenario.brains,
        around=around,
    ) as again:
        async for row in turn_rows(here.store, run_id, begin, end):
            # What is compared with must be what was written.
            _from_outside(again, opened(row, scribe.digest)["operations"])
            await again.play_turn()
            if scribe.digest != row.digest:
                return Comparison(turns=row.turn - begin, differs_at=row.turn)
    require_end(run, end, scribe.digest)
    return Comparison(turns=end - begin)


def _from_outside(again: SimulationOrchestrator, operations: list[Mapping[str, Any]]) -> None:
    for one in operations:
        if one["cause"] != "outside":
            continue
        operation, name = Operation(one["operation"]), one["agent_name"]
        if not one.get("done", True):
            again.note(Performed(operation=operation, agent_name=name, done=False, reason=one["reason"]))
        elif operation is Operation.ADD:
            own = loaded(again.state.form, name, one["initial_state"])
            again.add_kind(name, one["kind"], one["params"], own)
        elif operation is Operation.REMOVE:
            again.remove_agent(name)
        elif operation is Operation.PAUSE:
            again.pause_agent(name, one["auto_resume_turns"])
        else:
            again.resume_agent(name)
