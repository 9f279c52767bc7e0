"""Checks an audit chain: a pure walk over its entries that names every break."""

from __future__ import annotations

from collections.abc import Iterable

from ostler.model import AuditEntry, AuditHead, AuditReport
from ostler.store.commands import PruneAudit
from ostler.store.kinds import Ledger

_MAX_FAULTS = 100


class ChainCheck:
    """Feed it the kept entries in order of their numbers, then ask for the report."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._number = ledger.anchor_number
        self._hash = ledger.anchor_hash
        self._faults: list[str] = []
        self._entries = 0
        self._vouched = ledger.anchor_number == 0

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
            self._vouched = self._vouched or self._vouches(entry)

    def _vouches(self, entry: AuditEntry) -> bool:
        """Retention writes down how far it went, in the chain that it keeps."""
        told = f"removed up to {self._ledger.anchor_number}"
        return (entry.action, entry.detail, entry.outcome) == (PruneAudit.action, told, "ok")

    def report(self, outside: AuditHead | None = None) -> AuditReport:
        """`outside` is a head that was kept elsewhere; it shows a chain that was cut or rewritten as a whole."""
        ledger = self._ledger
        if self._number < ledger.audit_number:
            self.say(_missing(self._number + 1, ledger.audit_number))
        elif (self._number, self._hash) != (ledger.audit_number, ledger.audit_hash):
            self.say(f"the chain ends with entry {self._number}, which is not the end that the ledger knows")
        if not self._vouched:
            self.say(f"no entry tells that retention removed those up to {ledger.anchor_number}: they were cut off")
        if outside is not None:
            self._compare_ends(outside)
        head = AuditHead(workspace_id=ledger.workspace_id, number=ledger.audit_number, hash=ledger.audit_hash)
        return AuditReport(
            workspace_id=ledger.workspace_id, entries=self._entries, head=head, faults=tuple(self._faults)
        )

    def _compare_ends(self, outside: AuditHead) -> None:
        """Where the outside head names no entry that is kept."""
        ledger = self._ledger
        if outside.number > ledger.audit_number:
            self.say(f"the head kept outside is entry {outside.number}, but the chain ends at {ledger.audit_number}")
        elif outside.number < ledger.anchor_number:
            self.say(f"kept head {outside.number} is older than what is kept, so it cannot be checked")
        elif outside.number == ledger.anchor_number and outside.hash != ledger.anchor_hash:
            self.say(_rewritten(outside.number))

    def beyond(self, entries: Iterable[AuditEntry], later: Ledger) -> None:
        """Entries past the end that the ledger knew. A ledger that was read after them knows those that are real."""
        for entry in entries:
            if entry.number > later.audit_number:
                self.say(f"entry {entry.number} was put in: the ledger knows the chain up to {later.audit_number}")

    def compare(self, outside: AuditHead, entry: AuditEntry | None) -> None:
        """The entry that the outside head names must still be the same one."""
        if entry is not None and entry.number == outside.number and entry.hash != outside.hash:
            self.say(_rewritten(outside.number))

    def say(self, fault: str) -> None:
        """One more fault; after so many the rest is left out."""
        if len(self._faults) < _MAX_FAULTS:
            self._faults.append(fault)


def _missing(first: int, last: int) -> str:
    return f"entry {first} is missing" if first == last else f"entries {first} to {last} are missing"


def _rewritten(number: int) -> str:
    return f"entry {number} is not the one whose hash was kept outside: the chain was rewritten"
