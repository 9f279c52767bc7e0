"""What a user's own tests need."""

from ostler.testing.clock import ManualClock

__all__ = ["ManualClock"]
