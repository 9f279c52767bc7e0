"""A manager in virtual time: hours pass in milliseconds, and the same seed gives the same history.

`run_virtual` runs a coroutine on a loop whose time jumps to the next timer. `InlineStore` is a store without a thread.
"""

from ostler.testing.simulated.loop import DeadlockError, VirtualClock, run_virtual
from ostler.testing.simulated.store import InlineStore, KeptDatabase

__all__ = ["DeadlockError", "InlineStore", "KeptDatabase", "VirtualClock", "run_virtual"]
