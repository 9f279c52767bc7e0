"""Fakes and suites that ship with Ostler, so that users' tests and outside backends can lean on them."""

from ostler.testing.clock import ManualClock
from ostler.testing.folding import FoldedInstance, fold, invariant_faults
from ostler.testing.inline import inline_store
from ostler.testing.memory import MemoryTables, memory_store

__all__ = ["FoldedInstance", "ManualClock", "MemoryTables", "fold", "inline_store", "invariant_faults", "memory_store"]
