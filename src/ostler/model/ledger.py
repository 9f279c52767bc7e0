"""Rows behind an instance: attempts, requests, waits; and the lease and the audit chain of the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from json.encoder import encode_basestring_ascii as quoted
from typing import Any
from uuid import UUID

from ostler.errors import AuditBrokenError
from ostler.model.context import json_faults
from ostler.model.faults import Fault
from ostler.model.record import Record, record
from ostler.model.text import MAX_REASON, plain_text_faults
from ostler.model.types import Moment, micros


class AttemptOutcome(StrEnum):
    """How a start ended; `unknown` where it cannot be told."""

    CLEAN = "clean"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    OOM = "oom"
    TIMEOUT = "timeout"
    STOPPED = "stopped"  #: ended by Ostler
    ERROR = "error"  #: raised inside the agent
    LOST = "lost"
    UNKNOWN = "unknown"


@record
class Attempt(Record):
    """One start of an instance: an intent before any process exists, completed by what was observed."""

    instance_id: UUID
    number: int
    task_id: UUID | None = None
    intended_at: Moment
    #: The handle of the isolation level; None while nothing was seen to start.
    handle: Mapping[str, Any] | None = None
    started_at: Moment | None = None
    ended_at: Moment | None = None
    outcome: AttemptOutcome | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    detail: str | None = None
    #: The last numbered message of the agent that was committed.
    heard: int = 0

    @property
    def is_open(self) -> bool:
        return self.ended_at is None

    @property
    def may_live(self) -> bool:
        """It was seen to start, and not to end."""
        return self.is_open and self.handle is not None


class RequestState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  #: its agent ended before it answered


@record
class Request(Record):
    """One `process` call with an id. Its answer is kept, so that the id is answered once."""

    instance_id: UUID
    request_id: str
    workspace_id: UUID
    attempt: int
    #: How often it was begun; part of the id of the call at the agent.
    tries: int = 1
    state: RequestState = RequestState.RUNNING
    input_digest: str
    #: The answer as JSON; None when it was too large to keep.
    answer: str | None = None
    error: str | None = None
    begun_at: Moment
    ended_at: Moment | None = None


class WaitKind(StrEnum):
    BACKOFF = "backoff"
    RESUME = "resume"  #: a suspension; its due time, if any, resumes
    DEPENDENCY = "dependency"
    CI = "ci"
    PULL_REQUEST = "pull_request"
    HUMAN = "human"
    QUOTA = "quota"
    AGENT = "agent"  #: asked for by the agent itself


@record
class Wait(Record):
    """A durable reason why something does not run."""

    wait_id: UUID
    workspace_id: UUID
    kind: WaitKind
    instance_id: UUID | None = None
    task_id: UUID | None = None
    #: What an outside event is matched with: "ci:SHA", "pr:URL", "task:ID".
    wake_key: str | None = None
    reason: str | None = None
    detail: Mapping[str, Any] | None = None
    created_at: Moment
    #: When it ends by itself.
    due_at: Moment | None = None
    ended_at: Moment | None = None
    outcome: str | None = None
    answer: Mapping[str, Any] | None = None

    def rules(self) -> Iterator[Fault]:
        yield from plain_text_faults("reason", self.reason, MAX_REASON)
        yield from plain_text_faults("outcome", self.outcome, MAX_REASON)
        yield from json_faults("detail", self.detail)
        yield from json_faults("answer", self.answer)


@record
class Lease(Record):
    """The owner of the store. The epoch rises with every owner; an older one may not write."""

    name: str
    owner: str
    epoch: int
    acquired_at: Moment
    expires_at: Moment


# --- audit -------------------------------------------------------------------------------------------

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
    said = ",".join(
        [quoted(word) if isinstance(word, str) else "null" if word is None else str(word) for word in words]
    )
    text = f'["{workspace_id.int:032x}",{number},{micros(occurred_at)},{said},"{previous}"]'
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
