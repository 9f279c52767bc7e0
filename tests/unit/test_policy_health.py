from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.instance import AgentHealthStatus
from ostler.model.spawn import HealthCheckConfig
from ostler.model.states import HealthState
from ostler.policy.health import ProbeOutcome, ProbeResult, next_health

START = datetime(2026, 3, 1, tzinfo=UTC)
OUTCOMES = {"+": ProbeOutcome.PASSED, "-": ProbeOutcome.FAILED, "?": ProbeOutcome.UNABLE}
CONFIG = HealthCheckConfig()


def after(probes: str, config: HealthCheckConfig = CONFIG) -> AgentHealthStatus:
    """The health after these probes, one per interval: + passed, - failed, ? could not run."""
    status, now = AgentHealthStatus(), START
    for mark in probes:
        now += config.interval
        result = ProbeResult(outcome=OUTCOMES[mark], details=mark)
        status = next_health(status, result, config, now, START)
    return status


@pytest.mark.parametrize(
    ("probes", "state"),
    [
        ("", HealthState.UNKNOWN),
        ("+", HealthState.UNKNOWN),
        ("++", HealthState.HEALTHY),
        ("+-+", HealthState.UNKNOWN),
        ("--", HealthState.UNKNOWN),
        ("---", HealthState.UNHEALTHY),
        ("++-", HealthState.DEGRADED),
        ("++--", HealthState.DEGRADED),
        ("++---", HealthState.UNHEALTHY),
        ("++-+", HealthState.DEGRADED),
        ("++-++", HealthState.HEALTHY),
        ("++--+--", HealthState.DEGRADED),
        ("---+", HealthState.UNHEALTHY),
        ("---+-", HealthState.UNHEALTHY),
        ("---++", HealthState.HEALTHY),
        ("?", HealthState.UNKNOWN),
        ("++?", HealthState.UNKNOWN),
        ("++?+", HealthState.HEALTHY),
        ("++--?", HealthState.UNKNOWN),
        ("++--?-", HealthState.UNHEALTHY),
        ("---?", HealthState.UNKNOWN),
        ("---?-", HealthState.UNHEALTHY),
    ],
)
def test_probes_in_a_row_make_the_state(probes: str, state: HealthState) -> None:
    assert after(probes).state is state


def test_the_status_says_when_and_what_was_seen_last() -> None:
    status = after("++-")
    assert status.checked_at == START + 3 * CONFIG.interval
    assert status.details == "-"
    assert (status.consecutive_failures, status.consecutive_successes) == (1, 0)


def test_failures_soon_after_a_start_do_not_count() -> None:
    assert after("----", HealthCheckConfig(start_period=timedelta(seconds=20))).consecutive_failures == 1
    config = HealthCheckConfig(start_period=timedelta(seconds=21))
    assert after("----", config).state is HealthState.UNKNOWN
    assert after("----", config).consecutive_failures == 0
    assert after("----" + "--", config).state is HealthState.UNKNOWN
    assert after("----" + "---", config).state is HealthState.UNHEALTHY


def test_a_success_counts_even_in_the_start_period_and_a_failure_breaks_the_row() -> None:
    config = HealthCheckConfig(start_period=timedelta(minutes=5))
    assert after("++", config).state is HealthState.HEALTHY
    assert after("+-+", config).state is HealthState.UNKNOWN
    assert after("++---", config).state is HealthState.HEALTHY


def test_thresholds_of_one_turn_at_every_probe() -> None:
    config = HealthCheckConfig(failure_threshold=1, success_threshold=1)
    assert after("+", config).state is HealthState.HEALTHY
    assert after("+-", config).state is HealthState.UNHEALTHY
    assert after("+-+", config).state is HealthState.HEALTHY


@given(st.text("+-?", max_size=30), st.integers(1, 4), st.integers(1, 4))
def test_health_and_sickness_are_always_earned_in_a_row(probes: str, failures: int, successes: int) -> None:
    config = HealthCheckConfig(failure_threshold=failures, success_threshold=successes)
    status = after(probes, config)
    known = probes.replace("?", "")
    if known.endswith("+" * successes) and not probes.endswith("?"):
        assert status.state is HealthState.HEALTHY
    if known.endswith("-" * failures) and not probes.endswith("?"):
        assert status.state is HealthState.UNHEALTHY
    if status.state is HealthState.HEALTHY:
        assert "+" * successes in known
    if status.state is HealthState.UNHEALTHY:
        assert "-" * failures in known
    assert status.validate()


@given(st.text("+-?", max_size=10))
def test_the_same_facts_give_the_same_answer_and_leave_them_alone(probes: str) -> None:
    status = after(probes)
    before = status.to_json()
    result = ProbeResult(outcome=ProbeOutcome.FAILED)
    now = START + timedelta(hours=1)
    assert next_health(status, result, CONFIG, now, START) == next_health(status, result, CONFIG, now, START)
    assert status.to_json() == before
