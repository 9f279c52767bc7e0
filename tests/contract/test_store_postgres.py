from __future__ import annotations

import pytest

from ostler.store import open_store as open_at
from ostler.testing.store_suite import OpenStore, StoreContract


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def open_store(self, postgres_address: str) -> OpenStore:
        return lambda seams: open_at(postgres_address, seams)
