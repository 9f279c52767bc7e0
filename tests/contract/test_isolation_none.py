from __future__ import annotations

import pytest

from ostler.isolation import Isolation
from ostler.isolation.none import NoIsolation
from ostler.testing.clock import ManualClock
from ostler.testing.isolation_suite import IsolationContract


class TestNoIsolation(IsolationContract):
    @pytest.fixture
    def isolation(self, clock: ManualClock) -> Isolation:
        return NoIsolation(clock)
