from __future__ import annotations

import dataclasses
import inspect
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler import model
from ostler.errors import ValidationError
from ostler.model import (
    AgentMetrics,
    AgentPriority,
    AgentSpawnOptions,
    GetInstancesFilter,
    HealthCheckConfig,
    LifecycleStatistics,
    ProbeType,
    Record,
    ResourceLimits,
    RestartPolicy,
    SpawnRequest,
    Task,
    TerminationOptions,
    ValidationResult,
    clean_text,
    fold_tags,
)
from ostler.model.validation import Fault, duration_text, shown, whole_number

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ID = UUID(int=7)


def task(**changes: Any) -> Task:
    return Task(task_id=ID, task="t", created_at=NOW, updated_at=NOW).evolve(**changes)


def test_all_faults_come_at_once_with_field_bound_and_value() -> None:
    result = ResourceLimits(
        max_memory_mb=1,
        max_cpu_percent=101,
        execution_timeout=timedelta(hours=2),
        max_worker_threads=0,
        max_concurrent_tasks=1000,
    ).validate()
    assert not result
    assert not result.is_valid
    assert [(fault.field, fault.bound, fault.value) for fault in result] == [
        ("max_memory_mb", "must be 64 to 8192", "1"),
        ("max_cpu_percent", "must be 0 to 100", "101"),
        ("execution_timeout", "must be 1 s to 1 h", "2 h"),
        ("max_worker_threads", "must be 1 to 32", "0"),
        ("max_concurrent_tasks", "must be 1 to 100", "1000"),
    ]
    assert result.errors[0] == "max_memory_mb must be 64 to 8192, was 1"
    with pytest.raises(ValidationError) as caught:
        result.require()
    assert caught.value.faults == result.faults


def test_a_request_lists_the_faults_of_everything_inside_it() -> None:
    result = SpawnRequest(
        agent_definition_id=UUID(int=0),
        options=AgentSpawnOptions(
            name="two\nlines",
            tags=("ok", "not ok"),
            resource_limits=ResourceLimits(max_memory_mb=9000),
            restart_policy=RestartPolicy(initial_delay=timedelta(minutes=2)),
            health_check=HealthCheckConfig(probe=ProbeType.HTTP),
        ),
        context={"A": 1, "a": 2},
    ).validate()
    assert {fault.field for fault in result} == {
        "agent_definition_id",
        "options.name",
        "options.tags.1",
        "options.resource_limits.max_memory_mb",
        "options.restart_policy.max_delay",
        "options.health_check.target",
        "context.a",
    }


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (ResourceLimits(max_memory_mb="512"), "max_memory_mb must be a whole number, was '512'"),  # type: ignore[arg-type]  # wrong on purpose
        (ResourceLimits(max_memory_mb=True), "max_memory_mb must be a whole number, was True"),
        (ResourceLimits(max_memory_mb=512.0), "max_memory_mb must be a whole number, was 512.0"),  # type: ignore[arg-type]  # wrong on purpose
        (ResourceLimits(execution_timeout=60), "execution_timeout must be a duration, was 60"),  # type: ignore[arg-type]  # wrong on purpose
        (ResourceLimits(max_memory_mb=10**5000), "max_memory_mb must be 64 to 8192, was an unprintable int"),
        (RestartPolicy(backoff_multiplier=float("nan")), "backoff_multiplier must be 1.1 to 5.0, was nan"),
        (RestartPolicy(backoff_multiplier=float("inf")), "backoff_multiplier must be 1.1 to 5.0, was inf"),
        (RestartPolicy(use_jitter=1), "use_jitter must be true or false, was 1"),  # type: ignore[arg-type]  # wrong on purpose
        (
            AgentMetrics(sampled_at=NOW, cpu_percent=float("nan")),
            "cpu_percent must be a finite number, was nan",
        ),
        (
            AgentMetrics(sampled_at=datetime(2026, 3, 1)),  # noqa: DTZ001 - the fault in question
            "sampled_at must be a time with its zone, was 2026-03-01T00:00:00",
        ),
        (
            AgentSpawnOptions(priority="urgent"),  # type: ignore[arg-type]  # wrong on purpose
            "priority must be one of low, normal, high, critical, was 'urgent'",
        ),
        (AgentSpawnOptions(priority="high"), "priority must be AgentPriority.HIGH, was 'high'"),  # type: ignore[arg-type]  # wrong on purpose
        (AgentSpawnOptions(tags="abc"), "tags must be a list, was 'abc'"),  # type: ignore[arg-type]  # wrong on purpose
        (AgentSpawnOptions(resource_limits={}), "resource_limits must be of type ResourceLimits, was {}"),  # type: ignore[arg-type]  # wrong on purpose
        (SpawnRequest(agent_definition_id="x"), "agent_definition_id must be a UUID, was 'x'"),  # type: ignore[arg-type]  # wrong on purpose
        (SpawnRequest(agent_definition_id=ID, context=[]), "context must be a mapping, was ()"),  # type: ignore[arg-type]  # wrong on purpose
        (HealthCheckConfig(probe=[]), "probe must be one of heartbeat, custom, http, tcp, command, was []"),  # type: ignore[arg-type]  # wrong on purpose
        (
            HealthCheckConfig(timeout=timedelta(seconds=9)),
            "timeout must be at most the interval (5 s), was 9 s",
        ),
        (TerminationOptions(graceful_timeout=timedelta(milliseconds=500)),
         "graceful_timeout must be 1 s to 5 min, or 0 for at once, was 0.5 s"),
        (GetInstancesFilter(tag="a b"), "tag must be 1 to 50 letters, digits and hyphens, was 'a b'"),
        (GetInstancesFilter(name_pattern="\ud800"),
         "name_pattern must be text without lone surrogates, was '\\ud800'"),
        (task(task=" "), "task must say what is to be done"),
        (task(changed_files=("a\0",)), "changed_files.0 must not contain NUL"),
        (task(branch="\udcff"), "branch must be text without lone surrogates, was '\\udcff'"),
        (task(dependencies=(ID,) * 101), "dependencies must have at most 100 entries, was 101 entries"),
        (
            task(updated_at=datetime(2026, 3, 1)),  # noqa: DTZ001 - the fault in question
            "updated_at must be a time with its zone, was 2026-03-01T00:00:00",
        ),
    ],
)  # fmt: skip
def test_one_fault_is_one_sentence(record: Record, error: str) -> None:
    assert record.validate().errors == (error,)


