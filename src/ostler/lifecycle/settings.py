"""What the manager itself may be told; every value has a default that suits a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from ostler.isolation.base import DEFAULT_NAMES
from ostler.model import Record
from ostler.model.bounds import Interval
from ostler.model.record import settle
from ostler.policy import RetentionPolicy

_SECOND = timedelta(seconds=1)
_Short = Annotated[timedelta, Interval(ge=timedelta(milliseconds=10), le=timedelta(hours=1))]


@dataclass(frozen=True, kw_only=True)
class LifecycleSettings(Record):
    #: How long the store stays ours without a word from us; renewed three times in it.
    lease_ttl: Annotated[timedelta, Interval(ge=_SECOND, le=timedelta(hours=1))] = timedelta(seconds=30)
    #: How often the watch looks for who is due; probes have intervals of their own.
    tick: _Short = _SECOND
    metrics_interval: _Short = timedelta(seconds=5)
    #: No sign of life in mid-work for so long is a stall.
    stall_after: _Short = timedelta(minutes=5)
    #: At most one progress report of an instance is kept in so long; the latest.
    progress_interval: _Short = _SECOND
    #: Requests that may wait for a free slot, for each slot there is.
    queue_per_slot: Annotated[int, Interval(ge=0, le=1000)] = 10
    #: Restarts under way at a time: many deaths at once must not become a stampede.
    restarts_at_once: Annotated[int, Interval(ge=1, le=1000)] = 16
    #: Of those, so many are begun per second.
    restarts_per_second: Annotated[int, Interval(ge=1, le=10_000)] = 100
    #: How long agents that can do so go on without a manager, after it died or was closed; 0: they end with it.
    outlive: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(days=7))] = timedelta(0)
    #: Names of the variables of this program's environment that agents outside of it see. Others they do not see.
    environment: tuple[str, ...] = DEFAULT_NAMES
    #: How long agents have to end when the manager is closed.
    close_grace: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=10)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    sweep_interval: Annotated[timedelta, Interval(ge=_SECOND, le=timedelta(days=1))] = timedelta(minutes=10)

    def __post_init__(self) -> None:
        settle(self, "environment")
