from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.model import (
    AgentErrorEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentPriority,
    AgentSpawnOptions,
    AgentState,
    Enforcement,
    GetInstancesFilter,
    HealthCheckConfig,
    HealthState,
    IsolationLevel,
    LifecycleStatistics,
    ObservationOptions,
    Principal,
    ProbeType,
    Record,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Role,
    SpawnRequest,
    Task,
    TaskFilter,
    TaskState,
    TerminationOptions,
    TerminationResult,
)

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
ID = UUID(int=7)
MS, S, MIN, H, D = (timedelta(milliseconds=1), timedelta(seconds=1), timedelta(minutes=1),
                    timedelta(hours=1), timedelta(days=1))  # fmt: skip
INSTANCE = AgentInstance(instance_id=ID, definition_id=ID, state=AgentState.READY, created_at=NOW, updated_at=NOW)
TASK = Task(task_id=ID, task="write it", created_at=NOW, updated_at=NOW)
STATISTICS = LifecycleStatistics(
    active_instances=1, by_state={AgentState.READY: 1}, by_health={HealthState.HEALTHY: 1}, max_concurrent=None,
    total_spawned=2, total_terminated=1, average_uptime=5 * MIN, total_restarts=0,
)  # fmt: skip

#: What the contract says of a record that is made with as little as possible.
DEFAULTS: list[tuple[Record, dict[str, Any]]] = [
    (SpawnRequest(agent_definition_id=ID), {"options": None, "context": None}),
    (
        AgentSpawnOptions(),
        {"initialization_timeout": 30 * S, "resource_limits": None, "isolation_level": IsolationLevel.THREAD,
         "restart_policy": None, "health_check": None, "name": None, "tags": None,
         "priority": AgentPriority.NORMAL, "min_enforcement": Enforcement.ADVISORY},
    ),
    (
        ResourceLimits(),
        {"max_memory_mb": 512, "max_cpu_percent": 0, "execution_timeout": 5 * MIN, "max_worker_threads": 4,
         "max_concurrent_tasks": 10, "max_tokens_per_minute": 0},
    ),
    (
        RestartPolicy.default(),
        {"type": RestartPolicyType.EXPONENTIAL, "max_retries": 3, "initial_delay": S, "max_delay": MIN,
         "backoff_multiplier": 2.0, "use_jitter": True, "circuit_breaker_timeout": 5 * MIN},
    ),
    (RestartPolicy.none(), {"type": RestartPolicyType.NONE, "max_retries": 0}),
    (
        RestartPolicy.immediate(),
        {"type": RestartPolicyType.IMMEDIATE, "max_retries": 3, "initial_delay": 0 * S},
    ),
    (
        HealthCheckConfig(),
        {"probe": ProbeType.HEARTBEAT, "interval": 5 * S, "timeout": 3 * S, "failure_threshold": 3,
         "success_threshold": 2, "is_custom": False},
    ),
    (AgentHealthStatus(), {"state": HealthState.UNKNOWN, "checked_at": None}),
    (
        INSTANCE,
        {"health": AgentHealthStatus(), "metrics": None, "terminated_at": None, "restart_count": 0,
         "error_message": None, "spawn_options": None, "tags": (), "name": None, "owner_id": None,
         "workspace_id": None, "is_active": True, "final_state": None},
    ),
    (
        TerminationOptions.default(),
        {"graceful_timeout": 10 * S, "force_if_timeout": True, "reason": None, "persist_final_state": False},
    ),
    (
        TerminationOptions.immediate(),
        {"graceful_timeout": 0 * S, "force_if_timeout": True, "reason": "Immediate termination requested"},
    ),
    (
        GetInstancesFilter.all(),
        {"state": None, "health_state": None, "tag": None, "definition_id": None, "owner_id": None,
         "name_pattern": None, "include_terminated": False, "limit": 100, "offset": 0},
    ),
    (
        ObservationOptions.default(),
        {"include_state_changes": True, "include_health_checks": True, "include_metrics": False,
         "include_errors": True, "include_restarts": True, "buffer_capacity": 100},
    ),
    (
        TASK,
        {"state": TaskState.QUEUED, "generated_code": None, "submission_summary": None, "changed_files": (),
         "error": None, "definition_id": None, "attempt": 0, "spawn_count": 0, "retry_count": 0,
         "priority": AgentPriority.NORMAL, "dependencies": (), "workspace": None, "branch": None,
         "version": 1, "is_finished": False},
    ),
    (
        AgentErrorEvent(instance_id=ID, occurred_at=NOW, error_message="e"),
        {"correlation_id": None, "exception_type": None, "stack_trace": None, "is_recoverable": False},
    ),
]  # fmt: skip

