"""What kept runs stand on, and how their turns come into the store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from ostler.errors import InvalidOperationError, ValidationError
from ostler.lifecycle import AgentLifecycleManager
from ostler.model import Fault, RunState, SimulationRun, SimulationTurn, shown
from ostler.seams import Clock, IdSource, SystemClock, Uuid7Source
from ostler.simulation.brains import Managed
from ostler.simulation.reports import TurnReport
from ostler.simulation.rounds import Keepable
from ostler.simulation.scribe import Scribe, Written
from ostler.simulation.state import SimulationState
from ostler.store import Store
from ostler.store.commands import MoveRun, RecordTurn


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What runs stand on: the store, and whoever spawns the brains that live elsewhere."""

    store: Store
    manager: AgentLifecycleManager | None = None
    clock: Clock = field(default_factory=SystemClock)
    ids: IdSource | None = None

    def new_id(self) -> UUID:
        return (self.ids or Uuid7Source(self.clock)).new()

    def row(self, written: Written, run_id: UUID) -> SimulationTurn:
        return SimulationTurn(
            run_id=run_id,
            turn=written.turn,
            whole=written.whole,
            body=written.body,
            digest=written.digest,
            occurred_at=self.clock.wall(),
        )

    def require_manager(self, state: SimulationState) -> None:
        """Without one, every managed brain would fail in every turn."""
        far = [member.name for member in state.members.values() if isinstance(member.agent, Managed)]
        if far and self.manager is None:
            raise InvalidOperationError(
                f"the brain of {far[0]} lives as an instance of Ostler, and nobody is here to spawn it; "
                "pass the lifecycle manager as manager="
            )


def grounded(ground: Any, manager: AgentLifecycleManager | None) -> Ground:
    """A store is ground enough."""
    if isinstance(ground, Store):
        return Ground(store=ground, manager=manager)
    if isinstance(ground, Ground) and isinstance(ground.store, Store):
        return ground if manager is None else replace(ground, manager=manager)
    bound = "must be a store, as `async with open_store(home) as store` gives it, or Ground(store=...)"
    raise ValidationError([Fault(field="ground", bound=bound, value=shown(ground))])


class StoreKeeping:
    """Each turn in one commit: acknowledged means that it is on the disk."""

    def __init__(self, ground: Ground, run: SimulationRun, scribe: Scribe, every: int) -> None:
        self._ground = ground
        self._scribe = scribe
        self._every = every
        #: Where the brains are a manager's, a turn counts only as long as it is the owner. A store of its own, beside
        #: that of the manager, never is.
        self._by_owner = ground.manager is not None and ground.manager.store is ground.store
        self.run = run
        self.unkept: Keepable = scribe.unkept
        #: The turn with which the run ends, and why; None while nobody knows.
        self.last: tuple[int, str] | None = None

    async def keep(self, report: TurnReport, ended: str | None = None) -> None:
        """One that has ended and is played on is open again. The last turn and the end are one commit."""
        written = self._scribe.write(report, whole=report.turn % self._every == 0)
        if ended is None and self.last is not None and self.last[0] == report.turn:
            ended = self.last[1]
        await self.reopen()
        row = self._ground.row(written, self.run.run_id)
        self.run = await self._ground.store.commit(
            RecordTurn(run_id=self.run.run_id, turn=row, ended=ended, follows=written.follows, by_owner=self._by_owner)
        )

    async def reopen(self) -> None:
        if self.run.state is RunState.ENDED:
            await self._move(RunState.OPEN)

    async def end(self, why: str) -> None:
        if self.run.state is RunState.ENDED:
            return
        await self._move(RunState.ENDED, why)

    async def _move(self, to: RunState, why: str | None = None) -> None:
        run = self.run
        self.run = await self._ground.store.commit(
            MoveRun(run_id=run.run_id, to=to, outcome=why, expected_version=run.version, by_owner=self._by_owner)
        )
