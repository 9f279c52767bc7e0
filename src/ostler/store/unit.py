"""The unit of work: commands run against it one after the other, and one commit writes what they did.

A command stages its changes. When it succeeds they are accepted: events get their numbers, audit entries
their place in the chain, the ledger its sums. When it refuses, its staging is dropped and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from ostler.errors import AgentNotFoundError, TaskNotFoundError, WorkspaceNotFoundError
from ostler.model import (
    AgentInstance,
    AuditEntry,
    Event,
    Task,
    Workspace,
    chain_hash,
    clean_text,
)
from ostler.policy import plan
from ostler.seams import IdSource
from ostler.store.actor import Actor
from ostler.store.kinds import Key, Kind, Ledger, key_of
from ostler.store.port import Change, Changes, Head, Prune, Session

R = TypeVar("R")

_CACHE_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class AuditDraft:
    workspace_id: UUID
    actor: str
    action: str
    subject: str
    outcome: str
    detail: str | None
    correlation_id: str | None


class Cache:
    """Records as last committed, valid while nobody else has written."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Kind, Key], Any] = {}
        self._commit_number = -1

    def check(self, head: Head) -> None:
        if head.commit_number != self._commit_number or len(self._rows) > _CACHE_LIMIT:
            self.forget()

    def forget(self) -> None:
        self._rows.clear()
        self._commit_number = -1

    def get(self, kind: Kind, key: Key, load: Callable[[Kind, Key], Any]) -> Any:
        slot = (kind, key)
        if slot not in self._rows:
            self._rows[slot] = load(kind, key)
        return self._rows[slot]

    def committed(self, changes: Changes) -> None:
        if changes.prune:
            self.forget()  # rows went by range, without being named one by one
        self._commit_number = changes.head.commit_number
        for change in changes.rows:
            self._rows[change.kind, change.key] = change.new


@dataclass(slots=True)
class _Staged:
    rows: dict[tuple[Kind, Key], Any] = field(default_factory=dict)
    events: list[tuple[type[Event], dict[str, Any]]] = field(default_factory=list)
    audit: list[AuditDraft] = field(default_factory=list)
    prune: list[Prune] = field(default_factory=list)
    epoch: int | None = None
    horizon: int | None = None
    anchors: dict[UUID, tuple[int, str]] = field(default_factory=dict)


