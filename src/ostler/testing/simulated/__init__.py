"""The lifecycle in made-up time, in a made-up place, with made-up misfortune: thousands of nights in a minute."""

from ostler.testing.simulated.ground import Report
from ostler.testing.simulated.isolation import Misfortune, SimulatedIsolation, World
from ostler.testing.simulated.loop import DeadlockError, VirtualClock, VirtualLoop, run_virtual
from ostler.testing.simulated.machine import Machine
from ostler.testing.simulated.outliving import OutlivingIsolation
from ostler.testing.simulated.rehearsal import rehearse

__all__ = [
    "DeadlockError",
    "Machine",
    "Misfortune",
    "OutlivingIsolation",
    "Report",
    "SimulatedIsolation",
    "VirtualClock",
    "VirtualLoop",
    "World",
    "rehearse",
    "run_virtual",
]
