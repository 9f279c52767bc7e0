"""Attempts and requests of an instance, and the lease: its epoch and the number of the attempt fence every write."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.model.record import Record, record
from ostler.model.types import Moment


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


@record
class Lease(Record):
    """The owner of the store. The epoch rises with every owner; an older one may not write."""

    name: str
    owner: str
    epoch: int
    acquired_at: Moment
    expires_at: Moment
