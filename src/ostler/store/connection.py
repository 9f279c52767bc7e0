"""The contract of a database connection, and the numbered migrations that both databases share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from ostler.errors import NotFoundError, StoreError, StoreFailedError, StoreTooNewError
from ostler.failpoints import FaultPoint
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.audit import GENESIS
from ostler.model.types import micros

Values = Mapping[str, Any]

_MICROSECOND = timedelta(microseconds=1)


class Head(NamedTuple):
    """The one row of the table `head`."""

    sequence: int
    pruned_until: int
    epoch: int


class Connection(ABC):
    """One connection; one thread uses it at a time. SQL names its parameters `:name` in both databases.

    Every method raises only `StoreError` and its subclasses.
    """

    #: What the tokens of a migration script become.
    tokens: ClassVar[Mapping[str, str]]

    @staticmethod
    @abstractmethod
    def id_out(value: UUID) -> Any:
        """The id as the database keeps it."""

    @abstractmethod
    def fetch(self, sql: str, values: Values) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def execute(self, sql: str, values: Values) -> int:
        """The number of rows that were changed."""

    @abstractmethod
    def execute_many(self, sql: str, rows: Sequence[Values]) -> None: ...

    @abstractmethod
    def begin(self) -> Head:
        """Begin a writing transaction. It waits for other writers, so that commits have one order."""

    @abstractmethod
    def commit(self) -> None:
        """Returns when the transaction is durable. Raises `OutcomeUnknownError` when that cannot be known."""

    @abstractmethod
    def rollback(self) -> None:
        """Never raises; does nothing outside a transaction."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """False after an error that ended the whole transaction, as a full disk does in SQLite."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def stored_version(self) -> int:
        """The schema version of what is stored, read without changing it; 0 where there is no store of Ostler."""

    def filter_clause(self, clause: str, *, first: bool) -> str:
        """A clause of a filter or a group. Only the first may choose the index where the planner would choose badly."""
        del first
        return clause

    def adapt(self, values: Values) -> dict[str, Any]:
        """Parameters as the database takes them: ids, times, durations, flags and named values."""
        adapted = dict(values)
        for name, value in values.items():
            if value is None or type(value) in {str, int, bytes, float}:
                continue
            if isinstance(value, UUID):
                adapted[name] = self.id_out(value)
            elif isinstance(value, datetime):
                adapted[name] = micros(value)
            elif isinstance(value, timedelta):
                adapted[name] = value // _MICROSECOND
            elif isinstance(value, bool):
                adapted[name] = int(value)
            elif isinstance(value, Enum):
                adapted[name] = value.value
        return adapted


def headless(where: str) -> StoreFailedError:
    return StoreFailedError(
        f"the database of {where} was emptied: its head row is gone under this program; nothing more is written. "
        "Restore it from a backup, or choose another home"
    )


# --- migrations --------------------------------------------------------------------------------------

_FILE = re.compile(r"(\d{4})_\w+\.(up|down)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    up: str
    down: str

    def statements(self, connection: Connection, direction: str = "up") -> Iterator[str]:
        """Single statements; no migration holds a semicolon inside one."""
        script = self.up if direction == "up" else self.down
        # What a migration can say that a parameter cannot: the name of a type.
        tokens = {**connection.tokens, "$GENESIS": GENESIS}
        for token in sorted(tokens, key=len, reverse=True):
            script = script.replace(token, tokens[token])
        lines = (line.split("--", 1)[0].rstrip() for line in script.splitlines())
        for statement in "\n".join(line for line in lines if line).split(";"):
            if statement.strip():
                yield statement.strip()


@cache
def migrations() -> tuple[Migration, ...]:
    scripts: dict[int, dict[str, str]] = {}
    for entry in (resources.files("ostler.store") / "sql").iterdir():
        if match := _FILE.fullmatch(entry.name):
            scripts.setdefault(int(match[1]), {})[match[2]] = entry.read_text()
    return tuple(Migration(number, **scripts[number]) for number in sorted(scripts))


def require_known(version: int) -> None:
    newest = migrations()[-1].number
    if version > newest:
        raise StoreTooNewError(
            f"this store has shape {version}, this program knows up to {newest}: it was made by a newer Ostler; "
            "upgrade the program, nothing was changed"
        )


def require_current(version: int) -> None:
    """For a look that changes nothing, and so migrates nothing."""
    require_known(version)
    newest = migrations()[-1].number
    if version == 0:
        raise NotFoundError("there is no Ostler store there; start something, or name another place")
    if version < newest:
        raise StoreError(f"this store has shape {version}, this program reads {newest}; open it once to bring it up")


def run_migration(connection: Connection, migration: Migration, fault: FaultPoint, direction: str = "up") -> None:
    """The statements of one migration; the caller has begun a transaction and commits it."""
    for statement in migration.statements(connection, direction):
        values = {"home": HOME_WORKSPACE_ID} if ":home" in statement else {}
        connection.execute(statement, connection.adapt(values))
        fault("store.migrate.statement")
