"""The unit of work: commands run against it one after the other, and one commit writes what they did.

A command stages its changes. When it succeeds they are accepted: events get their numbers, audit entries
their place in the chain, the ledger its sums. When it refuses, its staging is dropped and the others go on.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from ostler.errors import AgentNotFoundError, TaskNotFoundError, WorkspaceNotFoundError
from ostler.model import (
    AgentInstance,
    Event,
    Task,
    Workspace,
    chain_hash,
    clean_text,
)
from ostler.policy import plan
from ostler.seams import IdSource
from ostler.store.actor import Actor
from ostler.store.cache import ABSENT, Cache, Slot, slot_of
from ostler.store.eventrows import EventRow, body
from ostler.store.kinds import Key, Kind, Ledger, key_of
from ostler.store.port import AuditRow, Change, Changes, Head, OutOfStepError, Prune, Session

_MAX_DETAIL = 2000


class _Staged:
    """What the running command wants to do; kept apart until it is known that it may."""

    __slots__ = ("anchors", "audit", "epoch", "events", "horizon", "prune", "rows")

    def __init__(self) -> None:
        #: By slot: the key, the record, the fields that may differ.
        self.rows: dict[Slot, tuple[Key, Any, frozenset[str] | None]] = {}
        #: Class, record, correlation, what it says.
        self.events: list[tuple[type[Event], AgentInstance | Task, str | None, dict[str, Any]]] = []
        #: Workspace, and: actor, action, subject, outcome, detail, correlation.
        self.audit: list[tuple[UUID, tuple[str | None, ...]]] = []
        self.prune: list[Prune] | None = None
        self.epoch: int | None = None
        self.horizon: int | None = None
        self.anchors: dict[UUID, tuple[int, str]] | None = None


class Unit:
    """What a command sees of the store."""

    def __init__(self, session: Session, head: Head, cache: Cache, now: datetime, ids: IdSource) -> None:
        self.now = now
        self.ids = ids
        self.head = head
        self._load = session.load
        self._rows = cache.rows
        self._loaded = cache.loaded
        #: What accepted commands have changed: key, the row as committed, and the fields that may differ now.
        self._touched: dict[Slot, tuple[Key, Any, frozenset[str] | None]] = {}
        self._events: list[EventRow] = []
        self._next_id = 0
        self._room: dict[UUID, int | None] = {}
        self._audit: list[AuditRow] = []
        self._prune: list[Prune] = []
        #: By the number of the workspace, for the same reason as slots.
        self._ledgers: dict[int, Ledger] = {}
        self.sequence = head.sequence
        self.epoch = head.epoch
        self.horizon = head.horizon
        self._staged = _Staged()
        #: The workspace that the running command is about, once it has named one.
        self.workspace_id: UUID | None = None

    # --- what a command reads -------------------------------------------------------------------

    def get(self, kind: Kind, key: Key) -> Any:
        slot = slot_of(kind, key)
        staged = self._staged.rows
        if staged and slot in staged:
            return staged[slot][1]
        return self._current(slot, key)

    def _current(self, slot: Slot, key: Key) -> Any:
        """As accepted commands have left it."""
        found = self._rows.get(slot, ABSENT)
        if found is ABSENT:
            found = self._rows[slot] = self._load(slot[0], key)
            self._loaded.append(slot)
        return found

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
        found = self._ledgers.get(workspace_id.int)
        if found is None:
            known: Ledger | None = self._current((Kind.LEDGER, workspace_id.int), (workspace_id,))
            found = known.copy() if known else Ledger(workspace_id=workspace_id)
            self._ledgers[workspace_id.int] = found
        return found

    # --- what a command does --------------------------------------------------------------------

    def put(self, kind: Kind, record: Any, fields: frozenset[str] | None = None) -> None:
        """Write a record. One who knows which fields differ may say so and spare the comparison, provided that no
        other column (such as `active`) follows from them.
        """
        key = key_of(kind, record)
        self._staged.rows[slot_of(kind, key)] = (key, record, fields)

    def remove(self, kind: Kind, key: Key) -> None:
        self._staged.rows[slot_of(kind, key)] = (key, None, None)

    def emit(self, event: type[Event], by: Actor, record: AgentInstance | Task, /, **said: Any) -> None:
        """An event about a record as it is now; it gets its number when the command is accepted."""
        self._staged.events.append((event, record, by.correlation_id, said))

    def audit(self, by: Actor, action: str, subject: str, outcome: str = "ok", detail: str | None = None) -> None:
        if self.workspace_id is not None:
            text = clean_text(detail)[:_MAX_DETAIL] if detail else None
            words = (by.name, action, subject, outcome, text, by.correlation_id)
            self._staged.audit.append((self.workspace_id, words))

    def prune(self, prune: Prune) -> None:
        self._staged.prune = [*(self._staged.prune or ()), prune]

    def require_unpruned(self, owner_id: UUID) -> None:
        """Turns are pruned last, so none may follow that in the same commit; the commands are run apart."""
        if any(one.table == "turns" and one.owner_id == owner_id for one in self._prune):
            raise OutOfStepError(f"turns of {owner_id} are removed by the same commit")

    def raise_epoch(self, epoch: int) -> None:
        self._staged.epoch = epoch

    def raise_horizon(self, sequence: int) -> None:
        self._staged.horizon = sequence

    def anchor(self, workspace_id: UUID, number: int, digest: str) -> None:
        """The chain of this workspace will be kept only after this entry."""
        self._staged.anchors = {**(self._staged.anchors or {}), workspace_id: (number, digest)}

    # --- what the writer does -------------------------------------------------------------------

    def start(self) -> None:
        """Begin a command with nothing staged."""
        self._staged = _Staged()
        self.workspace_id = None

    def accept(self) -> None:
        """The running command succeeded: give its events numbers, its audit links, its sums."""
        staged = self._staged
        for slot, (key, new, fields) in staged.rows.items():
            old = self._current(slot, key)
            if slot[0] is Kind.INSTANCE:
                self._account(old, new)
            if slot in self._touched:
                self._touch_again(slot, fields)
            else:
                self._touched[slot] = (key, old, fields)
            self._rows[slot] = new
        for event, record, correlation_id, said in staged.events:
            self._append(event, record, correlation_id, said)
        number = self.sequence if staged.events else 0
        for workspace_id, words in staged.audit:
            self._link(workspace_id, (*words, number))
        self._accept_rare(staged)

    def _accept_rare(self, staged: _Staged) -> None:
        if staged.anchors:
            for workspace_id, (last, digest) in staged.anchors.items():
                ledger = self.ledger(workspace_id)
                ledger.anchor_number, ledger.anchor_hash = last, digest
        if staged.prune:
            self._prune += staged.prune
        if staged.epoch is not None:
            self.epoch = staged.epoch
        if staged.horizon is not None:
            self.horizon = staged.horizon

    def _account(self, old: AgentInstance | None, new: AgentInstance | None) -> None:
        record = new or old
        if record is None or record.workspace_id is None:
            return
        ledger = self.ledger(record.workspace_id)
        before = ledger.active
        ledger.account(old, new)
        if ledger.active > before:
            # The plan under which it was admitted, even if a later command of this batch makes it smaller.
            space: Workspace | None = self._current((Kind.WORKSPACE, record.workspace_id.int), (record.workspace_id,))
            self._room[record.workspace_id] = plan(space.tier).max_concurrent if space else None

    def _touch_again(self, slot: Slot, fields: frozenset[str] | None) -> None:
        key, old, known = self._touched[slot]
        if known is not fields:
            both = known | fields if known is not None and fields is not None else None
            self._touched[slot] = (key, old, both)

    def _append(
        self, event: type[Event], record: AgentInstance | Task, correlation_id: str | None, said: dict[str, Any]
    ) -> None:
        """Number an event. One id is drawn per commit; those of its events follow it one by one."""
        self.sequence += 1
        self._next_id = self._next_id + 1 if self._next_id else self.ids.new().int
        instance_id, task_id = (
            (record.instance_id, None) if isinstance(record, AgentInstance) else (None, record.task_id)
        )
        self._events.append(
            EventRow(
                self.sequence,
                self._next_id,
                record.workspace_id,
                instance_id,
                task_id,
                event.event_type,
                body(event, record, said),
                self.now,
                correlation_id,
            )
        )

    def changes(self) -> Changes | None:
        """What to write, or None when nothing changed."""
        if not (self._touched or self._events or self._audit or self._prune):
            return None
        head = Head(
            commit_number=self.head.commit_number + 1,
            sequence=self.sequence,
            horizon=self.horizon,
            epoch=self.epoch,
        )
        changes = Changes(head=head, events=self._events, audit=self._audit, prune=self._prune, room=self._room)
        changes.rows = [
            Change(slot[0], key, old, self._rows[slot], fields) for slot, (key, old, fields) in self._touched.items()
        ]
        for number, ledger in self._ledgers.items():
            key = (ledger.workspace_id,)
            slot = (Kind.LEDGER, number)
            changes.rows.append(Change(Kind.LEDGER, key, self._current(slot, key), ledger))
            self._rows[slot] = ledger
        return changes

    def _link(self, workspace_id: UUID, words: tuple[Any, ...]) -> None:
        """Append to the chain of a workspace; words are the entry's own fields, in its order."""
        ledger = self.ledger(workspace_id)
        number, previous = ledger.audit_number + 1, ledger.audit_hash
        digest = chain_hash(workspace_id, number, self.now, words, previous)
        self._audit.append((workspace_id, number, self.now, *words, previous, digest))
        ledger.audit_number, ledger.audit_hash = number, digest
