from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.spawn import RestartPolicy
from ostler.model.states import RestartPolicyType
from ostler.policy.restart import JITTER, RestartDecision, RestartFacts, RestartReason, backoff, decide_restart

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@dataclass
class Fixed:
    """A random source that always says the same."""

    value: float = 0.5

    def random(self) -> float:
        return self.value


def decide(
    policy: RestartPolicy | None,
    *,
    count: int = 0,
    lifetime: int = 0,
    starts: tuple[datetime, ...] = (),
    failing_since: datetime | None = None,
    cause: str = "",
) -> RestartDecision:
    facts = RestartFacts(
        restart_count=count,
        lifetime_restarts=lifetime,
        recent_starts=starts,
        failing_since=failing_since,
        cause=cause,
    )
    return decide_restart(policy, facts, NOW, Fixed())


@pytest.mark.parametrize("policy", [None, RestartPolicy.none()])
def test_without_a_policy_nothing_is_restarted(policy: RestartPolicy | None) -> None:
    decision = decide(policy, cause="exit code 1")
    assert not decision.restart
    assert decision.reason is RestartReason.NO_POLICY
    assert decision.max_attempts == 0
    assert decision.sentence == "no restart: its policy is not to restart (it ended with: exit code 1)"


def test_an_immediate_policy_restarts_at_once_however_large_its_initial_delay() -> None:
    policy = RestartPolicy(type=RestartPolicyType.IMMEDIATE, initial_delay=10 * SECOND)
    decision = decide(policy, count=2)
    assert decision.restart
    assert decision.delay == timedelta(0)
    assert decision.sentence == "restart 3 of 3 at once"


@pytest.mark.parametrize(
    ("kind", "delays"),
    [
        (RestartPolicyType.LINEAR, [2, 4, 6, 8, 10, 12]),
        (RestartPolicyType.EXPONENTIAL, [2, 6, 18, 54, 162, 486]),
    ],
)
def test_the_first_delay_is_the_initial_one_and_the_next_follow_the_formula(
    kind: RestartPolicyType, delays: list[int]
) -> None:
    policy = RestartPolicy(
        type=kind,
        max_retries=10,
        initial_delay=2 * SECOND,
        max_delay=timedelta(minutes=10),
        backoff_multiplier=3.0,
        use_jitter=False,
    )
    assert [decide(policy, count=n).delay.total_seconds() for n in range(6)] == delays


@pytest.mark.parametrize(
    ("kind", "delays"), [(RestartPolicyType.EXPONENTIAL, [1, 2, 4]), (RestartPolicyType.LINEAR, [1, 2, 3])]
)
def test_the_default_waits_three_times_and_then_gives_up(kind: RestartPolicyType, delays: list[int]) -> None:
    policy = RestartPolicy.default().evolve(type=kind, use_jitter=False)
    decisions = [decide(policy, count=n, lifetime=n) for n in range(4)]
    assert [decision.restart for decision in decisions] == [True, True, True, False]
    assert [decision.delay for decision in decisions[:3]] == [seconds * SECOND for seconds in delays]
    assert [decision.attempt_number for decision in decisions[:3]] == [1, 2, 3]
    assert decisions[3].reason is RestartReason.RETRIES_SPENT
    assert "3 of 3 restarts since it was last healthy are spent" in decisions[3].sentence


@pytest.mark.parametrize(("chance", "factor"), [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)])
def test_jitter_moves_a_delay_by_a_quarter_at_most(chance: float, factor: float) -> None:
    policy = RestartPolicy(initial_delay=4 * SECOND)
    assert backoff(policy, 2, Fixed(chance)) == 8 * SECOND * factor


def test_jitter_never_lifts_a_delay_above_the_maximum() -> None:
    policy = RestartPolicy(initial_delay=20 * SECOND, max_delay=21 * SECOND)
    assert backoff(policy, 1, Fixed(1.0)) == 21 * SECOND


@given(
    st.sampled_from(RestartPolicyType),
    st.integers(min_value=1, max_value=10**6),
    st.floats(min_value=1.1, max_value=5.0),
    st.timedeltas(min_value=timedelta(0), max_value=timedelta(minutes=5)),
    st.integers(),
)
def test_every_delay_lies_between_nothing_and_the_maximum(
    kind: RestartPolicyType, number: int, multiplier: float, initial: timedelta, seed: int
) -> None:
    policy = RestartPolicy(
        type=kind,
        initial_delay=initial,
        max_delay=timedelta(minutes=5),
        backoff_multiplier=multiplier,
    )
    chance = random.Random(seed)
    assert timedelta(0) <= backoff(policy, number, chance) <= policy.max_delay