#: The first and the last value that is good, and how small a step leads out.
RANGES: list[tuple[Record, str, Any, Any, Any]] = [
    (ResourceLimits(), "max_memory_mb", 64, 8192, 1),
    (ResourceLimits(), "max_cpu_percent", 0, 100, 1),
    (ResourceLimits(), "execution_timeout", S, H, MS),
    (ResourceLimits(), "max_worker_threads", 1, 32, 1),
    (ResourceLimits(), "max_concurrent_tasks", 1, 100, 1),
    (RestartPolicy(), "max_retries", 0, 10, 1),
    (RestartPolicy(max_delay=10 * MIN), "initial_delay", 0 * S, 5 * MIN, MS),
    (RestartPolicy(), "max_delay", S, 10 * MIN, MS),
    (RestartPolicy(), "backoff_multiplier", 1.1, 5.0, 0.01),
    (RestartPolicy(), "circuit_breaker_timeout", 0 * S, D, MS),
    (RestartPolicy(), "burst_limit", 1, 100, 1),
    (RestartPolicy(), "burst_window", S, H, MS),
    (RestartPolicy(), "lifetime_limit", 0, 10_000, 1),
    (HealthCheckConfig(timeout=100 * MS), "interval", S, 10 * MIN, MS),
    (HealthCheckConfig(interval=10 * MIN), "timeout", 100 * MS, 5 * MIN, MS),
    (HealthCheckConfig(), "failure_threshold", 1, 100, 1),
    (HealthCheckConfig(), "success_threshold", 1, 100, 1),
    (HealthCheckConfig(), "start_period", 0 * S, H, MS),
    (AgentSpawnOptions(), "initialization_timeout", 100 * MS, H, MS),
    (TerminationOptions(), "graceful_timeout", S, 5 * MIN, MS),
    (GetInstancesFilter(), "limit", 1, 1000, 1),
    (GetInstancesFilter(), "offset", 0, 1_000_000, 1),
    (TaskFilter(), "limit", 1, 1000, 1),
    (ObservationOptions(), "buffer_capacity", 1, 10_000, 1),
]


@pytest.mark.parametrize(("record", "expected"), DEFAULTS)
def test_a_record_has_the_defaults_of_the_contract(record: Record, expected: dict[str, Any]) -> None:
    assert {name: getattr(record, name) for name in expected} == expected
    assert record.validate().errors == ()


@pytest.mark.parametrize(("record", "name", "low", "high", "step"), RANGES)
def test_a_range_holds_at_both_ends(record: Record, name: str, low: Any, high: Any, step: Any) -> None:
    for good in (low, high):
        assert record.evolve(**{name: good}).validate().errors == ()
    for bad in (low - step, high + step):
        assert [fault.field for fault in record.evolve(**{name: bad}).validate()] == [name]


def test_an_evolved_record_is_another_one() -> None:
    more = ResourceLimits().evolve(max_memory_mb=1024)
    assert more.max_memory_mb == 1024
    assert ResourceLimits().max_memory_mb == 512
    assert more != ResourceLimits()


def test_lists_are_taken_and_kept_as_tuples() -> None:
    listed: Any = ["a"]
    assert AgentSpawnOptions(tags=listed).tags == ("a",)
    assert INSTANCE.evolve(tags=listed).tags == ("a",)
    assert TASK.evolve(tags=listed, changed_files=listed, dependencies=[ID]).validate()
    roles: Any = [Role.VIEWER]
    assert Principal(principal_id=ID, name="ada", workspace_id=ID, roles=roles, created_at=NOW).roles == (Role.VIEWER,)


def test_a_request_without_a_definition_is_not_valid() -> None:
    assert SpawnRequest(agent_definition_id=ID).is_valid()
    assert not SpawnRequest(agent_definition_id=UUID(int=0)).is_valid()


def test_uptime_ends_with_the_instance_and_is_never_negative() -> None:
    assert INSTANCE.uptime(NOW + H) == H
    assert INSTANCE.evolve(terminated_at=NOW + MIN).uptime(NOW + H) == MIN
    assert INSTANCE.uptime(NOW - H) == timedelta(0)


def test_an_instance_is_active_until_it_is_terminated_or_failed() -> None:
    inactive = {state for state in AgentState if not INSTANCE.evolve(state=state).is_active}
    assert inactive == {AgentState.TERMINATED, AgentState.FAILED}


def test_the_result_of_a_termination_says_how_it_went() -> None:
    good = TerminationResult.successful(INSTANCE, True, S)
    assert (good.success, good.was_graceful, good.final_instance, good.duration) == (True, True, INSTANCE, S)
    bad = TerminationResult.failed("it hangs")
    assert (bad.success, bad.was_graceful, bad.error_message) == (False, False, "it hangs")
    assert (bad.final_instance, bad.duration) == (None, timedelta(0))


@pytest.mark.parametrize("probe", ProbeType)
def test_every_probe_but_the_heartbeat_is_custom(probe: ProbeType) -> None:
    assert HealthCheckConfig(probe=probe).is_custom == (probe is not ProbeType.HEARTBEAT)
