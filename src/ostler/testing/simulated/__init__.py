"""The lifecycle in made-up time, in a made-up place, with made-up misfortune: thousands of nights in a minute."""

from ostler.testing.simulated.isolation import Misfortune, SimulatedIsolation, World
from ostler.testing.simulated.loop import DeadlockError, VirtualClock, VirtualLoop, run_virtual
from ostler.testing.simulated.rehearsal import Report, rehearse

__all__ = [
    "DeadlockError",
    "Misfortune",
    "Report",
    "SimulatedIsolation",
    "VirtualClock",
    "VirtualLoop",
    "World",
    "rehearse",
    "run_virtual",
]
