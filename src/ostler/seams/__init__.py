"""What is passed in: time, chance, identifiers and points where a test may break things."""

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
    "SystemClock",
    "Timer",
    "Uuid7Source",
    "no_fault",
    "uuid7",
]
