from __future__ import annotations

import pytest

from ostler.testing import MemoryTables, inline_store
from ostler.testing.store_suite import OpenStore, StoreContract


class TestInlineStore(StoreContract):
    """All of it, but for what takes several loops: this store is for one."""

    test_threads_with_loops_of_their_own_may_all_commit = None  # type: ignore[assignment]  # how a class drops an inherited test
    test_a_caller_whose_loop_is_gone_does_not_stop_the_others = None  # type: ignore[assignment]  # how a class drops an inherited test

    @pytest.fixture
    def open_store(self) -> OpenStore:
        tables = MemoryTables()
        return lambda seams: inline_store(tables, seams)
