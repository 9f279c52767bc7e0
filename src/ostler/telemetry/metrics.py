"""The numbers of the lifecycle, for Prometheus.

The client library takes a tenth of a second to import, mostly for a web server that is not used here. It is
therefore loaded with the first `LifecycleMetrics`, and naming this module costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from ostler.model.states import ACTIVE_STATES, AgentState
from ostler.model.text import clipped

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.metrics import MetricWrapperBase

#: So many combinations of label values are kept apart for one metric; the rest share `OTHER`.
MAX_SERIES = 200
MAX_LABEL = 100
OTHER = "other"

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
            _counter("lifecycle.spawn.count", "Spawns asked for"),
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
            _counter("lifecycle.observers.dropped", "Events that slow observers were told they missed"),
            _counter("lifecycle.health.changes", "Changes of health, by what it became", "state"),
        )
    }
)


def prometheus_name(spec: MetricSpec) -> str:
    """The one place that knows how a name of ours becomes one of Prometheus."""
    suffix = {MetricKind.COUNTER: "_total", MetricKind.HISTOGRAM: "_seconds", MetricKind.GAUGE: ""}[spec.kind]
    return f"ostler_{spec.name.replace('.', '_')}{suffix}"


_Labels = Mapping[str, str]
_M = TypeVar("_M", bound="MetricWrapperBase")


class LifecycleMetrics:
    """Its own registry, so that two managers in one program do not add up; safe to use from any thread.

    A name that is not in the table, or labels that are not those of its row, raise at once: that is a mistake in
    the code. Values do not raise, because they may come from outside.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: PLC0415 - see the head

        self._registry = CollectorRegistry()
        self._counters = _Family(
            {
                spec.name: Counter(prometheus_name(spec), spec.description, spec.labels, registry=self._registry)
                for spec in _of(MetricKind.COUNTER)
            }
        )
        self._gauges = _Family(
            {
                spec.name: Gauge(prometheus_name(spec), spec.description, spec.labels, registry=self._registry)
                for spec in _of(MetricKind.GAUGE)
            }
        )
        self._histograms = _Family(
            {
                spec.name: Histogram(
                    prometheus_name(spec), spec.description, spec.labels, registry=self._registry, buckets=spec.buckets
                )
                for spec in _of(MetricKind.HISTOGRAM)
            }
        )

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        self._counters.series(name, labels).inc(amount)

    def observe(self, name: str, seconds: float, /, **labels: str) -> None:
        """One duration. What no duration can be, a negative one or none at all, counts as zero."""
        self._histograms.series(name, labels).observe(seconds if 0 <= seconds < math.inf else 0.0)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        self._gauges.series(name, labels).set(value)

    def set_states(self, by_state: Mapping[AgentState, int]) -> None:
        """Both gauges of the instances from one count; a state that is not named has none."""
        for state in AgentState:
            self.set("lifecycle.instances.by_state", by_state.get(state, 0), state=state.value)
        self.set("lifecycle.instances.active", sum(by_state.get(state, 0) for state in ACTIVE_STATES))

    def value(self, name: str, /, **labels: str) -> float:
        """What stands there now; of a duration, how often it was observed. Zero where nothing was said yet."""
        spec = METRICS[name]
        suffix = "_count" if spec.kind is MetricKind.HISTOGRAM else ""
        return self._registry.get_sample_value(prometheus_name(spec) + suffix, labels) or 0.0

    def expose(self) -> str:
        """All of it in the text format of Prometheus."""
        from prometheus_client import generate_latest  # noqa: PLC0415 - see the head

        return generate_latest(_Settled(self._registry)).decode()


def _of(kind: MetricKind) -> Iterable[MetricSpec]:
    return (spec for spec in METRICS.values() if spec.kind is kind)


class _Family(Generic[_M]):
    """The metrics of one kind. Finding a series again is one look-up, which halves the price of a count."""

    def __init__(self, metrics: Mapping[str, _M]) -> None:
        self._metrics = metrics
        self._seen: dict[str, set[tuple[str, ...]]] = {name: set() for name in metrics}
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], _M] = {}

    def series(self, name: str, labels: _Labels) -> _M:
        key = (name, tuple(labels.items()))
        found = self._found.get(key)
        if found is None:
            found, lasting = self._make(name, labels)
            if lasting:
                self._found[key] = found
        return found

    def _make(self, name: str, labels: _Labels) -> tuple[_M, bool]:
        """The series, and whether it may be remembered under these very labels."""
        metric = self._metrics.get(name)
        if metric is None:
            raise ValueError(f"{name!r} is not one of {', '.join(self._metrics)}")
        names = METRICS[name].labels
        if labels.keys() != set(names):
            raise ValueError(f"{name} is labelled by {', '.join(names) or 'nothing'}, not by {', '.join(labels)}")
        if not names:
            return metric, True
        given = tuple(labels[one] for one in names)
        values = self._admitted(name, tuple(clipped(str(value), MAX_LABEL) for value in given))
        return metric.labels(*values), values == given

    def _admitted(self, name: str, values: tuple[str, ...]) -> tuple[str, ...]:
        # A series lives as long as the program: what agents can make up must not fill its memory.
        seen = self._seen[name]
        if values not in seen and len(seen) >= MAX_SERIES:
            return (OTHER,) * len(values)
        seen.add(values)
        return values


class _Settled:
    """A registry without the moments at which its series were made, which double the page and help nobody."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
