"""Rows to records and back, derived from the annotations of a record."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache, partial
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from ostler.errors import DamagedRowError
from ostler.model.record import Record, adapter
from ostler.model.types import from_micros
from ostler.store.transaction import Transaction

if TYPE_CHECKING:
    from pydantic import TypeAdapter

R = TypeVar("R", bound=Record)

Load = Callable[[Any], Any]
Row = tuple[Any, ...]
_JSON = "_json"
_MICROS = "_us"


class RecordTable(Generic[R]):
    """The columns of one table and their codecs.

    Numbers and text are columns as they are; ids, times, enums and flags are adapted by the connection; a duration
    is a column `NAME_us`, every nested value a column `NAME_json`.
    """

    def __init__(
        self, cls: type[R], table: str, *, renamed: Mapping[str, str] | None = None, key_columns: int = 1
    ) -> None:
        """`key_columns` is how many of the first columns name a row."""
        self._cls = cls
        self.table = table
        self._key_columns = key_columns
        hints = typing.get_type_hints(cls, include_extras=True)
        self._fields: list[tuple[str, str, Load | None]] = []
        self._dumps: dict[str, Callable[[Any], Any]] = {}
        for field in fields(cls):  # type: ignore[arg-type]  # every record is a dataclass
            hint = _bare(hints[field.name])
            suffix, load = _codec(hint)
            column = (renamed or {}).get(field.name, field.name + suffix)
            self._fields.append((field.name, column, load))
            if suffix == _JSON:
                self._dumps[field.name] = partial(_dump, adapter(hint))
        self._names = tuple(name for name, _, _ in self._fields)
        self._loads = [(name, load) for name, _, load in self._fields if load is not None]
        self.columns = tuple(column for _, column, _ in self._fields)
        self.select = f"SELECT {', '.join(self.columns)} FROM {table}"

    def read(self, rows: Iterable[Row]) -> list[R]:
        return [self._decode(row) for row in rows]

    def read_one(self, row: Row | None) -> R | None:
        return None if row is None else self._decode(row)

    def _decode(self, row: Row) -> R:
        try:
            values = dict(zip(self._names, row, strict=True))
            for name, load in self._loads:
                if (value := values[name]) is not None:
                    values[name] = load(value)
            return self._cls(**values)
        except Exception as error:
            raise self._damage(row) from error

    def _damage(self, row: Row) -> DamagedRowError:
        """Name the row, and the column that cannot be read."""
        what = ""
        for (_, column, load), value in zip(self._fields, row, strict=True):
            try:
                if load is not None and value is not None:
                    load(value)
            except Exception as error:  # noqa: BLE001 - any of them is the damage
                what = f", column {column} ({type(error).__name__}: {str(error).splitlines()[0]})"
                break
        key = " ".join(part.hex() if isinstance(part, bytes) else str(part) for part in row[: self._key_columns])
        return DamagedRowError(
            f"the row {key} of the table {self.table} is damaged{what}; restore the store from a backup"
        )

    def encode(self, record: R) -> dict[str, Any]:
        """Values by column."""
        values: dict[str, Any] = {}
        for name, column, _ in self._fields:
            value = getattr(record, name)
            values[column] = value if value is None or name not in self._dumps else self._dumps[name](value)
        return values

    def insert(self, tx: Transaction, record: R, **more: Any) -> None:
        """`more` are columns that the record does not have."""
        values = {**self.encode(record), **more}
        names = ", ".join(values)
        parameters = ", ".join(f":{name}" for name in values)
        tx.execute(f"INSERT INTO {self.table} ({names}) VALUES ({parameters})", **values)

    def dump(self, name: str, value: Any) -> str | None:
        """One nested value as its column holds it."""
        text: str | None = None if value is None else self._dumps[name](value)
        return text


def _dump(types: TypeAdapter[Any], value: Any) -> str:
    return types.dump_json(value).decode()


def _codec(hint: Any) -> tuple[str, Load | None]:
    """The suffix of the column and the function that reads it; None where the value is used as it is."""
    if hint in {str, int, float}:
        return "", None
    if hint is bool:
        return "", bool
    if hint is UUID:
        return "", _load_id
    if hint is datetime:
        return "", from_micros
    if hint is timedelta:
        return _MICROS, _load_duration
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "", hint
    load: Load = adapter(hint).validate_json
    if isinstance(hint, type) and issubclass(hint, Record):
        return _JSON, _shared(load, hint)
    return _JSON, lru_cache(maxsize=4096)(load) if typing.get_origin(hint) is tuple else load


def _shared(load: Load, cls: type[Record]) -> Load:
    """Rows repeat records, so each is decoded once; but not one that holds a mapping, which a reader could change."""
    hints = typing.get_type_hints(cls, include_extras=True)
    mappings = [field.name for field in fields(cls) if typing.get_origin(_bare(hints[field.name])) is Mapping]  # type: ignore[arg-type]  # every record is a dataclass
    cached = lru_cache(maxsize=4096)(load)

    def read(text: Any) -> Any:
        record = cached(text)
        return load(text) if any(getattr(record, name) is not None for name in mappings) else record

    return read if mappings else cached


@lru_cache(maxsize=4096)
def _load_id(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(bytes=value)


def _load_duration(value: int) -> timedelta:
    return timedelta(microseconds=value)


def _bare(hint: Any) -> Any:
    """The annotation without `Annotated` and `None`."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _bare(typing.get_args(hint)[0])
    if origin in {typing.Union, UnionType}:
        rest = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else hint
    return hint
