from __future__ import annotations

import itertools
from datetime import UTC, datetime
from uuid import UUID

import pytest

from ostler.model.instance import AgentInstance
from ostler.model.states import (
    ACTIVE_STATES,
    AGENT_TRANSITIONS,
    INACTIVE_STATES,
    AgentPriority,
    AgentState,
    AgentStateTransitions,
    HealthState,
    IsolationLevel,
    RestartPolicyType,
    Tier,
    legal_path,
    moves_between,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)

#: The table of the design, written here a second time and as text.
MOVES = {
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
PAIRS = list(itertools.product(AgentState, repeat=2))


@pytest.mark.parametrize(("current", "target"), PAIRS)
def test_only_the_moves_of_the_design_are_legal(current: AgentState, target: AgentState) -> None:
    legal = target.value in MOVES[current.value].split()
    assert AgentStateTransitions.is_valid(current, target) == legal
    instance = AgentInstance(
        instance_id=UUID(int=1),
        definition_id=UUID(int=2),
        workspace_id=UUID(int=3),
        state=current,
        created_at=NOW,
        updated_at=NOW,
    )
    assert instance.can_transition_to(target) == legal
    frozen = (current.value, target.value) in FREEZE_MOVES
    assert instance.can_transition_to(target, freezing=True) == (legal or frozen), "a freeze adds two moves and no more"


def test_every_state_has_a_row_that_cannot_be_changed() -> None:
    assert set(AGENT_TRANSITIONS) == set(AgentState) == {AgentState(name) for name in MOVES}
    with pytest.raises(TypeError):
        AGENT_TRANSITIONS[AgentState.TERMINATED] = frozenset()  # type: ignore[index]  # wrong on purpose


def test_every_active_instance_can_be_terminated_and_can_fail() -> None:
    for state in ACTIVE_STATES - {AgentState.TERMINATING}:
        assert AgentStateTransitions.is_valid(state, AgentState.TERMINATING)
        assert AgentStateTransitions.is_valid(state, AgentState.FAILED)
    assert AgentStateTransitions.is_valid(AgentState.TERMINATING, AgentState.TERMINATED)


def test_only_terminated_and_failed_are_inactive() -> None:
    assert {AgentState.TERMINATED, AgentState.FAILED} == INACTIVE_STATES
    assert frozenset(AgentState) == ACTIVE_STATES | INACTIVE_STATES
    assert not ACTIVE_STATES & INACTIVE_STATES


@pytest.mark.parametrize(("current", "target"), PAIRS)
def test_a_record_that_fell_behind_catches_up_over_legal_moves_alone(current: AgentState, target: AgentState) -> None:
    path = legal_path(current, target)
    for before, after in itertools.pairwise((current, *path)):
        assert AgentStateTransitions.is_valid(before, after)
    assert not set(path[:-1]) & {AgentState.FAILED, AgentState.SUSPENDED}, "these two are facts of their own"
    assert not path or path[-1] is target


@pytest.mark.parametrize(
    ("current", "target", "path"),
    [
        ("ready", "terminated", "terminating terminated"),
        ("ready", "waiting", "processing waiting"),
        ("processing", "suspended", "waiting suspended"),
        ("initializing", "waiting", "ready processing waiting"),
        ("processing", "failed", "failed"),
        ("terminating", "failed", ""),
        ("waiting", "ready", ""),
    ],
)
def test_the_way_to_catch_up_is_the_shortest(current: str, target: str, path: str) -> None:
    assert legal_path(AgentState(current), AgentState(target)) == tuple(AgentState(one) for one in path.split())


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ("ready", "ready", ""),
        ("ready", "processing", "processing"),
        ("processing", "suspended", "suspended"),
        ("failed", "initializing", "initializing"),
        ("processing", "initializing", "failed initializing"),
        ("ready", "waiting", "processing waiting"),
        ("ready", "terminated", "terminating terminated"),
    ],
)
def test_the_moves_of_one_commit_are_told_from_the_states_around_it(before: str, after: str, moves: str) -> None:
    assert moves_between(AgentState(before), AgentState(after)) == tuple(AgentState(one) for one in moves.split())


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (IsolationLevel, "none thread process container"),
        (AgentPriority, "low normal high critical"),
        (RestartPolicyType, "none immediate linear exponential"),
        (Tier, "core writer_pro teams enterprise"),
    ],
)
def test_ranked_values_have_the_numbers_of_the_seed(
    values: type[IsolationLevel | AgentPriority | RestartPolicyType | Tier], names: str
) -> None:
    assert [value.value for value in values] == names.split()
    assert [value.rank for value in values] == [0, 1, 2, 3]


def test_health_has_four_states() -> None:
    assert [state.value for state in HealthState] == ["unknown", "healthy", "degraded", "unhealthy"]
