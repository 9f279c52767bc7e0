"""A row that cannot be read: which one it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from ostler.errors import DamagedRowError, StoreError

R = TypeVar("R")


def damaged_row(table: str, key: str, error: Exception, column: str | None = None) -> DamagedRowError:
    where = f", column {column}" if column else ""
    return DamagedRowError(
        f"the row {key} of the table {table} is damaged{where} ({type(error).__name__}: {error}); "
        "restore the store from a backup"
    )


def blame(rows: Iterable[R], read: Callable[[R], object], table: str, key: Callable[[R], str]) -> NoReturn:
    """Find the row of these that cannot be read. Only now, so that reading sound ones is not slower."""
    for row in rows:
        try:
            read(row)
        except MemoryError:
            raise
        except Exception as error:
            raise damaged_row(table, key(row), error) from error
    raise StoreError(f"a row of the table {table} could not be read, and can now; try again")


def shown_key(value: Any) -> str:
    """A key that may be damaged itself."""
    return value.hex() if isinstance(value, bytes) else str(value)
