from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import RECORDS

from ostler.errors import ValidationError
from ostler.model.access import HOME_WORKSPACE_ID, Actor, Principal, Token, Workspace
from ostler.model.instance import AgentMetrics
from ostler.model.query import GetInstancesFilter, LifecycleStatistics
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
from ostler.model.states import AgentPriority, ProbeType, Tier
from ostler.model.text import clean_text, clipped, fold_tags
from ostler.model.validation import Fault, ValidationResult, shown
from ostler.model.wait import Wait, WaitKind

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ID = UUID(int=7)
WAIT = Wait(wait_id=ID, workspace_id=ID, kind=WaitKind.HUMAN, created_at=NOW)
WORKSPACE = Workspace(workspace_id=ID, name="w", tier=Tier.TEAMS, created_at=NOW)
PRINCIPAL = Principal(principal_id=ID, name="p", workspace_id=HOME_WORKSPACE_ID, created_at=NOW)
TOKEN = Token(token_id=ID, principal_id=ID, token_hash="ab", name="t", created_at=NOW)  # noqa: S106 - made up
REQUEST = SpawnRequest(agent_definition_id=ID)
METRICS = AgentMetrics(sampled_at=NOW)
ACTOR = Actor(name="ada")
DEFINITION = Definition(definition_id=ID, name="d", kind="k", manifest={}, created_at=NOW, updated_at=NOW)


def test_all_faults_come_at_once_with_field_bound_and_value() -> None:
    result = ResourceLimits(
        max_memory_mb=1,
        max_cpu_percent=-1,
        execution_timeout=timedelta(days=8),
        max_worker_threads=0,
        max_concurrent_tasks=1000,
    ).validate()
    assert not result
    assert not result.is_valid
    assert result.value is None
    assert [(fault.field, fault.bound, fault.value) for fault in result] == [
        ("max_memory_mb", "must be 64 to 16777216", "1"),
        ("max_cpu_percent", "must be 0 to 102400", "-1"),
        ("execution_timeout", "must be 1 s to 7 d", "8 d"),
        ("max_worker_threads", "must be 1 to 32", "0"),
        ("max_concurrent_tasks", "must be 1 to 100", "1000"),
    ]
    assert result.errors[0] == "max_memory_mb must be 64 to 16777216, was 1"
    with pytest.raises(ValidationError) as caught:
        result.require()
    assert caught.value.faults == result.faults


def test_a_request_lists_the_faults_of_everything_inside_it() -> None:
    """Faults of single fields and of the relations between them, all at once."""
    request = SpawnRequest(
        agent_definition_id=UUID(int=0),
        options=AgentSpawnOptions(
            name="two\nlines",
            tags=("ok", "not ok"),
            resource_limits=ResourceLimits(max_memory_mb=1),
            restart_policy=RestartPolicy(initial_delay=timedelta(minutes=2), max_retries=11),
            health_check=HealthCheckConfig(probe=ProbeType.HTTP),
        ),
        context={"A": 1, "a": 2},
    )
    assert {fault.field for fault in request.validate()} == {
        "agent_definition_id",
        "options.name",
        "options.tags.1",
        "options.resource_limits.max_memory_mb",
        "options.restart_policy.max_delay",
        "options.restart_policy.max_retries",
        "options.health_check.target",
        "context.a",
    }


def test_a_field_of_a_wrong_type_is_one_fault_and_hides_no_other() -> None:
    wrong: Any = 5
    options = AgentSpawnOptions(name=wrong, workdir="here", tags=("a b",), resource_limits=wrong)
    assert [fault.field for fault in options.validate()].count("name") == 1
    assert {fault.field for fault in options.validate()} == {"name", "workdir", "tags.0", "resource_limits"}


