"""The audit chain: entries, each with the hash of the one before, and what verifying a chain finds."""

from __future__ import annotations

import hashlib
from datetime import datetime
from json.encoder import encode_basestring_ascii as quoted
from uuid import UUID

from ostler.errors import AuditBrokenError
from ostler.model.record import Record, record
from ostler.model.types import Moment, micros

#: The hash before the first entry of a chain.
GENESIS = "0" * 64
_HASHED = ("actor", "action", "subject", "outcome", "detail", "correlation_id", "sequence")


@record
class AuditEntry(Record):
    workspace_id: UUID
    #: Position in the chain of its workspace, from 1, without gaps.
    number: int
    occurred_at: Moment
    actor: str
    action: str
    subject: str
    #: "ok", or the name of the error that refused it.
    outcome: str
    detail: str | None = None
    correlation_id: str | None = None
    #: The last event of the same command; 0 where it has none.
    sequence: int = 0
    previous_hash: str = GENESIS
    hash: str = ""

    @property
    def computed_hash(self) -> str:
        """What `hash` must be, from every other field."""
        words = tuple(getattr(self, name) for name in _HASHED)
        return chain_hash(self.workspace_id, self.number, self.occurred_at, words, self.previous_hash)


def chain_hash(
    workspace_id: UUID, number: int, occurred_at: datetime, words: tuple[str | int | None, ...], previous: str
) -> str:
    """SHA-256 of a JSON array: workspace, number, time in microseconds, the seven words, the previous hash."""
    quoted_words = ",".join(
        [quoted(word) if isinstance(word, str) else "null" if word is None else str(word) for word in words]
    )
    text = f'["{workspace_id.int:032x}",{number},{micros(occurred_at)},{quoted_words},"{previous}"]'
    return hashlib.sha256(text.encode()).hexdigest()


@record
class AuditHead(Record):
    """The end of a chain. Kept outside, it also shows a chain that was cut or rewritten as a whole."""

    workspace_id: UUID
    number: int
    hash: str


@record
class AuditReport(Record):
    """The result of verifying a chain: every break, by number and in words."""

    workspace_id: UUID
    entries: int
    head: AuditHead
    faults: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.faults

    def require(self) -> None:
        """Raise one `AuditBrokenError` that names every break."""
        if self.faults:
            raise AuditBrokenError("; ".join(self.faults))
