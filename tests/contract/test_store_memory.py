from __future__ import annotations

import pytest

from ostler.testing import MemoryTables, memory_store
from ostler.testing.store_suite import OpenStore, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        tables = MemoryTables()
        return lambda seams: memory_store(seams, tables)
