from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import ID, NOW, RECORDS, full

from ostler.errors import ValidationError
from ostler.model.audit import AuditEntry
from ostler.model.events import EVENT_CLASSES, AgentStateChangedEvent
from ostler.model.instance import AgentInstance, AgentMetrics, TerminationResult
from ostler.model.record import Record, adapter
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits, RestartPolicy, SpawnRequest
from ostler.model.states import AgentPriority, AgentState, IsolationLevel, RestartPolicyType
from ostler.model.types import from_micros, micros

S, MIN, H = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


@pytest.mark.parametrize("cls", RECORDS)
def test_every_record_goes_to_json_and_back_with_every_field_set(cls: type[Any]) -> None:
    record = full(cls)
    assert cls.from_json(record.to_json()) == record
    assert cls.from_json(record.to_json().encode()) == record
    assert cls.from_dict(record.to_dict()) == record


@pytest.mark.parametrize("cls", RECORDS)
def test_every_record_is_frozen_keyword_only_and_takes_no_other_attribute(cls: type[Any]) -> None:
    record = full(cls)
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    with pytest.raises(TypeError):
        cls(*(getattr(record, field.name) for field in dataclasses.fields(cls)))
    with pytest.raises((AttributeError, TypeError)):  # CPython 3.11 raises the second for a class with slots
        record.something_else = 1


def test_every_event_has_a_type_of_its_own_and_its_body_leaves_out_what_has_a_column() -> None:
    assert all(name == cls.event_type for name, cls in EVENT_CLASSES.items())
    for cls in EVENT_CLASSES.values():
        event = full(cls)
        again = adapter(cls).validate_json(event.body())
        assert (again.sequence, again.occurred_at, again.correlation_id, again.workspace_id) == (0, None, None, None)
        object.__setattr__(again, "workspace_id", event.workspace_id)
        assert again.stamp(event.sequence, event.occurred_at, event.correlation_id) == event


def test_the_body_of_an_event_holds_only_what_is_not_the_default() -> None:
    event = AgentStateChangedEvent(instance_id=ID, previous_state=AgentState.READY, new_state=AgentState.PROCESSING)
    assert event.body() == f'{{"instance_id":"{ID}","previous_state":"ready","new_state":"processing"}}'


def test_an_audit_entry_is_hashed_over_everything_but_its_hash() -> None:
    entry: AuditEntry = full(AuditEntry)
    assert entry.evolve(hash="x").computed_hash == entry.computed_hash
    for field in dataclasses.fields(entry):
        if field.name != "hash":
            value: Any = getattr(entry, field.name)
            other = {str: "other", int: 99, UUID: UUID(int=8), datetime: NOW + S}[type(value)]
            assert entry.evolve(**{field.name: other}).computed_hash != entry.computed_hash


def test_words_cannot_move_between_the_fields_of_an_audit_entry() -> None:
    entry: AuditEntry = full(AuditEntry)
    pairs = [
        (entry.evolve(actor='a","b', action="c"), entry.evolve(actor="a", action='b","c')),
        (entry.evolve(detail=None, correlation_id="null"), entry.evolve(detail="null", correlation_id=None)),
    ]
    for one, other in pairs:
        assert one.computed_hash != other.computed_hash


moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - the strategy wants them without a zone, and adds it
durations = st.timedeltas(timedelta(0), timedelta(days=36500))
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
names = st.text("abc XYZ-09äß漢", min_size=1, max_size=200).filter(lambda name: name == name.strip())
tags = st.lists(st.text("abcXYZ019-", min_size=1, max_size=50), max_size=10).map(tuple)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
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
    env=st.none() | st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,9}", fullmatch=True), texts, max_size=3),
)
instances = st.builds(
    AgentInstance,
    instance_id=st.uuids(),
    definition_id=st.uuids(),
    workspace_id=st.uuids(),
    state=st.sampled_from(AgentState),
    metrics=st.none() | st.builds(AgentMetrics, sampled_at=moments, cpu_percent=st.floats(0, 100)),
    created_at=moments,
    updated_at=moments,
    terminated_at=st.none() | moments,
    error_message=st.none() | texts,
    spawn_options=st.none() | options,
    context=st.none() | contexts,
    downtime=durations,
    tags=tags,
)
requests = st.builds(
    SpawnRequest,
    agent_definition_id=st.uuids().filter(lambda value: value.int != 0) | names,
    options=st.none() | options,
    context=st.none() | contexts,
)


@given(st.one_of(requests, instances, policies))
def test_any_good_record_is_valid_and_comes_back_from_json_the_same(record: Record) -> None:
    assert record.validate().errors == ()
    assert record.checked() == record
    assert type(record).from_json(record.to_json()) == record


# --- times -------------------------------------------------------------------------------------------


def test_the_hour_that_comes_twice_is_two_hours() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert micros(first.replace(fold=1)) - micros(first) == 3600 * 1_000_000


@pytest.mark.parametrize("zone", [ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=-9, minutes=-30))], ids=str)
def test_a_time_of_another_zone_is_checked_into_utc(zone: tzinfo) -> None:
    record = AgentMetrics(sampled_at=NOW.astimezone(zone))
    assert record.sampled_at.tzinfo is zone, "making a record changes nothing"
    checked = record.checked()
    assert (checked.sampled_at, checked.sampled_at.tzinfo) == (NOW, UTC)
    assert '"sampled_at":"2026-03-01T12:30:15.123456Z"' in checked.to_json()
    for text in (record.to_json(), checked.to_json(), '{"sampled_at": "2026-03-01T14:30:15.123456+02:00"}'):
        back = AgentMetrics.from_json(text).sampled_at
        assert (back, back.tzinfo, back.isoformat()) == (NOW, UTC, "2026-03-01T12:30:15.123456+00:00")


def test_the_hour_that_comes_twice_stays_two_hours_in_json() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    read = [AgentMetrics.from_json(AgentMetrics(sampled_at=one).to_json()) for one in (first, first.replace(fold=1))]
    assert [one.sampled_at.hour for one in read] == [0, 1]


def test_writing_a_time_without_a_zone_does_not_raise_and_reading_it_is_refused() -> None:
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
