from __future__ import annotations

import sys

import pytest

from ostler.errors import MissingExtraError
from ostler.store import open_store


@pytest.mark.parametrize("address", ["postgresql://host/name", "postgres://host/name"])
def test_without_the_driver_the_error_names_the_extra(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "ostler.store.postgres", raising=False)

    with pytest.raises(MissingExtraError) as told:
        open_store(address)

    assert str(told.value) == "a PostgreSQL store needs an optional part; run: pip install 'ostler[postgres]'"
    assert told.value.extra == "postgres"
