from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest

from ostler.model.states import AgentState
from ostler.telemetry import METRICS, LifecycleMetrics, MetricKind, prometheus_name

#: The names and kinds that were promised from the beginning.
PROMISED = {
    "lifecycle.instances.active": MetricKind.GAUGE,
    "lifecycle.instances.by_state": MetricKind.GAUGE,
    "lifecycle.spawn.duration": MetricKind.HISTOGRAM,
    "lifecycle.spawn.count": MetricKind.COUNTER,
    "lifecycle.spawn.failures": MetricKind.COUNTER,
    "lifecycle.terminate.duration": MetricKind.HISTOGRAM,
    "lifecycle.terminate.count": MetricKind.COUNTER,
    "lifecycle.terminate.forced": MetricKind.COUNTER,
    "lifecycle.restarts.count": MetricKind.COUNTER,
    "lifecycle.license.rejections": MetricKind.COUNTER,
}


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_promised_metrics_are_there_with_their_kinds() -> None:
    assert {name: METRICS[name].kind for name in PROMISED} == PROMISED


def test_every_row_is_under_its_own_name_and_says_what_it_is() -> None:
    names = [prometheus_name(spec) for spec in METRICS.values()]
    assert len(set(names)) == len(names)
    for name, spec in METRICS.items():
        assert name == spec.name
        assert spec.description
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lifecycle.instances.by_state", "ostler_lifecycle_instances_by_state"),
        ("lifecycle.spawn.count", "ostler_lifecycle_spawn_count_total"),
        ("lifecycle.spawn.duration", "ostler_lifecycle_spawn_duration_seconds"),
    ],
)
def test_the_prometheus_name_follows_from_name_and_kind(name: str, expected: str) -> None:
    assert prometheus_name(METRICS[name]) == expected


def test_counts_add_up_and_are_kept_apart_by_label() -> None:
    metrics = LifecycleMetrics()
    metrics.count("lifecycle.health.changes", state="healthy")
    metrics.count("lifecycle.health.changes", state="healthy")
    metrics.count("lifecycle.health.changes", state="degraded")
    metrics.count("lifecycle.observers.dropped", 7)
    assert metrics.value("lifecycle.health.changes", state="healthy") == 2
    assert metrics.value("lifecycle.health.changes", state="degraded") == 1
    assert metrics.value("lifecycle.health.changes", state="unknown") == 0
    assert metrics.value("lifecycle.observers.dropped") == 7
    assert metrics.value("lifecycle.spawn.count") == 0


def test_durations_are_counted_in_buckets() -> None:
    metrics = LifecycleMetrics()
    for seconds in (0.0004, 0.2, 90.0):
        metrics.observe("lifecycle.spawn.duration", seconds)
    assert metrics.value("lifecycle.spawn.duration") == 3
    text = metrics.expose()
    assert 'ostler_lifecycle_spawn_duration_seconds_bucket{le="0.001"} 1.0' in text
    assert 'ostler_lifecycle_spawn_duration_seconds_bucket{le="+Inf"} 3.0' in text


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, -math.inf])
def test_no_duration_can_poison_the_sum(seconds: float) -> None:
    metrics = LifecycleMetrics()
    metrics.observe("lifecycle.process.duration", seconds)
    metrics.observe("lifecycle.process.duration", 2.0)
    assert "ostler_lifecycle_process_duration_seconds_sum 2.0" in metrics.expose()


def test_both_gauges_come_from_one_count_and_empty_states_fall_to_zero() -> None:
    metrics = LifecycleMetrics()
    metrics.set_states({AgentState.READY: 2, AgentState.PROCESSING: 1, AgentState.FAILED: 4})
    assert metrics.value("lifecycle.instances.active") == 3
    assert metrics.value("lifecycle.instances.by_state", state="failed") == 4
    metrics.set_states({AgentState.READY: 1})
    assert metrics.value("lifecycle.instances.active") == 1
    assert metrics.value("lifecycle.instances.by_state", state="failed") == 0


def test_two_managers_do_not_add_up() -> None:
    one, other = LifecycleMetrics(), LifecycleMetrics()
    one.count("lifecycle.restarts.count")
    assert other.value("lifecycle.restarts.count") == 0


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("lifecycle.spawns", {}),
        ("lifecycle.instances.active", {}),
        ("lifecycle.health.changes", {}),
        ("lifecycle.health.changes", {"state": "healthy", "id": "7"}),
        ("lifecycle.observers.dropped", {"state": "healthy"}),
    ],
)
def test_a_name_or_label_that_is_not_in_the_table_is_a_mistake(name: str, labels: dict[str, str]) -> None:
    with pytest.raises((KeyError, ValueError)):
        LifecycleMetrics().count(name, **labels)


def test_the_page_is_repeatable() -> None:
    one, other = LifecycleMetrics(), LifecycleMetrics()
    for metrics in (one, other):
        metrics.count("lifecycle.terminate.count")
    assert one.expose() == other.expose()
    assert "_created" not in one.expose()
    for spec in METRICS.values():
        assert f"# HELP {prometheus_name(spec)} {spec.description}\n" in one.expose()


def test_threads_lose_no_count() -> None:
    metrics = LifecycleMetrics()

    def work() -> None:
        for _ in range(1000):
            metrics.count("lifecycle.process.count")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("lifecycle.process.count") == 4000


@pytest.mark.parametrize("code", ["import ostler", "import ostler.cli", "import ostler.telemetry"])
def test_the_client_library_is_loaded_only_when_something_is_counted(code: str) -> None:
    script = f"{code}\nimport sys; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
