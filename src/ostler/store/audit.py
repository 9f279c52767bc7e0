"""The audit chain: pages, its end, and the check that finds every break."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from ostler.model.audit import GENESIS, AuditEntry, AuditHead, AuditReport
from ostler.store.record_table import RecordTable
from ostler.store.transaction import PAGE, Act, Reader, Transaction, page

AUDIT = RecordTable(AuditEntry, "audit", key_columns=2)
PRUNED = "retention.audit"
_MAX_FAULTS = 100
_LOWEST = -(2**63)


@dataclass(frozen=True, slots=True)
class Chain:
    """Where the chain of a workspace begins and ends, as the workspace knows it."""

    workspace_id: UUID
    number: int = 0
    hash: str = GENESIS
    anchor_number: int = 0
    anchor_hash: str = GENESIS
    #: False: entries exist, but the row of their workspace is gone.
    exists: bool = True


def get_chain(reader: Reader, workspace_id: UUID) -> Chain:
    row = reader.fetch_one(
        "SELECT audit_number, audit_hash, anchor_number, anchor_hash FROM workspaces WHERE id = :id", id=workspace_id
    )
    return Chain(workspace_id, exists=False) if row is None else Chain(workspace_id, *row)


def list_chains(reader: Reader) -> list[UUID]:
    """The workspaces that have a chain, also those whose own row is gone."""
    rows = reader.fetch("SELECT id FROM workspaces UNION SELECT DISTINCT workspace_id FROM audit ORDER BY 1")
    return [UUID(bytes=row[0]) if isinstance(row[0], bytes) else row[0] for row in rows]


def list_entries(reader: Reader, workspace_id: UUID, *, after: int = _LOWEST, limit: int = PAGE) -> list[AuditEntry]:
    rows = reader.fetch(
        f"{AUDIT.select} WHERE workspace_id = :id AND number > :after ORDER BY number LIMIT :limit",
        id=workspace_id,
        after=after,
        limit=page(limit),
    )
    return AUDIT.read(rows)


def last_entries(reader: Reader, workspace_id: UUID, count: int) -> list[AuditEntry]:
    rows = reader.fetch(
        f"{AUDIT.select} WHERE workspace_id = :id ORDER BY number DESC LIMIT :limit", id=workspace_id, limit=page(count)
    )
    return AUDIT.read(reversed(rows))


def record_act(tx: Transaction, act: Act) -> None:
    """An act that changes nothing else, such as a refusal."""
    tx.audit(act.workspace_id, act.by, act.action, act.subject, outcome=act.outcome, detail=act.detail)


def verify(reader: Reader, workspace_id: UUID, kept_head: AuditHead | None = None) -> AuditReport:
    """Walk the chain while others write to it and retention takes from it.

    `kept_head` is an end that was kept outside; it shows a chain that was cut or rewritten as a whole.
    """
    while True:
        chain = get_chain(reader, workspace_id)
        report = _walk(reader, chain, kept_head)
        # Retention may have taken entries during the walk. Each further look needs another sweep, so this ends.
        if report.is_sound or get_chain(reader, workspace_id).anchor_number == chain.anchor_number:
            return report


def _walk(reader: Reader, chain: Chain, kept_head: AuditHead | None) -> AuditReport:
    check = _Check(chain)
    cursor = _LOWEST  # an entry below the anchor, or below the first, is a fault too
    while entries := list_entries(reader, chain.workspace_id, after=cursor):
        # What was written since the end was read belongs to the next verification.
        in_chain = [entry for entry in entries if entry.number <= chain.number]
        check.feed(in_chain)
        for entry in in_chain if kept_head is not None else ():
            if kept_head is not None and entry.number == kept_head.number and entry.hash != kept_head.hash:
                check.say(_rewritten(entry.number))
        if len(in_chain) < len(entries):
            later = get_chain(reader, chain.workspace_id)
            for entry in entries[len(in_chain) :]:
                if entry.number > later.number:
                    check.say(f"entry {entry.number} was put in: the workspace knows the chain up to {later.number}")
            break
        cursor = entries[-1].number
    return check.report(kept_head)


class _Check:
    """Feed it the kept entries in the order of their numbers, then ask for the report."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._number = chain.anchor_number
        self._hash = chain.anchor_hash
        self._faults: list[str] = []
        self._entries = 0
        #: Retention writes how far it went into the chain that it keeps.
        self._vouched = chain.anchor_number == 0

    def say(self, fault: str) -> None:
        if len(self._faults) < _MAX_FAULTS:
            self._faults.append(fault)

    def feed(self, entries: Iterable[AuditEntry]) -> None:
        for entry in entries:
            self._entries += 1
            expected = self._number + 1
            if entry.number > expected:
                self.say(_missing(expected, entry.number - 1))
            elif entry.number < expected:
                self.say(f"entry {entry.number} stands after entry {self._number}: it was moved")
            if entry.computed_hash != entry.hash:
                self.say(f"entry {entry.number} was edited: its content does not match its hash")
            elif entry.number == expected and entry.previous_hash != self._hash:
                self.say(f"entry {entry.number} does not follow from entry {self._number}: one of them was replaced")
            self._number, self._hash = entry.number, entry.hash
            act = (entry.action, entry.detail, entry.outcome)
            self._vouched = self._vouched or act == (PRUNED, f"removed up to {self._chain.anchor_number}", "ok")

    def report(self, outside: AuditHead | None) -> AuditReport:
        chain = self._chain
        if not chain.exists:
            self.say("there is no row of this workspace: it was removed, or its id is wrong")
        elif self._number < chain.number:
            self.say(_missing(self._number + 1, chain.number))
        elif (self._number, self._hash) != (chain.number, chain.hash):
            self.say(f"the chain ends with entry {self._number}, which is not the end that the workspace knows")
        if not self._vouched:
            self.say(f"no entry tells that retention removed those up to {chain.anchor_number}: they were cut off")
        if outside is not None:
            self._compare(outside)
        head = AuditHead(workspace_id=chain.workspace_id, number=chain.number, hash=chain.hash)
        return AuditReport(
            workspace_id=chain.workspace_id, entries=self._entries, head=head, faults=tuple(self._faults)
        )

    def _compare(self, outside: AuditHead) -> None:
        chain = self._chain
        if outside.number > chain.number:
            self.say(f"the head kept outside is entry {outside.number}, but the chain ends at {chain.number}")
        elif outside.number < chain.anchor_number:
            self.say(f"kept head {outside.number} is older than what is kept, so it cannot be checked")
        elif outside.number == chain.anchor_number and outside.hash != chain.anchor_hash:
            self.say(_rewritten(outside.number))


def _missing(first: int, last: int) -> str:
    return f"entry {first} is missing" if first == last else f"entries {first} to {last} are missing"


def _rewritten(number: int) -> str:
    return f"entry {number} is not the one whose hash was kept outside: the chain was rewritten"