def test_a_wrong_key_is_named_with_its_mapping() -> None:
    stats = LifecycleStatistics(
        active_instances=0, by_state={"asleep": 1}, by_health={}, max_concurrent=None, total_spawned=0,  # type: ignore[dict-item]  # wrong on purpose
        total_terminated=0, average_uptime=timedelta(0), total_restarts=0,
    )  # fmt: skip
    (error,) = stats.validate().errors
    assert error.startswith("by_state must have only one of initializing, ready")
    assert error.endswith("as keys, was 'asleep'")


@pytest.mark.parametrize("name", ["a", "Ärger in Zeile 3", "Code Review Agent - PR #123", "x" * 200])
def test_a_printable_name_is_good(name: str) -> None:
    assert AgentSpawnOptions(name=name).validate()


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "a\nb", "a\ud800", "\u202eabc", " a", "a "])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    (fault,) = AgentSpawnOptions(name=name).validate()
    assert fault.field == "name"
    assert fault.message.isprintable()


def test_ten_tags_are_the_most() -> None:
    ten = tuple(f"tag-{n}" for n in range(10))
    assert AgentSpawnOptions(tags=ten).validate()
    eleven = AgentSpawnOptions(tags=(*ten, "one-more")).validate()
    assert eleven.errors == ("tags must have at most 10 entries, was 11 entries",)


@pytest.mark.parametrize("tag", ["", "x" * 51, "under_score", "ä", "a\n", "a\0", "\ud800"])
def test_a_tag_is_letters_digits_and_hyphens(tag: str) -> None:
    (fault,) = AgentSpawnOptions(tags=("x" * 50, tag)).validate()
    assert (fault.field, fault.bound) == ("tags.1", "must be 1 to 50 letters, digits and hyphens")


