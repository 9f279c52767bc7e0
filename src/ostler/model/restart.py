"""When a failed agent comes back, how soon, and when to give up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from ostler.model.bounds import Interval
from ostler.model.record import Record
from ostler.model.states import RestartPolicyType
from ostler.model.validation import Fault, all_are, shown


@dataclass(frozen=True, kw_only=True)
class RestartPolicy(Record):
    """Four brakes: retries since it was last healthy, a breaker, a burst window, and a budget for life."""

    type: RestartPolicyType = RestartPolicyType.EXPONENTIAL
    max_retries: Annotated[int, Interval(ge=0, le=10)] = 3
    initial_delay: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=1)
    max_delay: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(minutes=10))] = timedelta(minutes=1)
    backoff_multiplier: Annotated[float, Interval(ge=1.1, le=5.0)] = 2.0
    use_jitter: bool = True
    #: Failing continuously for so long ends the restarts.
    circuit_breaker_timeout: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(days=1))] = timedelta(
        minutes=5
    )
    #: A restart waits until it is at most so many starts within `burst_window`. Those by hand count, and do not wait.
    burst_limit: Annotated[int, Interval(ge=1, le=100)] = 5
    burst_window: Annotated[timedelta, Interval(ge=timedelta(seconds=1), le=timedelta(hours=1))] = timedelta(seconds=60)
    #: At most so many restarts in a whole life; being healthy for a while does not reset it.
    lifetime_limit: Annotated[int, Interval(ge=0, le=10_000)] = 100

    @classmethod
    def default(cls) -> RestartPolicy:
        return cls()

    @classmethod
    def none(cls) -> RestartPolicy:
        return cls(type=RestartPolicyType.NONE, max_retries=0)

    @classmethod
    def immediate(cls) -> RestartPolicy:
        return cls(type=RestartPolicyType.IMMEDIATE, max_retries=3, initial_delay=timedelta(0))

    def rules(self) -> Iterator[Fault]:
        comparable = all_are(timedelta, self.initial_delay, self.max_delay)
        if comparable and self.max_delay < self.initial_delay:
            bound = f"must be at least initial_delay ({shown(self.initial_delay)})"
            yield Fault(field="max_delay", bound=bound, value=shown(self.max_delay))
