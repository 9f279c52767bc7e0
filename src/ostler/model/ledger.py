"""Attempts, waits, leases: the durable rows behind "what runs, why not, and who owns it"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.model.context import json_faults
from ostler.model.moments import Moment
from ostler.model.record import Record
from ostler.model.text import plain_text_faults
from ostler.model.validation import Fault

MAX_REASON = 2000


class AttemptOutcome(StrEnum):
    """How a start ended; told apart where it can be, `unknown` where it cannot."""

    CLEAN = "clean"
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    OOM = "oom"
    TIMEOUT = "timeout"
    STOPPED = "stopped"  #: ended by us
    ERROR = "error"  #: raised inside the agent
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Attempt(Record):
    """One start of an instance: an intent before anything exists, completed by what was observed."""

    instance_id: UUID
    number: int
    task_id: UUID | None = None
    intended_at: Moment
    #: The handle of the isolation level; None while the intent is open.
    identity: Mapping[str, Any] | None = None
    started_at: Moment | None = None
    ended_at: Moment | None = None
    outcome: AttemptOutcome | None = None
    detail: str | None = None

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class WaitKind(StrEnum):
    BACKOFF = "backoff"
    RESUME = "resume"  #: a pause with an end
    DEPENDENCY = "dependency"
    CI = "ci"
    PULL_REQUEST = "pull_request"
    HUMAN = "human"
    QUOTA = "quota"
    AGENT = "agent"  #: asked for by the agent itself


@dataclass(frozen=True, kw_only=True)
class Wait(Record):
    """A durable reason why something is not running."""

    wait_id: UUID
    workspace_id: UUID
    kind: WaitKind
    instance_id: UUID | None = None
    task_id: UUID | None = None
    reason: str | None = None
    created_at: Moment
    #: When to look again without being woken.
    due_at: Moment | None = None
    detail: Mapping[str, Any] | None = None
    ended_at: Moment | None = None
    outcome: str | None = None

    def rules(self) -> Iterator[Fault]:
        yield from plain_text_faults("reason", self.reason, MAX_REASON)
        yield from plain_text_faults("outcome", self.outcome, MAX_REASON)
        yield from json_faults("detail", self.detail)


@dataclass(frozen=True, kw_only=True)
class Lease(Record):
    """Who owns the store. The epoch rises with every owner; an older one may not write."""

    name: str
    owner: str
    epoch: int
    acquired_at: Moment
    expires_at: Moment
