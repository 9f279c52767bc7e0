"""What a command and a query are given: a transaction to write in, a reader to look with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from ostler.errors import (
    AuthorizationError,
    ConflictError,
    InvalidOperationError,
    LicenseError,
    NotFoundError,
    ValidationError,
)
from ostler.ids import IdSource
from ostler.model.access import SYSTEM, Actor
from ostler.model.audit import chain_hash
from ostler.model.events import Event
from ostler.model.text import clean_text, clipped
from ostler.model.validation import fault
from ostler.store.connection import Connection, Head

#: Refusals that the audit keeps. A busy agent or a full disk is none.
AUDITED_ERRORS = (
    AuthorizationError,
    LicenseError,
    ValidationError,
    InvalidOperationError,
    NotFoundError,
    ConflictError,
)
#: Rows that one query gives at most.
PAGE = 1000
_MAX_DETAIL = 2000

_INSERT_EVENT = """INSERT INTO agent_instance_events
    (sequence, workspace_id, instance_id, task_id, event_type, event_data_json, occurred_at, correlation_id)
    VALUES (:sequence, :workspace_id, :instance_id, :task_id, :event_type, :body, :occurred_at, :correlation_id)"""
_INSERT_AUDIT = """INSERT INTO audit
    (workspace_id, number, occurred_at, actor, action, subject, outcome, detail, correlation_id, sequence,
     previous_hash, hash)
    VALUES (:workspace_id, :number, :occurred_at, :actor, :action, :subject, :outcome, :detail, :correlation_id,
     :sequence, :previous_hash, :hash)"""
_ADD_COUNT = """INSERT INTO counters (workspace_id, name, value) VALUES (:workspace_id, :name, :value)
    ON CONFLICT (workspace_id, name) DO UPDATE SET value = counters.value + excluded.value"""


def page(limit: int) -> int:
    """The size of a page; never more than `PAGE`."""
    if limit < 1:
        raise fault("limit", "must be at least 1", limit)
    return min(limit, PAGE)


class Reader:
    """Runs queries on one connection. Parameters are adapted by their type: ids, times, enums and flags."""

    def __init__(self, db: Connection) -> None:
        self._db = db

    def fetch(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._db.fetch(sql, self._db.adapt(values))

    def fetch_one(self, sql: str, **values: Any) -> tuple[Any, ...] | None:
        rows = self.fetch(sql, **values)
        return rows[0] if rows else None

    def filter_clause(self, clause: str, *, first: bool) -> str:
        return self._db.filter_clause(clause, first=first)


class Act(NamedTuple):
    """One entry of the audit."""

    workspace_id: UUID
    by: Actor
    action: str
    subject: str
    outcome: str = "ok"
    detail: str | None = None


class Transaction(Reader):
    """One database transaction that many commands share, each in a savepoint of its own.

    Events, audit entries and counts of a command are collected and written once for the whole commit, when every
    command has run. A command sees its own rows, not its own events.
    """

    def __init__(self, db: Connection, head: Head, now: datetime, ids: IdSource) -> None:
        super().__init__(db)
        self.now = now
        self.ids = ids
        #: Commands of leases and of retention may raise these two.
        self.epoch = head.epoch
        self.pruned_until = head.pruned_until
        self._head = head
        #: What earlier commands of this commit have said.
        self.events: list[Event] = []
        self._event_rows: list[dict[str, Any]] = []
        self._acts: list[tuple[Act, int]] = []
        self._counts: Counter[tuple[UUID, str]] = Counter()
        #: What the present command has said.
        self._new_events: list[tuple[Event, str, str | None]] = []
        self._new_acts: list[Act] = []
        self._new_counts: Counter[tuple[UUID, str]] = Counter()
        self._refusal: Act | None = None
        self._before = (self.epoch, self.pruned_until)

    # --- for commands ------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """The number of the last event of the commands before this one."""
        return self._head.sequence + len(self.events)

    def execute(self, sql: str, **values: Any) -> int:
        """The number of rows that were changed."""
        return self._db.execute(sql, self._db.adapt(values))

    def execute_many(self, sql: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._db.execute_many(sql, [self._db.adapt(row) for row in rows])

    def emit(self, event: Event, by: Actor = SYSTEM) -> None:
        """Add an event to the log. It gets its number when the command has succeeded."""
        # Written out here, so that an event that cannot be written fails its own command and not the whole commit.
        try:
            body = event.body()
        except (TypeError, ValueError) as error:
            raise fault(event.event_type, f"must hold only what JSON can ({error})") from error
        self._new_events.append((event, body, _cleaned(by.correlation_id)))

    def audit(
        self,
        workspace_id: UUID,
        by: Actor,
        action: str,
        subject: str,
        *,
        outcome: str = "ok",
        detail: str | None = None,
    ) -> None:
        self._new_acts.append(Act(workspace_id, by, action, subject, outcome, detail))

    def audit_refusal(self, workspace_id: UUID, by: Actor, action: str, subject: str) -> None:
        """If this command raises one of `AUDITED_ERRORS`, the audit says so, although nothing else is written."""
        self._refusal = Act(workspace_id, by, action, subject)

    def count(self, workspace_id: UUID, changes: Mapping[str, int]) -> None:
        """Add to totals that are kept for ever."""
        for name, change in changes.items():
            self._new_counts[workspace_id, name] += change

    # --- for the writer ----------------------------------------------------------------------------

    def begin_command(self) -> None:
        self._db.execute("SAVEPOINT command", {})

    def accept(self) -> None:
        """The command has succeeded."""
        self._db.execute("RELEASE SAVEPOINT command", {})
        for event, body, correlation_id in self._new_events:
            self.events.append(event.stamp(self.sequence + 1, self.now, correlation_id))
            self._event_rows.append(_event_row(event, body))
        last = self.sequence if self._new_events else 0
        self._acts += [(act, last) for act in self._new_acts]
        self._counts.update(self._new_counts)
        self._forget()

    def refuse(self, error: Exception) -> None:
        """The command has raised: nothing of it is kept but, perhaps, the audit of its refusal."""
        self._db.execute("ROLLBACK TO SAVEPOINT command", {})
        self._db.execute("RELEASE SAVEPOINT command", {})
        refusal = self._refusal
        self.epoch, self.pruned_until = self._before
        self._forget()
        if refusal is not None and isinstance(error, AUDITED_ERRORS):
            self._acts.append((refusal._replace(outcome=type(error).__name__, detail=str(error)), 0))
            error.audited = True

    def flush(self) -> None:
        """Write what was collected. Called once, before the commit."""
        self.execute_many(_INSERT_EVENT, self._event_rows)
        self._write_audit()
        counts = [{"workspace_id": space, "name": name, "value": n} for (space, name), n in self._counts.items() if n]
        self.execute_many(_ADD_COUNT, counts)
        if (self.sequence, self.pruned_until, self.epoch) != self._head:
            self.execute(
                "UPDATE head SET sequence = :sequence, horizon = :horizon, epoch = :epoch",
                sequence=self.sequence,
                horizon=self.pruned_until,
                epoch=self.epoch,
            )

    def _forget(self) -> None:
        self._new_events = []
        self._new_acts = []
        self._new_counts = Counter()
        self._refusal = None
        self._before = (self.epoch, self.pruned_until)

    def _write_audit(self) -> None:
        ends: dict[UUID, tuple[int, str] | None] = {}
        rows: list[dict[str, Any]] = []
        for act, sequence in self._acts:
            space = act.workspace_id
            if space not in ends:
                end = self.fetch_one("SELECT audit_number, audit_hash FROM workspaces WHERE id = :id", id=space)
                ends[space] = None if end is None else (end[0], end[1])
            end = ends[space]
            if end is None:
                continue  # a refusal in a workspace that does not exist has no chain to stand in
            row = _audit_row(act, end, self.now, sequence)
            rows.append(row)
            ends[space] = (row["number"], row["hash"])
        self.execute_many(_INSERT_AUDIT, rows)
        for space, end in ends.items():
            if end is not None:
                self.execute(
                    "UPDATE workspaces SET audit_number = :number, audit_hash = :hash WHERE id = :id",
                    id=space,
                    number=end[0],
                    hash=end[1],
                )


def _event_row(event: Event, body: str) -> dict[str, Any]:
    return {
        "sequence": event.sequence,
        "workspace_id": event.workspace_id,
        "instance_id": getattr(event, "instance_id", None),
        "task_id": getattr(event, "task_id", None),
        "event_type": event.event_type,
        "body": body,
        "occurred_at": event.occurred_at,
        "correlation_id": event.correlation_id,
    }


def _audit_row(act: Act, end: tuple[int, str], now: datetime, sequence: int) -> dict[str, Any]:
    number, previous = end[0] + 1, end[1]
    # Cleaned: what one database cannot hold would fail the commit of every other command too.
    words: dict[str, str | int | None] = {
        "actor": clean_text(act.by.name),
        "action": clean_text(act.action),
        "subject": clean_text(act.subject),
        "outcome": clean_text(act.outcome),
        "detail": None if act.detail is None else clipped(act.detail, _MAX_DETAIL),
        "correlation_id": _cleaned(act.by.correlation_id),
        "sequence": sequence,
    }
    return {
        "workspace_id": act.workspace_id,
        "number": number,
        "occurred_at": now,
        **words,
        "previous_hash": previous,
        "hash": chain_hash(act.workspace_id, number, now, tuple(words.values()), previous),
    }


def _cleaned(text: str | None) -> str | None:
    return None if text is None else clean_text(text)
