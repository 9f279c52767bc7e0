"""Fakes and suites that ship with Ostler, so that users' tests and outside backends can lean on them."""

from ostler.testing.memory import MemoryTables, memory_store

__all__ = ["MemoryTables", "memory_store"]
