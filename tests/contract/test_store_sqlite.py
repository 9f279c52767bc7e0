from __future__ import annotations

from pathlib import Path

import pytest

from ostler.store import open_store as open_at
from ostler.testing.store_suite import OpenStore, StoreContract


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda seams: open_at(tmp_path / "home", seams)