@pytest.mark.parametrize("initial", [timedelta(0), SECOND])
@pytest.mark.parametrize("kind", [RestartPolicyType.LINEAR, RestartPolicyType.EXPONENTIAL])
def test_a_number_beyond_all_floats_is_capped_like_any_other(kind: RestartPolicyType, initial: timedelta) -> None:
    policy = RestartPolicy(type=kind, initial_delay=initial)
    expected = policy.max_delay if initial else timedelta(0)
    assert backoff(policy, 10**400, Fixed()) == expected
    assert backoff(policy, 10_000, Fixed()) == expected


def test_the_spread_of_the_jitter_is_even() -> None:
    chance = random.Random(7)
    policy = RestartPolicy(initial_delay=timedelta(seconds=10), max_delay=timedelta(minutes=5))
    delays = [backoff(policy, 1, chance).total_seconds() for _ in range(2000)]
    assert 10 * (1 - JITTER) <= min(delays) < 7.6
    assert 12.4 < max(delays) <= 10 * (1 + JITTER)
    assert 9.8 < sum(delays) / len(delays) < 10.2


def test_failing_for_the_whole_breaker_time_ends_the_restarts() -> None:
    policy = RestartPolicy.default()
    almost = NOW - policy.circuit_breaker_timeout + timedelta(microseconds=1)
    assert decide(policy, failing_since=almost).restart
    decision = decide(policy, failing_since=NOW - policy.circuit_breaker_timeout)
    assert not decision.restart
    assert decision.reason is RestartReason.CIRCUIT_OPEN
    assert "failing for 5 min" in decision.sentence


def test_a_first_failure_does_not_open_the_breaker() -> None:
    assert decide(RestartPolicy.default(), failing_since=None).restart
    assert decide(RestartPolicy.default(), failing_since=NOW).restart


def test_the_budget_for_life_ends_it_even_with_all_retries_left() -> None:
    policy = RestartPolicy(lifetime_limit=7)
    assert decide(policy, lifetime=6).restart
    decision = decide(policy, lifetime=7)
    assert not decision.restart
    assert decision.reason is RestartReason.LIFETIME_SPENT
    assert "7 of 7" in decision.sentence


def test_a_burst_waits_until_the_window_has_room_again() -> None:
    starts = tuple(NOW - timedelta(seconds=age) for age in (50, 5, 40, 10, 20))
    decision = decide(RestartPolicy(), starts=starts)
    assert decision.restart
    assert decision.delay == 10 * SECOND
    assert decision.reason is RestartReason.BURST_WINDOW
    assert decision.sentence == "restart 1 of 3 in 10 s, because the limit is 5 starts in 1 min"


def test_fewer_or_older_starts_are_no_burst() -> None:
    four = tuple(NOW - timedelta(seconds=age) for age in range(4))
    old = tuple(NOW - timedelta(seconds=60 + age) for age in range(5))
    for starts in (four, old):
        decision = decide(RestartPolicy(), starts=starts)
        assert (decision.reason, decision.delay) == (RestartReason.RESTART, SECOND)


def test_an_immediate_policy_is_not_held_back_by_the_burst_window() -> None:
    decision = decide(RestartPolicy.immediate(), starts=(NOW,) * 100)
    assert (decision.restart, decision.reason, decision.delay) == (True, RestartReason.RESTART, timedelta(0))


def test_a_backoff_longer_than_the_burst_wait_stands() -> None:
    policy = RestartPolicy(initial_delay=30 * SECOND, use_jitter=False)
    starts = tuple(NOW - timedelta(seconds=50) for _ in range(5))
    decision = decide(policy, starts=starts)
    assert decision.reason is RestartReason.RESTART
    assert decision.delay == 30 * SECOND


def test_starts_dated_in_the_future_hold_for_one_window_only() -> None:
    starts = tuple(NOW + timedelta(days=365) for _ in range(5))
    policy = RestartPolicy()
    assert decide(policy, starts=starts).delay == policy.burst_window


@given(st.lists(st.integers(min_value=0, max_value=300), max_size=12), st.integers(1, 6))
def test_a_decided_start_never_breaks_the_window(ages: list[int], limit: int) -> None:
    policy = RestartPolicy(burst_limit=limit, initial_delay=timedelta(0))
    starts = tuple(NOW - timedelta(seconds=age) for age in ages)
    start = NOW + decide(policy, starts=starts).delay
    within = [moment for moment in starts if start - moment < policy.burst_window]
    assert len(within) + 1 <= limit


def test_a_crash_loop_whose_count_is_always_forgiven_ends_by_itself() -> None:
    """Whatever else is set, the budget for life bounds the number of restarts."""
    policy = RestartPolicy(lifetime_limit=100, use_jitter=False)
    now, starts, lifetime = NOW, [NOW], 0
    while True:
        # Healthy each time for just long enough to have its count forgiven.
        facts = RestartFacts(restart_count=0, lifetime_restarts=lifetime, recent_starts=tuple(starts[-20:]))
        decision = decide_restart(policy, facts, now, Fixed())
        if not decision.restart:
            break
        now += decision.delay
        starts.append(now)
        lifetime += 1
    assert lifetime == 100
    assert now - NOW >= timedelta(minutes=19)
