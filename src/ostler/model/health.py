"""How an agent's health is asked for, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated

from ostler.model.bounds import Interval
from ostler.model.moments import Moment
from ostler.model.record import Record
from ostler.model.states import HealthState, ProbeType
from ostler.model.targets import command_target, http_target, tcp_target
from ostler.model.text import plain_text_faults
from ostler.model.validation import Fault, all_are, shown

MAX_TARGET = 2000
_TARGETS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {ProbeType.HTTP: http_target, ProbeType.TCP: tcp_target, ProbeType.COMMAND: command_target}
)


@dataclass(frozen=True, kw_only=True)
class HealthCheckConfig(Record):
    probe: ProbeType = ProbeType.HEARTBEAT
    #: A URL for http, host:port for tcp, a command line for command.
    target: str | None = None
    interval: Annotated[timedelta, Interval(ge=timedelta(seconds=1), le=timedelta(minutes=10))] = timedelta(seconds=5)
    timeout: Annotated[timedelta, Interval(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = timedelta(
        seconds=3
    )
    failure_threshold: Annotated[int, Interval(ge=1, le=100)] = 3
    success_threshold: Annotated[int, Interval(ge=1, le=100)] = 2
    #: Failures so soon after a start do not count.
    start_period: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(hours=1))] = timedelta(0)

    @property
    def is_custom(self) -> bool:
        return self.probe is not ProbeType.HEARTBEAT

    def rules(self) -> Iterator[Fault]:
        yield from self._target_faults()
        comparable = all_are(timedelta, self.interval, self.timeout)
        if comparable and self.timeout > self.interval:
            bound = f"must be at most the interval ({shown(self.interval)})"
            yield Fault(field="timeout", bound=bound, value=shown(self.timeout))

    def _target_faults(self) -> Iterator[Fault]:
        unkeepable = tuple(plain_text_faults("target", self.target, MAX_TARGET))
        yield from unkeepable
        taken_apart = _TARGETS.get(self.probe) if all_are(str, self.probe) else None
        if taken_apart is None or unkeepable:
            return
        if not self.target:
            yield Fault(field="target", bound=f"is required for a {self.probe} probe")
        elif all_are(str, self.target):
            try:
                taken_apart(self.target)
            except ValueError as error:
                yield Fault(field="target", bound=str(error), value=shown(self.target))


@dataclass(frozen=True, kw_only=True)
class AgentHealthStatus(Record):
    state: HealthState = HealthState.UNKNOWN
    checked_at: Moment | None = None
    consecutive_failures: Annotated[int, Interval(ge=0)] = 0
    consecutive_successes: Annotated[int, Interval(ge=0)] = 0
    details: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentMetrics(Record):
    """One sample of what an instance uses and has done."""

    sampled_at: Moment
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    thread_count: int = 0
    open_tasks: int = 0
    completed_tasks: int = 0
    failed_tasks: int = 0
    tokens_used: int = 0
    #: What the agent counts itself, by its own names.
    custom: Mapping[str, float] | None = None
    #: The memory is that of a process which others live in too.
    memory_is_shared: bool = False
