from __future__ import annotations

import dataclasses
import inspect
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler import model
from ostler.errors import ValidationError
from ostler.model import (
    AgentInstance,
    AgentMetrics,
    AgentPriority,
    AgentSpawnOptions,
    AgentState,
    AuditEntry,
    Enforcement,
    HealthState,
    IsolationLevel,
    Permission,
    Record,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
    Role,
    SpawnRequest,
    Task,
    TerminationResult,
    codec,
    event_from_json,
    from_micros,
    micros,
)

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
ID = UUID(int=7)
MS, S, MIN, H, D = (timedelta(milliseconds=1), timedelta(seconds=1), timedelta(minutes=1),
                    timedelta(hours=1), timedelta(days=1))  # fmt: skip

SAMPLES: dict[str, Any] = {
    "UUID": ID, "str": "text", "int": 3, "float": 1.5, "bool": True, "Moment": NOW, "datetime": NOW,
    "timedelta": 90 * S, "tuple[str, ...]": ("a", "b"), "tuple[UUID, ...]": (ID,),
    "tuple[Role, ...]": (Role.ADMIN,), "tuple[Permission, ...]": (Permission.AUDIT_READ,),
    "Mapping[str, Any]": {"Key": [1, None, {"b": "é"}]},
    "Mapping[str, float]": {"files read": 12.5},
    "Mapping[str, Enforcement]": {"memory": Enforcement.ADVISORY},
    "Mapping[AgentState, int]": {AgentState.READY: 1}, "Mapping[HealthState, int]": {HealthState.UNKNOWN: 2},
}  # fmt: skip
RECORDS: list[type[Any]] = [
    cls for _, cls in inspect.getmembers(model, inspect.isclass) if issubclass(cls, Record) and cls is not Record
]


def sample(annotation: str) -> Any:
    """A value that is not the default, from the text of an annotation."""
    kind = annotation.removesuffix(" | None")
    if kind.startswith("Annotated["):
        kind = kind.removeprefix("Annotated[").split(",")[0].strip()
    if kind in SAMPLES:
        return SAMPLES[kind]
    cls = getattr(model, kind)
    return full(cls) if issubclass(cls, Record) else list(cls)[-1]


def full(cls: type[Any]) -> Any:
    """A record with every field set."""
    values = {field.name: sample(str(field.type)) for field in dataclasses.fields(cls)}
    if cls is ResourceLimits:
        values["max_memory_mb"] = 64
    return cls(**values)


@pytest.mark.parametrize("cls", RECORDS)
def test_every_record_goes_to_json_and_back_with_every_field_set(cls: type[Any]) -> None:
    record = full(cls)
    assert cls.from_json(record.to_json()) == record
    assert cls.from_json(record.to_json().encode()) == record


@pytest.mark.parametrize("cls", RECORDS)
def test_every_record_is_frozen_keyword_only_and_without_room_for_more(cls: type[Any]) -> None:
    record = full(cls)
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    with pytest.raises(TypeError):
        cls(*(getattr(record, field.name) for field in dataclasses.fields(cls)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.something_else = 1


@pytest.mark.parametrize("cls", RECORDS)
def test_every_record_is_named_in_its_package(cls: type[Any]) -> None:
    assert cls.__name__ in model.__all__


def test_the_package_exports_what_it_says_in_order() -> None:
    assert all(hasattr(model, name) for name in model.__all__)
    assert sorted(model.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)) == model.__all__


@pytest.mark.parametrize("cls", model.EVENT_CLASSES.values())
def test_every_event_is_found_again_by_its_type(cls: type[Any]) -> None:
    event = full(cls)
    assert event_from_json(cls.event_type, event.to_json()) == event


def test_an_event_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"event_type must be one of agent_attempt_started, agent_error, .*, was 'agent_slept'"
    ):
        event_from_json("agent_slept", "{}")


def test_an_audit_entry_is_hashed_over_everything_but_its_hash() -> None:
    entry: AuditEntry = full(AuditEntry)
    assert entry.evolve(hash="x").computed_hash == entry.computed_hash
    for field in dataclasses.fields(entry):
        if field.name != "hash":
            value: Any = getattr(entry, field.name)
            other = {str: "other", int: 99, UUID: UUID(int=8), datetime: NOW + S}[type(value)]
            assert entry.evolve(**{field.name: other}).computed_hash != entry.computed_hash


moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - the strategy wants them without a zone, and adds it
durations = st.timedeltas(timedelta(0), timedelta(days=36500))
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
names = st.text("abc XYZ-09äß漢", min_size=1, max_size=200).filter(lambda name: name == name.strip())
tags = st.lists(st.text("abcXYZ019-", min_size=1, max_size=50), max_size=10).map(tuple)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
contexts = st.dictionaries(texts.map(str.casefold), values, max_size=5)
policies = st.builds(
    RestartPolicy,
    type=st.sampled_from(RestartPolicyType),
    max_retries=st.integers(0, 10),
    initial_delay=st.timedeltas(timedelta(0), MIN),
    max_delay=st.timedeltas(MIN, 10 * MIN),
    backoff_multiplier=st.floats(1.1, 5.0),
    use_jitter=st.booleans(),
)
options = st.builds(
    AgentSpawnOptions,
    initialization_timeout=st.timedeltas(S, H),
    resource_limits=st.none() | st.builds(ResourceLimits, execution_timeout=st.timedeltas(S, H)),
    isolation_level=st.sampled_from(IsolationLevel),
    restart_policy=st.none() | policies,
    name=st.none() | names,
    tags=st.none() | tags,
    priority=st.sampled_from(AgentPriority),
)
instances = st.builds(
    AgentInstance,
    instance_id=st.uuids(),
    definition_id=st.uuids(),
    state=st.sampled_from(AgentState),
    metrics=st.none() | st.builds(AgentMetrics, sampled_at=moments, cpu_percent=st.floats(0, 100)),
    created_at=moments,
    updated_at=moments,
    terminated_at=st.none() | moments,
    error_message=st.none() | texts,
    spawn_options=st.none() | options,
    context=st.none() | contexts,
    tags=tags,
)
tasks = st.builds(
    Task,
    task_id=st.uuids(),
    task=names,
    created_at=moments,
    updated_at=moments,
    generated_code=st.none() | texts,
    changed_files=st.lists(texts, max_size=3).map(tuple),
    tags=tags,
)
requests = st.builds(
    SpawnRequest,
    agent_definition_id=st.uuids().filter(lambda value: value.int != 0),
    options=st.none() | options,
    context=st.none() | contexts,
)


@given(st.one_of(requests, instances, tasks, policies))
def test_any_good_record_is_valid_and_comes_back_from_json_the_same(record: Record) -> None:
    assert record.validate().errors == ()
    assert type(record).from_json(record.to_json()) == record
    assert type(record).from_json(codec.dump_compact(record)) == record


def test_the_hour_that_comes_twice_is_two_hours() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert micros(first.replace(fold=1)) - micros(first) == 3600 * 1_000_000


@pytest.mark.parametrize("zone", [ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=-9, minutes=-30))], ids=str)
def test_a_time_of_another_zone_is_written_and_read_as_utc(zone: tzinfo) -> None:
    record = AgentMetrics(sampled_at=NOW.astimezone(zone))
    assert record.validate().errors == ()
    assert record.sampled_at.tzinfo is zone, "making a record changes nothing"
    for text in (record.to_json(), codec.dump_compact(record)):
        assert '"sampled_at":"2026-03-01T12:30:15.123456Z"' in text
        back = AgentMetrics.from_json(text)
        assert (back.sampled_at, back.sampled_at.tzinfo) == (NOW, UTC)
    foreign = AgentMetrics.from_json('{"sampled_at": "2026-03-01T14:30:15.123456+02:00"}').sampled_at
    assert (foreign, foreign.tzinfo, foreign.isoformat()) == (NOW, UTC, "2026-03-01T12:30:15.123456+00:00")


def test_the_hour_that_comes_twice_stays_two_hours_in_json() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    texts = [AgentMetrics(sampled_at=moment).to_json() for moment in (first, first.replace(fold=1))]
    assert [text[15:37] for text in texts] == ['2026-10-25T00:30:00Z",', '2026-10-25T01:30:00Z",']


def test_writing_a_time_that_cannot_be_utc_does_not_raise() -> None:
    naive, first = datetime(2026, 3, 1), datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))  # noqa: DTZ001 - without its zone on purpose
    for moment in (naive, first):
        record = AgentMetrics(sampled_at=moment)
        assert f'"sampled_at":"{moment.isoformat()}"' in record.to_json()
        assert not record.validate().is_valid
        with pytest.raises(ValidationError, match="sampled_at must be"):
            AgentMetrics.from_json(record.to_json())


@given(moments, durations)
def test_times_are_kept_to_the_microsecond(moment: datetime, duration: timedelta) -> None:
    assert from_micros(micros(moment)) == moment
    result = TerminationResult(success=True, was_graceful=True, duration=duration)
    assert TerminationResult.from_json(result.to_json()).duration == duration
