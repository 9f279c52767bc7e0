from __future__ import annotations

import pytest
from isolation import IsolationContract

from ostler.isolation import Isolation
from ostler.isolation.none import NoIsolation
from ostler.testing.clock import ManualClock


class TestNoIsolation(IsolationContract):
    @pytest.fixture
    def isolation(self, clock: ManualClock) -> Isolation:
        return NoIsolation(clock)
