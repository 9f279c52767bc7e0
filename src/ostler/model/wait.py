"""Waits: durable reasons why an instance or a task does not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.model.context import json_faults
from ostler.model.record import Record, record
from ostler.model.text import MAX_REASON, plain_text_faults
from ostler.model.types import Moment
from ostler.model.validation import Fault

#: The cause of a wait for a person: a task was rejected because its workdir was removed under its agent.
WORKDIR_GONE = "workdir_gone"


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
