from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from ostler.model import AgentInstance, AgentState, Task, TaskState
from ostler.policy import RetentionPolicy, instance_due, task_due

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)
LONG_AGO = NOW - 400 * DAY
POLICY = RetentionPolicy()


def instance(state: AgentState, ended: datetime | None) -> AgentInstance:
    return AgentInstance(
        instance_id=UUID(int=1),
        definition_id=UUID(int=2),
        state=state,
        created_at=LONG_AGO,
        updated_at=LONG_AGO,
        terminated_at=ended,
    )


def task(state: TaskState, updated: datetime) -> Task:
    return Task(task_id=UUID(int=1), task="t", state=state, created_at=LONG_AGO, updated_at=updated)


@pytest.mark.parametrize("state", AgentState)
def test_only_terminated_and_failed_instances_are_ever_due(state: AgentState) -> None:
    over = {AgentState.TERMINATED, AgentState.FAILED}
    assert instance_due(instance(state, LONG_AGO), NOW, POLICY) == (state in over)


@pytest.mark.parametrize("state", TaskState)
def test_only_decided_tasks_are_ever_due(state: TaskState) -> None:
    over = {TaskState.ACCEPTED, TaskState.REJECTED}
    assert task_due(task(state, LONG_AGO), NOW, POLICY) == (state in over)


def test_a_finished_record_is_kept_for_a_day_counted_from_its_end() -> None:
    young = NOW - DAY + timedelta(microseconds=1)
    assert not instance_due(instance(AgentState.TERMINATED, young), NOW, POLICY)
    assert instance_due(instance(AgentState.TERMINATED, NOW - DAY), NOW, POLICY)
    assert not task_due(task(TaskState.ACCEPTED, young), NOW, POLICY)
    assert task_due(task(TaskState.ACCEPTED, NOW - DAY), NOW, POLICY)


def test_an_end_that_is_not_dated_is_not_due() -> None:
    assert not instance_due(instance(AgentState.TERMINATED, None), NOW, POLICY)


def test_the_defaults_keep_the_audit_for_ever() -> None:
    assert (POLICY.finished, POLICY.events, POLICY.idempotency) == (DAY, 30 * DAY, DAY)
    assert POLICY.audit is None
    assert POLICY.batch == 500


def test_the_policy_is_checked_and_goes_to_json_and_back() -> None:
    assert POLICY.validate()
    assert RetentionPolicy.from_json(POLICY.to_json()) == POLICY
    bad = RetentionPolicy(finished=timedelta(0), events=4000 * DAY, audit=timedelta(0), batch=0)
    assert [fault.field for fault in bad.validate()] == ["finished", "events", "audit", "batch"]
    assert bad.validate().errors[0] == "finished must be 1 min to 87600 h, was 0 s"
