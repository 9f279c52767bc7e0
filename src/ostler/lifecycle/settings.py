"""The settings of a manager; every value has a default that suits a laptop."""

from __future__ import annotations

from dataclasses import field
from datetime import timedelta
from typing import Annotated

from ostler.isolation.base import DEFAULT_NAMES
from ostler.model.record import Record, record
from ostler.model.types import DEFAULT_RATE, Duration, Interval, OutputRate
from ostler.policy.retention import RetentionPolicy

_SECOND = timedelta(seconds=1)
_Short = Annotated[Duration, Interval(ge=timedelta(milliseconds=10), le=timedelta(hours=1))]


@record
class LifecycleSettings(Record):
    #: How long the store stays ours without a renewal; renewed three times in it.
    lease_ttl: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(hours=1))] = timedelta(seconds=30)
    #: How often the monitor looks which probes and samples are due.
    tick: _Short = _SECOND
    metrics_interval: _Short = timedelta(seconds=5)
    #: No sign of progress in mid-work for this long is a stall.
    stall_after: _Short = timedelta(minutes=5)
    #: At most one progress report of an instance is kept in this time; the latest.
    progress_interval: _Short = _SECOND
    #: Requests that may wait for a free slot, for each slot there is.
    queue_per_slot: Annotated[int, Interval(ge=0, le=1000)] = 10
    #: How long `suspend` waits for the work of an instance to end.
    hold_timeout: Annotated[Duration, Interval(ge=timedelta(milliseconds=10), le=timedelta(days=1))] = timedelta(
        minutes=5
    )
    #: Restarts that run at a time, and restarts begun per second.
    restarts_at_once: Annotated[int, Interval(ge=1, le=1000)] = 16
    restarts_per_second: Annotated[int, Interval(ge=1, le=10_000)] = 100
    #: How long agents go on without a manager that died; `close(keep=True)` leaves them for as long.
    outlive: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(days=7))] = timedelta(minutes=10)
    #: Names of the variables of this program's environment that agents outside of it see.
    environment: tuple[str, ...] = DEFAULT_NAMES
    #: Megabytes that each agent in a process may write in a second; what is beyond is dropped and counted.
    output_rate: OutputRate = DEFAULT_RATE
    #: How long agents have to end when the manager is closed.
    close_grace: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=10)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    sweep_interval: Annotated[Duration, Interval(ge=_SECOND, le=timedelta(days=1))] = timedelta(minutes=10)