class Unit:
    """What a command sees of the store."""

    def __init__(self, session: Session, head: Head, cache: Cache, now: datetime, ids: IdSource) -> None:
        self.now = now
        self.ids = ids
        self.head = head
        self._session = session
        self._cache = cache
        self._base: dict[tuple[Kind, Key], Any] = {}
        self._rows: dict[tuple[Kind, Key], Any] = {}
        self._events: list[Event] = []
        self._audit: list[AuditEntry] = []
        self._prune: list[Prune] = []
        self._ledgers: dict[UUID, Ledger] = {}
        self._sequence = head.sequence
        self._epoch = head.epoch
        self._horizon = head.horizon
        self._staged = _Staged()
        #: The workspace that the running command is about, once it has named one.
        self.workspace_id: UUID | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def horizon(self) -> int:
        return self._horizon

    # --- what a command reads -------------------------------------------------------------------

    def get(self, kind: Kind, key: Key) -> Any:
        slot = (kind, key)
        if slot in self._staged.rows:
            return self._staged.rows[slot]
        if slot in self._rows:
            return self._rows[slot]
        return self._committed(kind, key)

    def instance(self, instance_id: UUID) -> AgentInstance:
        found: AgentInstance | None = self.get(Kind.INSTANCE, (instance_id,))
        if found is None:
            raise AgentNotFoundError(f"there is no instance {instance_id}; list what exists, or check the id")
        self.workspace_id = found.workspace_id
        return found

    def task(self, task_id: UUID) -> Task:
        found: Task | None = self.get(Kind.TASK, (task_id,))
        if found is None:
            raise TaskNotFoundError(f"there is no task {task_id}; list what exists, or check the id")
        self.workspace_id = found.workspace_id
        return found

    def workspace(self, workspace_id: UUID) -> Workspace:
        found: Workspace | None = self.get(Kind.WORKSPACE, (workspace_id,))
        if found is None:
            raise WorkspaceNotFoundError(f"there is no workspace {workspace_id}; create it first, or check the id")
        self.workspace_id = workspace_id
        return found

    def ledger(self, workspace_id: UUID) -> Ledger:
        """The totals as they stand now; for reading, they follow the instances by themselves."""
        if workspace_id not in self._ledgers:
            known: Ledger | None = self._committed(Kind.LEDGER, (workspace_id,))
            self._ledgers[workspace_id] = known.copy() if known else Ledger(workspace_id=workspace_id)
        return self._ledgers[workspace_id]

    # --- what a command does --------------------------------------------------------------------

    def put(self, kind: Kind, record: Any) -> None:
        self._staged.rows[kind, key_of(kind, record)] = record

    def remove(self, kind: Kind, key: Key) -> None:
        self._staged.rows[kind, key] = None

    def emit(self, event: type[Event], /, **fields: Any) -> None:
        """An event is made when the command is accepted and its number known."""
        self._staged.events.append((event, fields))

    def audit(self, by: Actor, action: str, subject: str, outcome: str = "ok", detail: str | None = None) -> None:
        if self.workspace_id is not None:
            text = clean_text(detail)[:2000] if detail else None
            draft = AuditDraft(self.workspace_id, by.name, action, subject, outcome, text, by.correlation_id)
            self._staged.audit.append(draft)

    def prune(self, prune: Prune) -> None:
        self._staged.prune.append(prune)

    def raise_epoch(self, epoch: int) -> None:
        self._staged.epoch = epoch

    def raise_horizon(self, sequence: int) -> None:
        self._staged.horizon = sequence

    def anchor(self, workspace_id: UUID, number: int, digest: str) -> None:
        """The chain of this workspace will be kept only after this entry."""
        self._staged.anchors[workspace_id] = (number, digest)

    # --- what the writer does -------------------------------------------------------------------

    def start(self) -> None:
        """Begin a command with nothing staged."""
        self._staged = _Staged()
        self.workspace_id = None

    def accept(self) -> None:
        """The running command succeeded: give its events numbers, its audit links, its sums."""
        staged = self._staged
        for (kind, key), new in staged.rows.items():
            self._take(kind, key, new)
        for event, fields in staged.events:
            self._sequence += 1
            self._events.append(event(**fields, sequence=self._sequence, event_id=self.ids.new()))
        number = self._sequence if staged.events else 0
        for draft in staged.audit:
            self._link(draft, number)
        for workspace_id, (last, digest) in staged.anchors.items():
            ledger = self.ledger(workspace_id)
            ledger.anchor_number, ledger.anchor_hash = last, digest
        self._prune += staged.prune
        self._epoch = self._epoch if staged.epoch is None else staged.epoch
        self._horizon = self._horizon if staged.horizon is None else staged.horizon
        self._staged = _Staged()

    def changes(self) -> Changes | None:
        """What to write, or None when nothing changed."""
        if not (self._rows or self._events or self._audit or self._prune or self._ledgers_changed()):
            return None
        head = Head(
            commit_number=self.head.commit_number + 1,
            sequence=self._sequence,
            horizon=self._horizon,
            epoch=self._epoch,
        )
        changes = Changes(head=head, events=self._events, audit=self._audit, prune=self._prune)
        changes.rows = [
            Change(kind=kind, key=key, old=self._committed(kind, key), new=new)
            for (kind, key), new in self._rows.items()
        ]
        for workspace_id, ledger in self._ledgers.items():
            old = self._committed(Kind.LEDGER, (workspace_id,))
            changes.rows.append(Change(kind=Kind.LEDGER, key=(workspace_id,), old=old, new=ledger))
            space: Workspace | None = self.get(Kind.WORKSPACE, (workspace_id,))
            changes.room[workspace_id] = plan(space.tier).max_concurrent if space else None
        return changes

    def _ledgers_changed(self) -> bool:
        return any(
            ledger != self._committed(Kind.LEDGER, (workspace_id,)) for workspace_id, ledger in self._ledgers.items()
        )

    def _committed(self, kind: Kind, key: Key) -> Any:
        return self._cache.get(kind, key, self._session.load)

    def _take(self, kind: Kind, key: Key, new: Any) -> None:
        if kind is Kind.INSTANCE:
            old = self._rows[kind, key] if (kind, key) in self._rows else self._committed(kind, key)
            self.ledger((new or old).workspace_id).account(old, new)
        self._rows[kind, key] = new

    def _link(self, draft: AuditDraft, sequence: int) -> None:
        ledger = self.ledger(draft.workspace_id)
        fields: dict[str, Any] = {
            "workspace_id": draft.workspace_id,
            "number": ledger.audit_number + 1,
            "occurred_at": self.now,
            "actor": draft.actor,
            "action": draft.action,
            "subject": draft.subject,
            "outcome": draft.outcome,
            "detail": draft.detail,
            "correlation_id": draft.correlation_id,
            "sequence": sequence,
            "previous_hash": ledger.audit_hash,
        }
        entry = AuditEntry(**fields, hash=chain_hash(fields))
        ledger.audit_number, ledger.audit_hash = entry.number, entry.hash
        self._audit.append(entry)
