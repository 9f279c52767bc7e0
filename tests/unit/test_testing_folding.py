from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from ostler.model import (
    HOME_WORKSPACE_ID,
    AgentAttemptStartedEvent,
    AgentHealthChangedEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentRestartingEvent,
    AgentSpawnedEvent,
    AgentState,
    AgentStateChangedEvent,
    Event,
    HealthState,
    Task,
    TaskCreatedEvent,
    TaskState,
    TaskStateChangedEvent,
    TaskUpdatedEvent,
)
from ostler.testing import fold
from ostler.testing.folding import (
    fold_tasks,
    instance_faults,
    move_faults,
    quota_faults,
    sequence_faults,
    task_faults,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
ONE, OTHER = UUID(int=1), UUID(int=2)


def common(sequence: int, instance_id: UUID, version: int, attempt: int = 1) -> dict[str, object]:
    return {
        "occurred_at": NOW,
        "sequence": sequence,
        "instance_id": instance_id,
        "workspace_id": HOME_WORKSPACE_ID,
        "version": version,
        "attempt": attempt,
    }


def spawned(sequence: int, instance_id: UUID = ONE) -> Event:
    return AgentSpawnedEvent(**common(sequence, instance_id, 1), definition_id=OTHER, user_id=None)  # type: ignore[arg-type]  # the shared fields come as keywords


def changed(sequence: int, version: int, new: AgentState, old: AgentState = AgentState.READY) -> Event:
    return AgentStateChangedEvent(**common(sequence, ONE, version), previous_state=old, new_state=new)  # type: ignore[arg-type]  # the shared fields come as keywords


def back(sequence: int, version: int, attempt: int) -> Event:
    fields = common(sequence, ONE, version, attempt)
    return AgentStateChangedEvent(**fields, previous_state=AgentState.FAILED, new_state=AgentState.INITIALIZING)  # type: ignore[arg-type]  # the shared fields come as keywords


LIFE: list[Event] = [
    spawned(1),
    changed(2, 2, AgentState.FAILED),
    AgentRestartingEvent(**common(3, ONE, 2), attempt_number=7, max_attempts=9),  # type: ignore[arg-type]  # the shared fields come as keywords
    back(4, 3, 2),
    AgentHealthChangedEvent(
        **common(5, ONE, 4, 2),  # type: ignore[arg-type]  # the shared fields come as keywords
        previous_health=HealthState.UNKNOWN,
        new_health=HealthState.DEGRADED,
    ),
]
RECORD = AgentInstance(
    instance_id=ONE,
    definition_id=OTHER,
    state=AgentState.INITIALIZING,
    health=AgentHealthStatus(state=HealthState.DEGRADED),
    created_at=NOW,
    updated_at=NOW,
    restart_count=1,
    attempt=2,
    version=4,
)


def test_a_folded_life_is_what_the_record_says() -> None:
    assert sequence_faults(LIFE) == []
    assert instance_faults(fold(LIFE), [RECORD]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": AgentState.READY},
        {"version": 5},
        {"attempt": 1},
        {"restart_count": 0},
        {"health": AgentHealthStatus(state=HealthState.HEALTHY)},
    ],
)
def test_each_difference_between_log_and_table_is_found(wrong: dict[str, object]) -> None:
    (fault,) = instance_faults(fold(LIFE), [RECORD.evolve(**wrong)])
    assert next(iter(wrong)) in fault


def test_a_new_start_of_a_parked_one_is_not_looked_at_yet() -> None:
    started = AgentAttemptStartedEvent(**common(6, ONE, 5, 3))  # type: ignore[arg-type]  # the shared fields come as keywords
    record = RECORD.evolve(health=AgentHealthStatus(), version=5, attempt=3)
    assert instance_faults(fold([*LIFE, started]), [record]) == []


