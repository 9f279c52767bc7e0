"""Who did what, as a chain of hashes per workspace: an edited, removed or moved row breaks it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ostler.model.moments import Moment, micros
from ostler.model.record import Record

#: What the first entry of a chain points at.
GENESIS = "0" * 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry(Record):
    workspace_id: UUID
    #: Position in the chain of its workspace, from 1, without gaps.
    number: int
    occurred_at: Moment
    actor: str
    action: str
    subject: str
    #: "ok", or the name of the error it was refused with.
    outcome: str
    detail: str | None = None
    correlation_id: str | None = None
    #: The last event of the same transaction, 0 where there is none: the link between the two logs.
    sequence: int = 0
    previous_hash: str = GENESIS
    hash: str = ""

    @property
    def computed_hash(self) -> str:
        """What `hash` must be, from everything but itself."""
        return chain_hash({name: getattr(self, name) for name in _HASHED})


_HASHED = (
    "workspace_id",
    "number",
    "occurred_at",
    "actor",
    "action",
    "subject",
    "outcome",
    "detail",
    "correlation_id",
    "sequence",
    "previous_hash",
)


def chain_hash(entry: Mapping[str, Any]) -> str:
    """The digest of an entry; a fixed order of its fields makes it the same everywhere."""
    body = [entry[name] for name in _HASHED]
    body[0], body[2] = entry["workspace_id"].hex, micros(entry["occurred_at"])
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditHead(Record):
    """The end of a chain. Kept outside, it also shows a chain that was cut or rewritten whole."""

    workspace_id: UUID
    number: int
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport(Record):
    """What `verify` found: sound, or every break by number and in words."""

    workspace_id: UUID
    entries: int
    head: AuditHead
    faults: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.faults