@pytest.mark.parametrize(
    ("record", "changes", "error"),
    [
        (ResourceLimits(), {"max_memory_mb": "many"}, "max_memory_mb must be a whole number, was 'many'"),
        (ResourceLimits(), {"max_memory_mb": 512.5}, "max_memory_mb must be a whole number, was 512.5"),
        (ResourceLimits(), {"max_memory_mb": 10**5000}, "max_memory_mb must be 64 to 16777216, was an unprintable int"),
        (
            ResourceLimits(),
            {"execution_timeout": "soon"},
            "execution_timeout must be a duration such as 30s, was 'soon'",
        ),
        (
            ResourceLimits(),
            {"execution_timeout": "9999999999d"},
            "execution_timeout must be 1 s to 7 d, was '9999999999d'",
        ),
        (
            ResourceLimits(),
            {"execution_timeout": 10**400},
            "execution_timeout must be a duration such as 30s, was 1000000000…",
        ),
        (ResourceLimits(), {"max_memory_mb": "9" * 400 + "G"}, "max_memory_mb must be 64 to 16777216, was '999999999…"),
        (RestartPolicy(), {"backoff_multiplier": float("nan")}, "backoff_multiplier must be a finite number, was nan"),
        (RestartPolicy(), {"backoff_multiplier": float("inf")}, "backoff_multiplier must be a finite number, was inf"),
        (RestartPolicy(), {"use_jitter": 7}, "use_jitter must be true or false, was 7"),
        (METRICS, {"cpu_percent": float("nan")}, "cpu_percent must be a finite number, was nan"),
        (
            METRICS,
            {"sampled_at": datetime(2026, 3, 1)},  # noqa: DTZ001 - the fault in question
            "sampled_at must be a time with its zone, was 2026-03-01T00:00:00",
        ),
        (
            AgentSpawnOptions(),
            {"priority": "urgent"},
            "priority must be one of low, normal, high, critical, was 'urgent'",
        ),
        (AgentSpawnOptions(), {"tags": "abc"}, "tags must be a list, was 'abc'"),
        (AgentSpawnOptions(), {"resource_limits": 5}, "resource_limits must be a ResourceLimits, was 5"),
        (
            AgentSpawnOptions(),
            {"restart_policy": "sometimes"},
            "restart_policy must be a restart policy, or one of none, immediate, linear, exponential, on-failure:N, …",
        ),
        (AgentSpawnOptions(), {"workdir": "work"}, "workdir must be an absolute path, was 'work'"),
        (AgentSpawnOptions(), {"workdir": "/a\x00"}, "workdir must not contain NUL"),
        (AgentSpawnOptions(), {"env": {"a b": "1"}}, "env must name variables by letters, digits and _, was 'a b'"),
        (AgentSpawnOptions(), {"env": {"A": "\x00"}}, "env.A must not contain NUL"),
        (REQUEST, {"agent_definition_id": 5}, "agent_definition_id must be the id or the name of a definition, was 5"),
        (REQUEST, {"agent_definition_id": ""}, "agent_definition_id must name a definition"),
        (
            REQUEST,
            {"agent_definition_id": "\ud800"},
            "agent_definition_id must be text without lone surrogates, was '\\ud800'",
        ),
        (REQUEST, {"context": []}, "context must be a mapping, was []"),
        (REQUEST, {"crew": "\n"}, "crew must be printable text on one line, was '\\n'"),
        (HealthCheckConfig(), {"probe": []}, "probe must be one of heartbeat, custom, http, tcp, command, was []"),
        (HealthCheckConfig(), {"timeout": timedelta(seconds=9)}, "timeout must be at most the interval (5 s), was 9 s"),
        (
            TerminationOptions(),
            {"graceful_timeout": timedelta(milliseconds=500)},
            "graceful_timeout must be 1 s to 5 min, or 0 for at once, was 0.5 s",
        ),
        (GetInstancesFilter(), {"tag": "a b"}, "tag must be 1 to 50 letters, digits and hyphens, was 'a b'"),
        (GetInstancesFilter(), {"before": 1}, "before must be a UUID, was 1"),
        (
            GetInstancesFilter(),
            {"name_pattern": "\ud800"},
            "name_pattern must be text without lone surrogates, was '\\ud800'",
        ),
        (WORKSPACE, {"name": ""}, "name must have 1 to 200 characters, was 0 characters"),
        (WORKSPACE, {"tier": "gold"}, "tier must be one of core, writer_pro, teams, enterprise, was 'gold'"),
        (
            PRINCIPAL,
            {"roles": ("king",)},
            "roles.0 must be one of viewer, operator, reviewer, admin, agent, was 'king'",
        ),
        (ACTOR, {"correlation_id": "a\nb"}, "correlation_id must be printable text on one line, was 'a\\nb'"),
        (TOKEN, {"name": "a\x00"}, "name must be printable text on one line, was 'a\\x00'"),
        (WAIT, {"reason": "a\x00"}, "reason must not contain NUL"),
        (WAIT, {"detail": {"a": {1, 2}}}, "detail.a must be a JSON value, was {1, 2}"),
        (
            WAIT,
            {"answer": {"a": "x" * 2**20}},
            "answer must be at most 256 KiB as JSON; pass a path to larger data, was 1024 KiB",
        ),
        (DEFINITION, {"source": "\ud800"}, "source must be text without lone surrogates, was '\\ud800'"),
    ],
)
def test_one_fault_is_one_sentence(record: Record, changes: dict[str, Any], error: str) -> None:
    record = record.evolve(**changes)
    (said,) = record.validate().errors
    assert said == error or (error.endswith("…") and said.startswith(error[:-1]))
    with pytest.raises(ValidationError):
        record.checked()


