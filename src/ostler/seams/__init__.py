"""What is passed in: time, chance, identifiers, and points where a test may break things."""

import random
from dataclasses import dataclass, field

from ostler.seams.clock import Clock, SystemClock, Timer
from ostler.seams.deadline import Deadline
from ostler.seams.faults import FaultPlan, FaultPoint, InjectedCrash, no_fault
from ostler.seams.ids import IdSource, Uuid7Source, uuid7

__all__ = [
    "Clock",
    "Deadline",
    "FaultPlan",
    "FaultPoint",
    "IdSource",
    "InjectedCrash",
    "Seams",
    "SystemClock",
    "Timer",
    "Uuid7Source",
    "no_fault",
    "uuid7",
]


@dataclass(frozen=True, kw_only=True)
class Seams:
    """The outside world as a store and a manager see it; tests pass their own."""

    clock: Clock = field(default_factory=SystemClock)
    #: None draws a seed from the system.
    chance: random.Random | None = None
    #: None makes rising ids from the clock and chance.
    ids: IdSource | None = None
    fault: FaultPoint = no_fault

    def id_source(self) -> IdSource:
        return self.ids or Uuid7Source(self.clock, self.chance)
