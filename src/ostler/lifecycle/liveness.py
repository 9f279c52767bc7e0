"""What is known of a live instance besides its record: signs of life, what it has done, what it has said."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ostler.agents.messages import MetricReported, Progress, Signal
from ostler.clock import Clock
from ostler.errors import StoreError
from ostler.isolation.base import Usage
from ostler.model.instance import AgentHealthStatus, AgentMetrics
from ostler.model.spawn import HealthCheckConfig

_MINUTE = 60.0
#: The largest number of metrics of its own that one agent may report.
_MAX_METRICS = 100
#: CPU below this is noise.
_LEAST_CPU_PERCENT = 0.05


@dataclass(slots=True, eq=False)
class Outbox:
    """What one attempt has said and is not durable yet."""

    signals: deque[Signal] = field(default_factory=deque)
    submitted_signals: deque[Signal] = field(default_factory=deque)
    #: Rises when a write fails: later writes of the same round fail with it.
    write_round: int = 0
    #: Numbers of messages: the last that was heard, the last submitted to the store, the last that is durable.
    last: int = 0
    submitted: int = 0
    durable: int = 0
    writing: asyncio.Future[Any] | None = None
    #: The store could not write: why, until it is tried again.
    write_error: StoreError | None = None
    #: Resolved when there is room for more signals.
    room_freed: asyncio.Future[None] | None = None
    progress: Progress | None = None
    progress_due: bool = False
    progress_at: float = float("-inf")
    #: The end of the attempt is being written: a later write of its progress would be one of an earlier attempt.
    has_ended: bool = False
    tokens_due: bool = False

    @property
    def pending(self) -> int:
        """The number of the last message where it is not durable; else 0."""
        return self.last if self.last > self.durable else 0


class Counters:
    """What the instance has done."""

    __slots__ = ("_recent", "completed", "custom", "failed", "tokens")

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        self.tokens = 0
        #: Numbers that the agent itself reports.
        self.custom: dict[str, float] = {}
        #: Tokens of the last minute, by second.
        self._recent: deque[tuple[int, int]] = deque(maxlen=61)

    def take_over(self, metrics: AgentMetrics | None) -> None:
        """Go on from what an earlier manager has written."""
        if metrics is not None:
            self.completed, self.failed = metrics.completed_tasks, metrics.failed_tasks
            self.tokens += metrics.tokens_used
            self.custom.update(metrics.custom or {})

    def add_tokens(self, count: int, now: float) -> None:
        self.tokens += count
        before = self._recent.pop()[1] if self._recent and self._recent[-1][0] == int(now) else 0
        self._recent.append((int(now), before + count))

    def keep_metric(self, message: MetricReported) -> None:
        if message.name in self.custom or len(self.custom) < _MAX_METRICS:
            self.custom[message.name] = message.value

    def tokens_wait(self, limit: int, now: float) -> float:
        """Seconds until the tokens of the last minute leave room for another request; 0 without a limit."""
        recent = [entry for entry in self._recent if now - entry[0] < _MINUTE]
        over = sum(count for _, count in recent) - limit
        if not limit or over < 0:
            return 0.0
        for second, count in recent:
            over -= count
            if over < 0:
                return max(second + _MINUTE - now, 0.0)
        return _MINUTE


class ObservedLiveness:
    """When the agent was last heard, when it last used CPU, and how healthy it is."""

    __slots__ = (
        "_clock",
        "_cpu_seconds",
        "_output_at",
        "_output_noted",
        "_usage",
        "cpu_change",
        "cpu_percent",
        "doing",
        "health",
        "heartbeat",
        "measured",
        "next_probe",
        "output",
        "probing",
        "reason_written",
        "sampled",
        "stalled",
        "started",
        "unable",
    )

    def __init__(self, clock: Clock, chance: random.Random, check: HealthCheckConfig) -> None:
        now = clock.mono()
        self._clock = clock
        self.started = now
        self.heartbeat = now
        self.output = now
        self.cpu_change: float | None = now
        #: When it was last due for a sample, and when it was last measured.
        self.sampled = now
        self.measured = float("-inf")
        # Spread over the interval, so that agents that start together are not probed together.
        self.next_probe = now + check.interval.total_seconds() * chance.random()
        self.health = AgentHealthStatus()
        #: Its last progress, in words.
        self.doing: str | None = None
        #: A probe is under way.
        self.probing = False
        self.stalled = False
        #: The probe itself could not run, and the log has said so.
        self.unable = False
        self.reason_written = float("-inf")
        self.cpu_percent = 0.0
        self._cpu_seconds: float | None = None
        #: When it wrote last, by the wall clock, and when that was noted.
        self._output_at: datetime | None = None
        self._output_noted = now
        self._usage: Usage | None = None

    def note_usage(self, usage: Usage) -> None:
        """One sample of what it uses."""
        now = self._clock.mono()
        passed = now - self.sampled
        before = usage.cpu_seconds if self._cpu_seconds is None else self._cpu_seconds
        spent = max(usage.cpu_seconds - before, 0.0)
        percent = round(100 * spent / passed, 2) if passed > 0 else 0.0
        self.cpu_percent = percent if percent >= _LEAST_CPU_PERCENT else 0.0
        if spent > 0 or self._cpu_seconds is None:
            self._cpu_seconds = usage.cpu_seconds
            self.cpu_change = now
        self.sampled = self.measured = now
        self._usage = usage

    def note_output(self, at: datetime) -> None:
        """It wrote last at this time of the wall clock. A jump of that clock makes no silence longer."""
        now = self._clock.mono()
        if self._output_at is None or at > self._output_at:
            age = max((self._clock.wall() - at).total_seconds(), 0.0)
            self.output = max(self.output, now - min(age, now - self._output_noted))
        self._output_at, self._output_noted = at, now

    def metrics_with(self, counters: Counters, open_tasks: int, sampled_at: datetime) -> AgentMetrics | None:
        """None before the first sample and the first request."""
        usage = self._usage
        if usage is None and not (counters.completed or counters.failed or counters.tokens or counters.custom):
            return None
        usage = usage or Usage()
        return AgentMetrics(
            sampled_at=sampled_at,
            cpu_percent=self.cpu_percent,
            memory_bytes=usage.memory_bytes,
            memory_is_shared=usage.memory_is_shared,
            thread_count=usage.thread_count,
            open_tasks=open_tasks,
            completed_tasks=counters.completed,
            failed_tasks=counters.failed,
            tokens_used=counters.tokens,
            custom=dict(counters.custom) or None,
        )

    @property
    def shared_memory_mb(self) -> int | None:
        """The memory of the program that the agent shares with others, where it does."""
        usage = self._usage
        return usage.memory_bytes // (1024 * 1024) if usage is not None and usage.memory_is_shared else None

    def moment(self, mono: float | None) -> datetime | None:
        """A time of the monotonic clock, laid onto the wall clock as it is now."""
        return None if mono is None else self._clock.wall() - timedelta(seconds=self._clock.mono() - mono)
