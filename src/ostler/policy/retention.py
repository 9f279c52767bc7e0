"""How long finished records are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from ostler.model.record import Record, record
from ostler.model.types import Duration, Interval, Megabytes

_MINUTE = timedelta(minutes=1)
_TEN_YEARS = timedelta(days=3650)
_Age = Annotated[Duration, Interval(ge=_MINUTE, le=_TEN_YEARS)]


@record
class RetentionPolicy(Record):
    #: Instances that ended, counted from that moment.
    finished: _Age = timedelta(hours=24)
    #: The numbered log.
    events: _Age = timedelta(days=30)
    #: Without an age the audit is kept for ever.
    audit: _Age | None = None
    #: How long the answer to an idempotency key is kept.
    idempotency: Annotated[Duration, Interval(ge=_MINUTE, le=timedelta(hours=24))] = timedelta(hours=24)
    #: Rows that one transaction may remove, so that a large clean-up does not delay other commits.
    batch: Annotated[int, Interval(ge=1, le=10_000)] = 500
    #: The most that the home may take on the disk, in megabytes. Then no new task begins.
    disk: Annotated[Megabytes, Interval(ge=1, le=1024**3)] | None = None
