"""What is passed in: time, chance, identifiers and points where a test may break things."""

from ostler.seams.clock import Clock, SystemClock
from ostler.seams.faults import FaultPlan, FaultPoint, InjectedCrash, no_fault
from ostler.seams.ids import IdSource, Uuid7Source, uuid7

__all__ = [
    "Clock",
    "FaultPlan",
    "FaultPoint",
    "IdSource",
    "InjectedCrash",
    "SystemClock",
    "Uuid7Source",
    "no_fault",
    "uuid7",
]