def test_tags_that_differ_by_case_are_one() -> None:
    assert fold_tags(["Web", "API", "web"]) == ("web", "api")
    assert fold_tags(None) == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"max_memory_mbb": 3}', "max_memory_mbb is not a known field; did you mean max_memory_mb?"),
        ('{"colour": 3}', "colour is not a known field"),
        ('{"a\\nb": 3}', "'a\\nb' is not a known field"),
        ('{"max_memory_mb": 1}', "max_memory_mb must be 64 to 8192, was 1"),
        ('{"max_memory_mb": "512"}', "max_memory_mb must be a whole number, was '512'"),
        ('{"execution_timeout": 60}', "execution_timeout must be a duration, was 60"),
        ("[]", "body must be of type ResourceLimits, was []"),
        ("null", "body must be of type ResourceLimits, was None"),
    ],
)
def test_bad_json_is_refused_in_one_sentence(text: str, error: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ResourceLimits.from_json(text)
    assert str(caught.value) == error


@pytest.mark.parametrize("text", ["", "{", b"\xff", '{"a": "\ud800"}', '{"a": "\\ud800"}', "{" * 100_000])
def test_what_is_no_json_is_a_validation_error_too(text: str | bytes) -> None:
    with pytest.raises(ValidationError, match="body must be"):
        ResourceLimits.from_json(text)


def test_unknown_fields_are_found_at_every_depth() -> None:
    options = '{"isolaton_level": "none", "resource_limits": {"max_memory": 3}}'
    text = f'{{"agent_definition_id": "{ID}", "options": {options}}}'
    with pytest.raises(ValidationError) as caught:
        SpawnRequest.from_json(text)
    assert {fault.message for fault in caught.value.faults} == {
        "options.isolaton_level is not a known field; did you mean isolation_level?",
        "options.resource_limits.max_memory is not a known field; did you mean max_memory_mb?",
    }


def test_a_required_field_is_missed() -> None:
    with pytest.raises(ValidationError, match="agent_definition_id is required"):
        SpawnRequest.from_json("{}")


RECORDS = [
    cls for _, cls in inspect.getmembers(model, inspect.isclass) if issubclass(cls, Record) and cls is not Record
]
JUNK = [None, True, -1, 10**5000, float("nan"), "", "\ud800\0", b"x", [], [[]], {}, {1: []}, {"a"}, object(),
        datetime(1, 1, 1), timedelta.max, UUID(int=0), AgentPriority.HIGH, int]  # noqa: DTZ001 - a moment without a zone is junk  # fmt: skip


@given(st.sampled_from(RECORDS), st.lists(st.sampled_from(JUNK), min_size=30, max_size=30))
def test_no_junk_raises_on_construction_or_in_validation(cls: type[Any], junk: list[Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    result = cls(**dict(zip(names, junk, strict=False))).validate()
    assert isinstance(result, ValidationResult)
    for error in result.errors:
        assert error.isprintable()
        assert len(error) < 400
        error.encode()


def test_values_are_shown_short_printable_and_on_one_line() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown("a\nb\0\ud800é") == "'a\\nb\\x00\\ud800\\xe9'"
    assert len(shown("x" * 10**6)) == 60
    assert shown(Rude()) == "an unprintable Rude"
    assert Fault(field="a", bound="is required").message == "a is required"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.5, "0.5 s"), (90, "90 s"), (300, "5 min"), (3600, "1 h"), (3600.001, "3600.001 s")],
)
def test_durations_read_as_a_person_writes_them(seconds: float, text: str) -> None:
    assert duration_text(timedelta(seconds=seconds)) == text


@given(st.text())
def test_cleaned_text_can_be_kept_by_any_store(text: str) -> None:
    cleaned = clean_text(text + "\0\ud800")
    cleaned.encode()
    assert "\0" not in cleaned
    assert clean_text(cleaned) == cleaned


class OfAnotherMake:
    """As numpy's whole numbers are: no int, but good for one."""

    def __index__(self) -> int:
        return 3


def test_a_whole_number_may_be_of_any_make_but_no_flag() -> None:
    assert [whole_number(one) for one in (3, OfAnotherMake(), True, 3.0, "3", None)] == [3, 3, None, None, None, None]
    assert type(whole_number(OfAnotherMake())) is int
