"""How long what is over is kept, and which records are due to go."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from ostler.model import INACTIVE_STATES, AgentInstance, Record, Task
from ostler.model.bounds import Interval

_MINUTE = timedelta(minutes=1)
_TEN_YEARS = timedelta(days=3650)
_Age = Annotated[timedelta, Interval(ge=_MINUTE, le=_TEN_YEARS)]


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy(Record):
    #: Instances that ended and tasks that were decided, counted from that moment.
    finished: _Age = timedelta(hours=24)
    events: _Age = timedelta(days=30)
    #: None keeps the audit for ever.
    audit: _Age | None = None
    #: How long an answer is kept for whoever asks again with the same key; it is given for 24 h.
    idempotency: Annotated[timedelta, Interval(ge=_MINUTE, le=timedelta(hours=24))] = timedelta(hours=24)
    #: Rows that one transaction may remove, so that a large clean-up never holds up the living.
    batch: Annotated[int, Interval(ge=1, le=10_000)] = 500


def instance_due(instance: AgentInstance, now: datetime, policy: RetentionPolicy) -> bool:
    """Whether a terminated or failed instance has been so for long enough.

    One without the moment of its end stays: what cannot be dated is not removed.
    """
    ended = instance.terminated_at
    return instance.state in INACTIVE_STATES and ended is not None and ended <= now - policy.finished


def task_due(task: Task, now: datetime, policy: RetentionPolicy) -> bool:
    """Whether an accepted or rejected task has been so for long enough; one in review never is."""
    return task.is_finished and task.updated_at <= now - policy.finished
