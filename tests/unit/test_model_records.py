"""What a record is made of: the defaults and ranges of the contract, words for values, one record laid over another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.model.access import HOME_WORKSPACE_ID, Principal, Role, Workspace
from ostler.model.events import AgentErrorEvent, EventsMissed
from ostler.model.instance import AgentHealthStatus, AgentInstance, AgentMetrics, TerminationResult
from ostler.model.query import GetInstancesFilter, ObservationOptions
from ostler.model.record import Record
from ostler.model.spawn import (
    AgentSpawnOptions,
    Definition,
    HealthCheckConfig,
    ResourceLimits,
    RestartPolicy,
    SpawnRequest,
    TerminationOptions,
)
from ostler.model.states import (
    AgentPriority,
    AgentState,
    Enforcement,
    HealthState,
    IsolationLevel,
    ProbeType,
    RestartPolicyType,
    Tier,
)
from ostler.policy.retention import RetentionPolicy

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
ID = UUID(int=7)
MS, S, MIN, H, D = (
    timedelta(milliseconds=1),
    timedelta(seconds=1),
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
)
INSTANCE = AgentInstance(
    instance_id=ID, definition_id=ID, workspace_id=ID, state=AgentState.READY, created_at=NOW, updated_at=NOW
)
WORKSPACE = Workspace(workspace_id=ID, name="w", tier=Tier.TEAMS, created_at=NOW)
REQUEST = SpawnRequest(agent_definition_id=ID)
METRICS = AgentMetrics(sampled_at=NOW)
PRINCIPAL = Principal(principal_id=ID, name="p", workspace_id=ID, created_at=NOW)
DEFINITION = Definition(definition_id=ID, name="d", kind="k", manifest={}, created_at=NOW, updated_at=NOW)

#: What the contract says of a record that is made with as little as possible.
DEFAULTS: list[tuple[Record, dict[str, Any]]] = [
    (SpawnRequest(agent_definition_id=ID), {"options": None, "context": None, "task_id": None, "crew": None}),
    (
        AgentSpawnOptions(),
        {
            "initialization_timeout": 30 * S,
            "resource_limits": None,
            "isolation_level": IsolationLevel.THREAD,
            "restart_policy": None,
            "health_check": None,
            "name": None,
            "tags": None,
            "priority": AgentPriority.NORMAL,
            "min_enforcement": Enforcement.ADVISORY,
            "workdir": None,
            "env": None,
        },
    ),
    (
        ResourceLimits(),
        {
            "max_memory_mb": 512,
            "max_cpu_percent": 0,
            "execution_timeout": 5 * MIN,
            "max_worker_threads": 4,
            "max_concurrent_tasks": 10,
            "max_tokens_per_minute": 0,
        },
    ),
    (
        RestartPolicy.default(),
        {
            "type": RestartPolicyType.EXPONENTIAL,
            "max_retries": 3,
            "initial_delay": S,
            "max_delay": MIN,
            "backoff_multiplier": 2.0,
            "use_jitter": True,
            "circuit_breaker_timeout": 5 * MIN,
        },
    ),
    (RestartPolicy.none(), {"type": RestartPolicyType.NONE, "max_retries": 0}),
    (RestartPolicy.immediate(), {"type": RestartPolicyType.IMMEDIATE, "max_retries": 3, "initial_delay": 0 * S}),
    (
        HealthCheckConfig(),
        {
            "probe": ProbeType.HEARTBEAT,
            "interval": 5 * S,
            "timeout": 3 * S,
            "failure_threshold": 3,
            "success_threshold": 2,
            "is_custom": False,
        },
    ),
    (AgentHealthStatus(), {"state": HealthState.UNKNOWN, "checked_at": None}),
    (
        INSTANCE,
        {
            "health": AgentHealthStatus(),
            "metrics": None,
            "terminated_at": None,
            "restart_count": 0,
            "error_message": None,
            "spawn_options": None,
            "tags": (),
            "name": None,
            "owner_id": None,
            "attempt": 1,
            "version": 1,
            "is_active": True,
            "final_state": None,
        },
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
        {
            "state": None,
            "health_state": None,
            "tag": None,
            "definition_id": None,
            "owner_id": None,
            "name_pattern": None,
            "include_terminated": False,
            "include_restarting": False,
            "limit": 100,
            "offset": 0,
        },
    ),
    (
        ObservationOptions.default(),
        {
            "include_state_changes": True,
            "include_health_checks": True,
            "include_metrics": False,
            "include_errors": True,
            "include_restarts": True,
            "buffer_capacity": 100,
        },
    ),
    (
        AgentErrorEvent(instance_id=ID, error_message="e"),
        {"correlation_id": None, "exception_type": None, "stack_trace": None, "is_recoverable": False},
    ),
    (DEFINITION, {"workspace_id": HOME_WORKSPACE_ID, "source": None, "version": 1}),
    (WORKSPACE, {"disabled_features": (), "max_tokens_per_minute": 0}),
    (
        RetentionPolicy(),
        {"finished": D, "events": 30 * D, "audit": None, "idempotency": D, "batch": 500},
    ),
]

#: The first and the last value that is good, and how small a step leads out. Where the design overrules the seed, its
#: bound stands here: memory, CPU, execution time-out.
RANGES: list[tuple[Record, str, Any, Any, Any]] = [
    (ResourceLimits(), "max_memory_mb", 64, 16 * 1024 * 1024, 1),
    (ResourceLimits(), "max_cpu_percent", 0, 100 * 1024, 1),
    (ResourceLimits(), "execution_timeout", S, 7 * D, MS),
    (ResourceLimits(), "max_worker_threads", 1, 32, 1),
    (ResourceLimits(), "max_concurrent_tasks", 1, 100, 1),
    (ResourceLimits(), "max_tokens_per_minute", 0, None, 1),
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
    (ObservationOptions(), "buffer_capacity", 1, 10_000, 1),
    (SpawnRequest(agent_definition_id=ID), "generation", 0, 2**31 - 1, 1),
    (AgentHealthStatus(), "consecutive_failures", 0, None, 1),
    (WORKSPACE, "max_tokens_per_minute", 0, None, 1),
    (DEFINITION, "version", 1, 2**31 - 1, 1),
    (RetentionPolicy(), "finished", MIN, 3650 * D, MS),
    (RetentionPolicy(), "events", MIN, 3650 * D, MS),
    (RetentionPolicy(), "audit", MIN, 3650 * D, MS),
    (RetentionPolicy(), "idempotency", MIN, D, MS),
    (RetentionPolicy(), "batch", 1, 10_000, 1),
]


@pytest.mark.parametrize(("record", "expected"), DEFAULTS)
def test_a_record_has_the_defaults_of_the_contract(record: Record, expected: dict[str, Any]) -> None:
    assert {name: getattr(record, name) for name in expected} == expected
    assert record.validate().errors == ()


@pytest.mark.parametrize(("record", "name", "low", "high", "step"), RANGES)
def test_a_range_holds_at_both_ends(record: Record, name: str, low: Any, high: Any, step: Any) -> None:
    for good in (low, high):
        if good is not None:
            assert record.evolve(**{name: good}).validate().errors == ()
    for bad in (low - step, None if high is None else high + step):
        if bad is not None:
            assert [fault.field for fault in record.evolve(**{name: bad}).validate()] == [name]


def test_a_graceful_timeout_of_zero_is_allowed() -> None:
    assert TerminationOptions(graceful_timeout=0 * S).validate().errors == ()


# --- words for values --------------------------------------------------------------------------------

#: What a caller may write, and the value that `checked()` makes of it.
COERCED: list[tuple[Record, dict[str, Any], str, Any]] = [
    (ResourceLimits(), {"max_memory_mb": "256M"}, "max_memory_mb", 256),
    (ResourceLimits(), {"max_memory_mb": "1.5G"}, "max_memory_mb", 1536),
    (ResourceLimits(), {"max_memory_mb": "2 GiB"}, "max_memory_mb", 2048),
    (ResourceLimits(), {"max_memory_mb": "131072kb"}, "max_memory_mb", 128),
    (ResourceLimits(), {"max_memory_mb": "512"}, "max_memory_mb", 512),
    (ResourceLimits(), {"execution_timeout": "30s"}, "execution_timeout", 30 * S),
    (ResourceLimits(), {"execution_timeout": "1h 30min"}, "execution_timeout", 90 * MIN),
    (ResourceLimits(), {"execution_timeout": "1500 ms"}, "execution_timeout", 1500 * MS),
    (ResourceLimits(), {"execution_timeout": "PT5M"}, "execution_timeout", 5 * MIN),
    (ResourceLimits(), {"execution_timeout": 30}, "execution_timeout", 30 * S),
    (AgentSpawnOptions(), {"initialization_timeout": 0.5}, "initialization_timeout", 500 * MS),
    (AgentSpawnOptions(), {"isolation_level": "process"}, "isolation_level", IsolationLevel.PROCESS),
    (AgentSpawnOptions(), {"priority": "high"}, "priority", AgentPriority.HIGH),
    (AgentSpawnOptions(), {"tags": ["a", "b"]}, "tags", ("a", "b")),
    (
        AgentSpawnOptions(),
        {"resource_limits": {"max_memory_mb": "1G"}},
        "resource_limits",
        ResourceLimits(max_memory_mb=1024),
    ),
    (AgentSpawnOptions(), {"restart_policy": "exponential"}, "restart_policy", RestartPolicy()),
    (AgentSpawnOptions(), {"restart_policy": "no"}, "restart_policy", RestartPolicy.none()),
    (
        AgentSpawnOptions(),
        {"restart_policy": "immediate:5"},
        "restart_policy",
        RestartPolicy.immediate().evolve(max_retries=5),
    ),
    (AgentSpawnOptions(), {"restart_policy": "on-failure:2"}, "restart_policy", RestartPolicy(max_retries=2)),
    (
        AgentSpawnOptions(),
        {"restart_policy": {"type": "linear"}},
        "restart_policy",
        RestartPolicy(type=RestartPolicyType.LINEAR),
    ),
    (REQUEST, {"agent_definition_id": str(ID)}, "agent_definition_id", ID),
    (REQUEST, {"agent_definition_id": "coder"}, "agent_definition_id", "coder"),
    (PRINCIPAL, {"roles": ["viewer"]}, "roles", (Role.VIEWER,)),
    (INSTANCE, {"state": "failed"}, "state", AgentState.FAILED),
    (METRICS, {"sampled_at": "2026-03-01T12:30:15.123456Z"}, "sampled_at", NOW),
]


@pytest.mark.parametrize(("record", "words", "name", "value"), COERCED)
def test_words_for_values_are_understood(record: Record, words: dict[str, Any], name: str, value: Any) -> None:
    record = record.evolve(**words)
    checked = getattr(record.checked(), name)
    assert checked == value
    assert type(checked) is type(value)
    assert record.validate().value == record.checked()


# --- one record laid over another --------------------------------------------------------------------


def test_a_partial_record_changes_only_the_fields_that_it_names() -> None:
    base = AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS, name="base", priority=AgentPriority.HIGH)
    asked = AgentSpawnOptions(name="asked", priority=AgentPriority.NORMAL)
    laid = asked.over(base)
    assert (laid.name, laid.isolation_level) == ("asked", IsolationLevel.PROCESS)
    assert laid.priority is AgentPriority.NORMAL, "a default that is named counts"
    assert laid.initialization_timeout == AgentSpawnOptions().initialization_timeout
    assert AgentSpawnOptions().over(base) == base
    assert laid.fields_set == {"isolation_level", "name", "priority"}


def test_a_partial_record_inside_is_laid_over_its_counterpart() -> None:
    base = AgentSpawnOptions(resource_limits=ResourceLimits(max_memory_mb=1024, max_worker_threads=8))
    asked = AgentSpawnOptions(resource_limits=ResourceLimits(max_worker_threads=2))
    assert asked.over(base).resource_limits == ResourceLimits(max_memory_mb=1024, max_worker_threads=2)
    assert asked.over(AgentSpawnOptions()).resource_limits == ResourceLimits(max_worker_threads=2)
    removed = AgentSpawnOptions(resource_limits=None)
    assert removed.over(base).resource_limits is None


@pytest.mark.parametrize(
    "asked",
    [
        AgentSpawnOptions(name="n", resource_limits=ResourceLimits(max_memory_mb="256M")).checked(),  # type: ignore[arg-type]  # words on purpose
        AgentSpawnOptions.from_json('{"name": "n", "resource_limits": {"max_memory_mb": "256M"}}'),
        AgentSpawnOptions.from_dict({"name": "n", "resource_limits": {"max_memory_mb": 256}}),
        SpawnRequest.from_dict(
            {"agent_definition_id": "d", "options": {"name": "n", "resource_limits": {"max_memory_mb": 256}}}
        )
        .checked()
        .options,
        AgentSpawnOptions(name="n").evolve(resource_limits=ResourceLimits(max_memory_mb=256)),
    ],
    ids=["checked", "json", "dict", "inside", "evolved"],
)
def test_what_was_named_survives_checking_json_and_changes(asked: AgentSpawnOptions) -> None:
    assert asked.fields_set == {"name", "resource_limits"}
    base = AgentSpawnOptions(priority=AgentPriority.LOW, resource_limits=ResourceLimits(max_worker_threads=9))
    laid = asked.over(base)
    assert (laid.priority, laid.name) == (AgentPriority.LOW, "n")
    assert laid.resource_limits == ResourceLimits(max_memory_mb=256, max_worker_threads=9)


# --- what records say of themselves ------------------------------------------------------------------


def test_an_evolved_record_is_another_one() -> None:
    more = ResourceLimits().evolve(max_memory_mb=1024)
    assert more.max_memory_mb == 1024
    assert ResourceLimits().max_memory_mb == 512
    assert more != ResourceLimits()


def test_a_request_without_a_definition_is_not_valid() -> None:
    assert SpawnRequest(agent_definition_id=ID).is_valid()
    assert not SpawnRequest(agent_definition_id=UUID(int=0)).is_valid()
    assert not SpawnRequest(agent_definition_id="").is_valid()


def test_uptime_ends_with_the_instance_and_leaves_out_the_time_it_was_failed() -> None:
    assert INSTANCE.uptime(NOW + H) == H
    assert INSTANCE.evolve(terminated_at=NOW + MIN).uptime(NOW + H) == MIN
    assert INSTANCE.evolve(downtime=MIN).uptime(NOW + H) == 59 * MIN
    assert INSTANCE.uptime(NOW - H) == timedelta(0), "not negative when the clock was set back"


def test_an_instance_is_active_until_it_is_terminated_or_failed() -> None:
    inactive = {state for state in AgentState if not INSTANCE.evolve(state=state).is_active}
    assert inactive == {AgentState.TERMINATED, AgentState.FAILED}


def test_the_result_of_a_termination_says_how_it_went() -> None:
    good = TerminationResult.successful(INSTANCE, True, S)
    assert (good.success, good.was_graceful, good.final_instance, good.duration) == (True, True, INSTANCE, S)
    bad = TerminationResult.failed("it hangs")
    assert (bad.success, bad.was_graceful, bad.error_message) == (False, False, "it hangs")
    assert (bad.final_instance, bad.duration) == (None, timedelta(0))


def test_missed_events_say_where_to_read_on() -> None:
    assert EventsMissed(instance_id=ID, count=3, first_sequence=7).resume_after == 6


@pytest.mark.parametrize("probe", ProbeType)
def test_every_probe_but_the_heartbeat_is_custom(probe: ProbeType) -> None:
    assert HealthCheckConfig(probe=probe).is_custom == (probe is not ProbeType.HEARTBEAT)