def test_a_wrong_key_is_named_with_its_mapping() -> None:
    stats = LifecycleStatistics(
        active_instances=0,
        by_state={"asleep": 1},  # type: ignore[dict-item]  # wrong on purpose
        by_health={},
        max_concurrent=None,
        total_spawned=0,
        total_terminated=0,
        average_uptime=timedelta(0),
        total_restarts=0,
    )
    (error,) = stats.validate().errors
    assert error.startswith("by_state must have only one of initializing, ready")
    assert error.endswith("as keys, was 'asleep'")


# --- text --------------------------------------------------------------------------------------------


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


@given(st.text())
def test_cleaned_text_can_be_kept_by_any_store(text: str) -> None:
    cleaned = clean_text(text + "\0\ud800")
    cleaned.encode()
    assert "\0" not in cleaned
    assert clean_text(cleaned) == cleaned


def test_text_that_is_too_long_is_cut_and_says_so() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abc\0d", 3) == "abc… (2 more characters)"
    assert clipped("\0\ud800", 3) == "\ufffd?"


# --- JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"max_memory_mbb": 3}', "max_memory_mbb is not a known field; did you mean max_memory_mb?"),
        ('{"colour": 3}', "colour is not a known field"),
        ('{"a\\nb": 3}', "'a\\nb' is not a known field"),
        ('{"max_memory_mb": 1}', "max_memory_mb must be 64 to 16777216, was 1"),
        ('{"max_memory_mb": "many"}', "max_memory_mb must be a whole number, was 'many'"),
        ('{"execution_timeout": []}', "execution_timeout must be a duration such as 30s, was []"),
        ("[]", "body must be a ResourceLimits, was []"),
        ("null", "body must be a ResourceLimits, was None"),
    ],
)
def test_bad_json_is_refused_in_one_sentence(text: str, error: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ResourceLimits.from_json(text)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    "text", ["", "{", b"\xff", '{"a": "\ud800"}', '{"a": "\\ud800"}', "{" * 100_000, '{"max_memory_mb": NaN}']
)
def test_what_is_no_json_is_a_validation_error_too(text: str | bytes) -> None:
    with pytest.raises(ValidationError, match="ResourceLimits must be valid JSON"):
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


# --- junk --------------------------------------------------------------------------------------------

JUNK = [
    None, True, -1, 10**5000, float("nan"), "", "\ud800\0", b"x", [], [[]], {}, {1: []}, {"a"}, object(), int,
    datetime(2026, 3, 1), timedelta.max, UUID(int=0), AgentPriority.HIGH, "99999999999999999999d", "9" * 500 + "G",  # noqa: DTZ001 - a moment without a zone is junk
]  # fmt: skip


MOST_FIELDS = max(len(dataclasses.fields(cls)) for cls in RECORDS)


@given(st.sampled_from(RECORDS), st.lists(st.sampled_from(JUNK), min_size=MOST_FIELDS, max_size=MOST_FIELDS))
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
