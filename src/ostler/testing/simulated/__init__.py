"""A manager in virtual time: hours pass in milliseconds, and the same seed gives the same history.

`run_virtual` runs a coroutine on a loop whose time jumps to the next timer. `InlineStore` is a store without a thread,
`SimulatedIsolation` a level whose agents are real objects on a machine that does not exist.
"""

from ostler.testing.simulated.isolation import SimulatedIsolation
from ostler.testing.simulated.loop import DeadlockError, VirtualClock, run_virtual
from ostler.testing.simulated.machine import Machine, Misfortune
from ostler.testing.simulated.store import InlineStore, KeptDatabase

__all__ = [
    "DeadlockError",
    "InlineStore",
    "KeptDatabase",
    "Machine",
    "Misfortune",
    "SimulatedIsolation",
    "VirtualClock",
    "run_virtual",
]
