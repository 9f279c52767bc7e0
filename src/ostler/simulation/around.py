"""What a run leans on beside its own rules: time, whoever spawns brains elsewhere, and where turns are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ostler.lifecycle import AgentLifecycleManager
from ostler.seams import Clock, SystemClock, Uuid7Source
from ostler.simulation.managed import Stable
from ostler.simulation.reports import TurnReport
from ostler.simulation.rounds import Keepable


class Keeping(Protocol):
    """Where turns are written down as they are completed."""

    unkept: Keepable

    async def keep(self, report: TurnReport, ended: str | None = None) -> None: ...

    async def end(self, why: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run leans on, beside its own rules."""

    clock: Clock = field(default_factory=SystemClock)
    #: Spawns and retires the brains that live elsewhere.
    manager: AgentLifecycleManager | None = None
    #: Their instances; where there is none, they are those of a run without a name.
    stable: Stable | None = None
    keeping: Keeping | None = None

    def housed(self) -> Stable | None:
        if self.stable is not None or self.manager is None:
            return self.stable
        return Stable(self.manager, Uuid7Source(self.clock).new(), clock=self.clock)
