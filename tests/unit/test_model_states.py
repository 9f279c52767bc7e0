from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import UUID

import pytest

from ostler.model import (
    ACTIVE_STATES,
    AGENT_TRANSITIONS,
    FINISHED_TASK_STATES,
    INACTIVE_STATES,
    TASK_TRANSITIONS,
    AgentInstance,
    AgentPriority,
    AgentState,
    AgentStateTransitions,
    HealthState,
    IsolationLevel,
    RestartPolicyType,
    Task,
    TaskState,
    TaskStateTransitions,
    Tier,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)

#: The tables of the design, written here a second time and as text.
AGENT_MOVES = {
    "initializing": "ready failed terminating",
    "ready": "processing suspended terminating failed",
    "processing": "waiting failed terminating",
    "waiting": "processing suspended terminating failed",
    "suspended": "ready terminating failed",
    "terminating": "terminated",
    "failed": "initializing terminated",
    "terminated": "",
}
FREEZE_MOVES = {("processing", "suspended"), ("suspended", "processing")}
TASK_MOVES = {
    "queued": "running",
    "running": "completed queued rejected",
    "completed": "accepted rejected queued",
    "accepted": "",
    "rejected": "",
}


def legal(moves: Mapping[str, str], current: str, target: str) -> bool:
    return target in moves[current].split()


@pytest.mark.parametrize(("current", "target"), list(itertools.product(AgentState, repeat=2)))
def test_an_instance_makes_only_the_moves_of_the_design(current: AgentState, target: AgentState) -> None:
    expected = legal(AGENT_MOVES, current.value, target.value)
    assert AgentStateTransitions.is_valid(current, target) == expected
    instance = AgentInstance(
        instance_id=UUID(int=1), definition_id=UUID(int=2), state=current, created_at=NOW, updated_at=NOW
    )
    assert instance.can_transition_to(target) == expected


@pytest.mark.parametrize(("current", "target"), list(itertools.product(AgentState, repeat=2)))
def test_freezing_adds_two_moves_and_no_more(current: AgentState, target: AgentState) -> None:
    expected = legal(AGENT_MOVES, current, target) or (current.value, target.value) in FREEZE_MOVES
    assert AgentStateTransitions.is_valid(current, target, freezing=True) == expected


@pytest.mark.parametrize(("current", "target"), list(itertools.product(TaskState, repeat=2)))
def test_a_task_makes_only_the_moves_of_the_design(current: TaskState, target: TaskState) -> None:
    expected = legal(TASK_MOVES, current.value, target.value)
    assert TaskStateTransitions.is_valid(current, target) == expected
    task = Task(task_id=UUID(int=1), task="t", state=current, created_at=NOW, updated_at=NOW)
    assert task.can_transition_to(target) == expected


def test_every_state_has_a_row() -> None:
    assert set(AGENT_TRANSITIONS) == set(AgentState) == {AgentState(name) for name in AGENT_MOVES}
    assert set(TASK_TRANSITIONS) == set(TaskState) == {TaskState(name) for name in TASK_MOVES}


def test_no_instance_can_be_stuck_while_it_is_active() -> None:
    """From every active state it can be ended in a step or two, and a live one can always be seen to fail."""
    for state in ACTIVE_STATES - {AgentState.TERMINATING}:
        assert AgentStateTransitions.is_valid(state, AgentState.TERMINATING)
        assert AgentStateTransitions.is_valid(state, AgentState.FAILED)
    assert AgentStateTransitions.is_valid(AgentState.TERMINATING, AgentState.TERMINATED)


def test_only_terminated_and_failed_are_inactive() -> None:
    assert {AgentState.TERMINATED, AgentState.FAILED} == INACTIVE_STATES
    assert frozenset(AgentState) == ACTIVE_STATES | INACTIVE_STATES
    assert not ACTIVE_STATES & INACTIVE_STATES


def test_only_accepted_and_rejected_tasks_are_finished() -> None:
    assert {TaskState.ACCEPTED, TaskState.REJECTED} == FINISHED_TASK_STATES
    assert all(not TASK_TRANSITIONS[state] for state in FINISHED_TASK_STATES)


def test_the_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        AGENT_TRANSITIONS[AgentState.TERMINATED] = frozenset()  # type: ignore[index]  # wrong on purpose
    with pytest.raises(TypeError):
        TASK_TRANSITIONS[TaskState.ACCEPTED] = frozenset()  # type: ignore[index]  # wrong on purpose


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (IsolationLevel, "none thread process container"),
        (AgentPriority, "low normal high critical"),
        (RestartPolicyType, "none immediate linear exponential"),
        (Tier, "core writer_pro teams enterprise"),
    ],
)
def test_ranked_values_carry_the_numbers_of_the_seed(
    values: type[IsolationLevel | AgentPriority | RestartPolicyType | Tier], names: str
) -> None:
    assert [value.value for value in values] == names.split()
    assert [value.rank for value in values] == [0, 1, 2, 3]


def test_health_has_four_states() -> None:
    assert [state.value for state in HealthState] == ["unknown", "healthy", "degraded", "unhealthy"]