def test_gaps_doubles_and_falling_versions_are_found() -> None:
    assert sequence_faults([spawned(1), changed(3, 2, AgentState.READY)]) == ["event 2 should come next, 3 does"]
    assert len(sequence_faults([spawned(1), spawned(1)])) == 1
    assert (
        "back to 1"
        in sequence_faults([spawned(1), changed(2, 5, AgentState.READY), changed(3, 1, AgentState.READY)])[0]
    )
    assert sequence_faults([spawned(8)], after=7) == []


def test_one_too_many_at_any_moment_is_found_even_if_it_passes() -> None:
    log = [spawned(1), spawned(2, OTHER), changed(3, 2, AgentState.FAILED), changed(4, 3, AgentState.INITIALIZING)]
    assert quota_faults(log, HOME_WORKSPACE_ID, 2) == []
    assert [fault.split(" ")[2] for fault in quota_faults(log, HOME_WORKSPACE_ID, 1)] == ["2", "4"]
    assert quota_faults(log, OTHER, 0) == []


# --- moves --------------------------------------------------------------------------------------------

_A, _T = AgentState, TaskState


def task_moved(sequence: int, version: int, old: TaskState, new: TaskState) -> Event:
    return TaskStateChangedEvent(
        occurred_at=NOW, sequence=sequence, task_id=ONE, version=version, previous_state=old, new_state=new
    )


CREATED = TaskCreatedEvent(occurred_at=NOW, sequence=1, task_id=ONE, version=1, task="mend the gate")
WORK: list[Event] = [
    CREATED,
    task_moved(2, 2, _T.QUEUED, _T.RUNNING),
    task_moved(3, 3, _T.RUNNING, _T.QUEUED),
    task_moved(4, 4, _T.QUEUED, _T.RUNNING),
    TaskUpdatedEvent(occurred_at=NOW, sequence=5, task_id=ONE, version=5, changed=("branch",)),
]
TASK = Task(task_id=ONE, task="mend the gate", state=_T.RUNNING, created_at=NOW, updated_at=NOW, attempt=2, version=5)


def test_a_legal_history_has_no_faults() -> None:
    frozen = [changed(3, 3, _A.PROCESSING, _A.READY), changed(4, 4, _A.SUSPENDED, _A.PROCESSING)]
    thawed = [changed(5, 5, _A.PROCESSING, _A.SUSPENDED), changed(6, 6, _A.WAITING, _A.PROCESSING)]
    assert move_faults([spawned(1), changed(2, 2, _A.READY, _A.INITIALIZING), *frozen, *thawed]) == []
    assert move_faults(WORK) == []
    assert task_faults(fold_tasks(WORK), [TASK]) == []
    assert move_faults([changed(7, 9, _A.TERMINATED, _A.TERMINATING)]) == [], "its beginning is no longer kept"


def test_a_move_that_the_tables_do_not_have_is_found() -> None:
    assert move_faults([spawned(1), changed(2, 2, _A.WAITING, _A.INITIALIZING)]) == [
        f"event 2 moves instance {ONE} from initializing to waiting, which is no legal move"
    ]
    assert move_faults([CREATED, task_moved(2, 2, _T.QUEUED, _T.ACCEPTED)]) == [
        f"event 2 moves task {ONE} from queued to accepted, which is no legal move"
    ]


def test_a_move_that_begins_elsewhere_than_the_last_ended_is_found() -> None:
    assert move_faults([spawned(1), changed(2, 2, _A.PROCESSING, _A.READY)]) == [
        f"event 2 moves instance {ONE} from ready to processing, but it was initializing"
    ]
    assert move_faults([CREATED, task_moved(2, 2, _T.RUNNING, _T.COMPLETED)]) == [
        f"event 2 moves task {ONE} from running to completed, but it was queued"
    ]


@pytest.mark.parametrize("wrong", [{"state": _T.QUEUED}, {"version": 4}, {"attempt": 1}])
def test_each_difference_between_log_and_task_is_found(wrong: dict[str, object]) -> None:
    (fault,) = task_faults(fold_tasks(WORK), [TASK.evolve(**wrong)])
    assert next(iter(wrong)) in fault
