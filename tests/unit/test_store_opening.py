"""From what a user writes to a database: a directory, an address, memory."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ostler.errors import MissingExtraError, ValidationError
from ostler.store.store import Store, database_at, home_path, is_address


@pytest.mark.parametrize("address", ["postgresql://host/name", "postgres://host/name"])
def test_without_the_driver_the_error_names_the_extra(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "ostler.store.postgres", raising=False)
    with pytest.raises(MissingExtraError) as told:
        Store(address)
    assert str(told.value) == "a PostgreSQL store needs an optional part; run: pip install 'ostler[postgres]'"
    assert told.value.extra == "postgres"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("", "is empty; name a directory"),
        (" ", "is empty; name a directory"),
        ("a\0b", "has a NUL in it"),
        (Path("a\0b"), "has a NUL in it"),
        ("~no-such-user/x", "must be a directory that can be found; this user has none"),
        ("mysql://ada:secret@host/name", "must be a directory, :memory:, or an address that begins with postgresql://"),
    ],
)
def test_what_can_be_no_store_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | Path, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError, match=re.escape(f"store {told}")) as refused:
        Store(where)
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


class Somewhere:
    """What leads to a path without being one."""

    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> str | bytes:
        return self._path


def test_whatever_leads_to_a_path_is_a_home() -> None:
    where: Any = Somewhere("/some/where")
    assert home_path(where) == Path("/some/where")
    assert home_path("~/x") == Path.home() / "x"
    wrong: Any = Somewhere(b"home")
    with pytest.raises(ValidationError, match="store must be a directory or a postgresql:// address"):
        database_at(wrong)
    for none in (None, 7):
        with pytest.raises(ValidationError, match=f"as a text or a Path{'' if none is None else ', was 7'}"):
            home_path(none)  # type: ignore[arg-type]  # wrong on purpose


def test_an_address_is_told_from_a_directory() -> None:
    assert is_address("postgresql://host/name")
    assert is_address(":memory:")
    assert not is_address("/home/ada/.ostler")
    assert not is_address(os.curdir)
