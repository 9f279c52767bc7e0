"""The narrow port between the store's rules and a database: load, save, and a few queries.

Everything that decides lives above it, once, for every database. A session is one connection and is used by
one thread at a time; nothing here is asynchronous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from ostler.errors import StoreError
from ostler.model import (
    AgentInstance,
    Attempt,
    AuditEntry,
    Event,
    GetInstancesFilter,
    SimulationRun,
    SimulationTurn,
    Task,
    TaskFilter,
    Wait,
    Workspace,
)
from ostler.store.eventrows import EventRow
from ostler.store.kinds import Key, Kind, Ledger


class Head(NamedTuple):
    """Where the store stands; one row, locked by whoever writes."""

    #: Rises with every commit, so that a cache knows when somebody else has written.
    commit_number: int
    #: The number of the newest event.
    sequence: int
    #: Events up to this number are no longer kept.
    horizon: int
    #: The owner that may write.
    epoch: int


class Change(NamedTuple):
    """One row from what it was to what it is; None stands for not there."""

    kind: Kind
    key: Key
    old: Any
    new: Any
    #: The fields that may differ; None when the writer has to look.
    fields: frozenset[str] | None = None


#: The fields of an `AuditEntry` in their order; one is made for every act, so it stays a plain tuple until read.
AuditRow = tuple[Any, ...]
AUDIT_FIELDS = tuple(field.name for field in fields(AuditEntry))


@dataclass(kw_only=True, slots=True)
class Changes:
    """Everything that one commit writes."""

    head: Head
    rows: list[Change] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    prune: list[Prune] = field(default_factory=list)
    #: Per workspace, the most active instances its plan allows; the ledger row is written on that condition.
    room: dict[UUID, int | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prune:
    """Rows that are removed by range rather than one by one."""

    table: str  # "events" | "audit" | "turns"
    #: The last to go; of turns, the first.
    until: int
    #: Whose they are: the workspace of audit entries, the run of turns.
    owner_id: UUID | None = None


class OutOfStepError(StoreError):
    """A batch cannot be written as one: a row was not as the cache had it, or one command is in the way of another.

    Its commands are run again, one by one, on what is really there.
    """


class Session(ABC):
    """One connection. The writer uses begin, load, save and commit; readers use the rest."""

    @abstractmethod
    def begin(self) -> Head:
        """Open a write transaction, lock the head and return it. Blocks while another writer is inside."""

    @abstractmethod
    def load(self, kind: Kind, key: Key) -> Any:
        """The row with that key, as its record, or None."""

    @abstractmethod
    def save(self, changes: Changes) -> None:
        """Write everything; nothing is visible before `commit`."""

    @abstractmethod
    def commit(self) -> None:
        """Make it durable. Returning means that it survives kill -9 and a power cut."""

    @abstractmethod
    def rollback(self) -> None:
        """Forget everything since `begin`; harmless when there is nothing to forget."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def head(self) -> Head: ...

    @abstractmethod
    def instances(self, workspace_id: UUID, wanted: GetInstancesFilter) -> list[AgentInstance]: ...

    @abstractmethod
    def tasks(self, workspace_id: UUID, wanted: TaskFilter) -> list[Task]: ...

    @abstractmethod
    def ledger(self, workspace_id: UUID) -> Ledger | None: ...

    @abstractmethod
    def totals(self, workspace_id: UUID) -> tuple[Workspace, Ledger] | None:
        """A workspace and its running totals, both of one moment; None where there is no such workspace."""

    @abstractmethod
    def events(self, window: EventWindow) -> list[Event]: ...

    @abstractmethod
    def audit(self, workspace_id: UUID, after: int, limit: int) -> list[AuditEntry]: ...

    @abstractmethod
    def chain_from(self, first: UUID) -> UUID | None:
        """The lowest id, from this one on, of a workspace with a row, a ledger or an audit entry."""

    @abstractmethod
    def attempts(self, instance_id: UUID | None, limit: int, after: tuple[UUID, int] | None = None) -> list[Attempt]:
        """All of one instance, or every open one of the store, in key order from beyond that key."""

    @abstractmethod
    def waits(self, window: WaitWindow) -> list[Wait]:
        """Open waits, the earliest due first and those without a time last."""

    @abstractmethod
    def due(self, kind: Kind, until: datetime, limit: int) -> list[Key]:
        """The keys of the oldest finished instances, tasks or waits that ended by then, or of answers given by then."""

    @abstractmethod
    def event_before(self, moment: datetime, limit: int) -> int:
        """The last of the oldest events, at most so many, before the first from that moment on; 0 for none."""

    @abstractmethod
    def audit_before(self, workspace_id: UUID, moment: datetime, limit: int) -> int:
        """The same for the audit entries of a workspace."""

    @abstractmethod
    def listing(self, kind: Kind, after: Key | None, limit: int) -> Sequence[Any]:
        """Records of a small table (workspaces, principals, definitions) in key order, a page at a time."""

    @abstractmethod
    def token(self, token_hash: str) -> Any: ...

    @abstractmethod
    def runs(self, workspace_id: UUID, before: UUID | None, limit: int) -> list[SimulationRun]:
        """Those of one workspace with an id below that one, the highest first."""

    @abstractmethod
    def turns(self, run_id: UUID, after: int, limit: int) -> list[SimulationTurn]:
        """Those of one run with a number above that one, in order."""

    @abstractmethod
    def whole_turn(self, run_id: UUID, until: int) -> SimulationTurn | None:
        """The newest one with a complete state, up to that number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventWindow:
    """Which events: after a cursor, at most so many, of one workspace or one instance or all."""

    after: int
    limit: int
    workspace_id: UUID | None = None
    instance_id: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitWindow:
    """Which open waits: due by then, at most so many, behind a given one, of one instance or all."""

    limit: int
    due_until: datetime | None = None
    after: Wait | None = None
    instance_id: UUID | None = None
