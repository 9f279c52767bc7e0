"""How much of the machine an agent may have, and how well that is held."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from ostler.model.bounds import Interval
from ostler.model.record import Record


class Enforcement(StrEnum):
    """What an isolation level makes of a limit; recorded per limit on every instance."""

    ENFORCED = "enforced"  #: the kernel or the manager holds it
    APPROXIMATED = "approximated"  #: watched and acted upon, with some slack
    ADVISORY = "advisory"  #: told to the agent, held by nobody


@dataclass(frozen=True, kw_only=True)
class ResourceLimits(Record):
    max_memory_mb: Annotated[int, Interval(ge=64, le=8192)] = 512
    #: 0 means unlimited.
    max_cpu_percent: Annotated[int, Interval(ge=0, le=100)] = 0
    #: One that does not heed its cancelling has 5 s more before it is ended.
    execution_timeout: Annotated[timedelta, Interval(ge=timedelta(seconds=1), le=timedelta(hours=1))] = timedelta(
        minutes=5
    )
    max_worker_threads: Annotated[int, Interval(ge=1, le=32)] = 4
    max_concurrent_tasks: Annotated[int, Interval(ge=1, le=100)] = 10
    #: 0 means the account's own default.
    max_tokens_per_minute: Annotated[int, Interval(ge=0, le=1_000_000_000)] = 0
