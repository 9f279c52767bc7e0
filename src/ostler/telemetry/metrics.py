"""The numbers of the lifecycle, for Prometheus.

The client library takes a tenth of a second to import, mostly for a web server that is not used here. It is
therefore loaded with the first `LifecycleMetrics`, and naming this module costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from ostler.model.states import ACTIVE_STATES, AgentState

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

_STARTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Work may take as long as an execution time-out may be: one hour.
_WORK = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One row of the table: everything else, the Prometheus name included, follows from it."""

    name: str
    kind: MetricKind
    description: str
    labels: tuple[str, ...] = ()
    #: The upper bounds of a histogram, in seconds.
    buckets: tuple[float, ...] = ()


def _counter(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=MetricKind.COUNTER, description=description, labels=labels)


def _gauge(name: str, description: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=MetricKind.GAUGE, description=description, labels=labels)


def _duration(name: str, description: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=MetricKind.HISTOGRAM, description=description, labels=labels, buckets=buckets)


METRICS: Mapping[str, MetricSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gauge("lifecycle.instances.active", "Instances that are active now"),
            _gauge("lifecycle.instances.by_state", "Instances in each state now", "state"),
            _duration("lifecycle.spawn.duration", "How long a spawn took until ready", _STARTS),
            _counter("lifecycle.spawn.count", "Spawns requested"),
            _counter("lifecycle.spawn.failures", "Spawns that failed"),
            _duration("lifecycle.terminate.duration", "How long a termination took", _STARTS),
            _counter("lifecycle.terminate.count", "Terminations"),
            _counter("lifecycle.terminate.forced", "Terminations that needed force"),
            _counter("lifecycle.restarts.count", "Restarts begun"),
            _counter("lifecycle.license.rejections", "Spawns that the plan did not admit"),
            _duration("lifecycle.process.duration", "How long a request was worked on", _WORK),
            _counter("lifecycle.process.count", "Requests taken up"),
            _counter("lifecycle.process.failures", "Requests that ended in an error"),
            _counter("lifecycle.process.timeouts", "Requests that ran into their time-out"),
            _counter("lifecycle.observers.dropped", "Events that slow observers missed"),
            _counter("lifecycle.health.changes", "Changes of health, by what it became", "state"),
        )
    }
)


def prometheus_name(spec: MetricSpec) -> str:
    """The name of a metric as Prometheus spells it."""
    suffix = {MetricKind.COUNTER: "_total", MetricKind.HISTOGRAM: "_seconds", MetricKind.GAUGE: ""}[spec.kind]
    return f"ostler_{spec.name.replace('.', '_')}{suffix}"


class LifecycleMetrics:
    """Its own registry, so that two managers in one program do not add up; safe to use from any thread.

    A name that is not in the table, or labels that are not those of its row, raise at once: that is a mistake in the
    code. Label values are members of our enums, so the number of series is bounded.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: PLC0415 - see the head

        self._registry = registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in METRICS.values():
            words = (prometheus_name(spec), spec.description, spec.labels)
            match spec.kind:
                case MetricKind.COUNTER:
                    self._counters[spec.name] = Counter(*words, registry=registry)
                case MetricKind.GAUGE:
                    self._gauges[spec.name] = Gauge(*words, registry=registry)
                case MetricKind.HISTOGRAM:
                    self._histograms[spec.name] = Histogram(*words, registry=registry, buckets=spec.buckets)

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def observe(self, name: str, seconds: float, /) -> None:
        """One duration. A negative or infinite one, which no duration can be, counts as zero."""
        self._histograms[name].observe(seconds if 0 <= seconds < math.inf else 0.0)

    def set_states(self, by_state: Mapping[AgentState, int]) -> None:
        """Both gauges of the instances from one count; a state that is not named has none."""
        for state in AgentState:
            self._gauges["lifecycle.instances.by_state"].labels(state=state.value).set(by_state.get(state, 0))
        active = sum(by_state.get(state, 0) for state in ACTIVE_STATES)
        self._gauges["lifecycle.instances.active"].set(active)

    def value(self, name: str, /, **labels: str) -> float:
        """The value now; of a duration, how often it was observed. Zero where nothing was counted yet."""
        spec = METRICS[name]
        suffix = "_count" if spec.kind is MetricKind.HISTOGRAM else ""
        return self._registry.get_sample_value(prometheus_name(spec) + suffix, labels) or 0.0

    def expose(self) -> str:
        """All of it in the text format of Prometheus, without the times at which the series were made."""
        from prometheus_client import generate_latest  # noqa: PLC0415 - see the head

        lines = generate_latest(self._registry).decode().splitlines(keepends=True)
        return "".join(line for line in lines if "_created" not in line)
