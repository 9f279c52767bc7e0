"""Fakes and suites that ship with Ostler, so that users' tests and outside backends can lean on them."""

from ostler.testing.clock import ManualClock

__all__ = ["ManualClock"]
