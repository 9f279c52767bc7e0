from __future__ import annotations

from datetime import timedelta

import pytest

from ostler.errors import LicenseError
from ostler.model.spawn import AgentSpawnOptions, HealthCheckConfig, RestartPolicy
from ostler.model.states import AgentPriority, IsolationLevel, ProbeType, RestartPolicyType, Tier
from ostler.policy.quota import PLANS, gate_refusals, plan, slot_error

CORE, PRO, TEAMS, ENTERPRISE = Tier


@pytest.mark.parametrize(("tier", "limit"), [(CORE, 2), (PRO, 5), (TEAMS, 20), (ENTERPRISE, None)])
def test_each_plan_has_its_number_of_agents(tier: Tier, limit: int | None) -> None:
    assert plan(tier).max_concurrent == limit
    assert plan(tier).tier is tier


def test_there_is_a_plan_for_every_tier_and_none_can_be_changed() -> None:
    assert list(PLANS) == list(Tier)
    with pytest.raises(TypeError):
        PLANS[CORE] = PLANS[TEAMS]  # type: ignore[index]  # wrong on purpose


ISOLATION_NEEDS = {
    IsolationLevel.NONE: CORE,
    IsolationLevel.THREAD: CORE,
    IsolationLevel.PROCESS: TEAMS,
    IsolationLevel.CONTAINER: ENTERPRISE,
}
RESTART_NEEDS = {
    RestartPolicyType.NONE: CORE,
    RestartPolicyType.IMMEDIATE: CORE,
    RestartPolicyType.LINEAR: PRO,
    RestartPolicyType.EXPONENTIAL: TEAMS,
}
PROBE_NEEDS = {probe: CORE if probe is ProbeType.HEARTBEAT else PRO for probe in ProbeType}
PRIORITY_NEEDS = {priority: CORE if priority is AgentPriority.NORMAL else ENTERPRISE for priority in AgentPriority}
GATES = [
    *((AgentSpawnOptions(isolation_level=level), needs) for level, needs in ISOLATION_NEEDS.items()),
    *((AgentSpawnOptions(restart_policy=RestartPolicy(type=kind)), needs) for kind, needs in RESTART_NEEDS.items()),
    *(
        (AgentSpawnOptions(health_check=HealthCheckConfig(probe=probe, target="x")), needs)
        for probe, needs in PROBE_NEEDS.items()
    ),
    *((AgentSpawnOptions(priority=priority), needs) for priority, needs in PRIORITY_NEEDS.items()),
]


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(("options", "needs"), GATES)
def test_each_gate_opens_at_its_tier_and_stays_open_above(tier: Tier, options: AgentSpawnOptions, needs: Tier) -> None:
    refusals = gate_refusals(tier, options)
    if tier.rank >= needs.rank:
        assert refusals == ()
    else:
        (refusal,) = refusals
        assert (refusal.tier, refusal.needs) == (tier, needs)
        assert f"the {tier} plan" in refusal.sentence
        assert f"it needs {needs}" in refusal.sentence


@pytest.mark.parametrize("tier", Tier)
def test_the_defaults_are_admitted_everywhere(tier: Tier) -> None:
    assert gate_refusals(tier, None) == ()
    assert gate_refusals(tier, AgentSpawnOptions()) == ()


def test_an_unusual_heartbeat_is_no_custom_health_check() -> None:
    often = HealthCheckConfig(interval=timedelta(seconds=1), timeout=timedelta(seconds=1))
    assert gate_refusals(CORE, AgentSpawnOptions(health_check=often)) == ()


def test_all_refusals_come_at_once() -> None:
    options = AgentSpawnOptions(
        isolation_level=IsolationLevel.CONTAINER,
        restart_policy=RestartPolicy.default(),
        health_check=HealthCheckConfig(probe=ProbeType.HTTP, target="http://localhost/health"),
        priority=AgentPriority.CRITICAL,
    )
    refusals = gate_refusals(CORE, options)
    assert [refusal.sentence for refusal in refusals] == [
        "the core plan does not admit container isolation; it needs enterprise",
        "the core plan does not admit the exponential restart policy; it needs teams; or choose immediate",
        "the core plan does not admit the http health check; it needs writer_pro",
        "the core plan does not admit critical priority; it needs enterprise",
    ]


@pytest.mark.parametrize(
    ("tier", "active", "needs"),
    [(CORE, 2, PRO), (CORE, 5, TEAMS), (PRO, 5, TEAMS), (TEAMS, 20, ENTERPRISE), (CORE, 100, ENTERPRISE)],
)
def test_a_full_plan_names_its_limit_and_the_one_with_room(tier: Tier, active: int, needs: Tier) -> None:
    maximum = plan(tier).max_concurrent
    error = slot_error(tier, active)
    assert isinstance(error, LicenseError)
    assert (error.tier, error.current, error.maximum) == (tier, active, maximum)
    assert str(error) == (
        f"the {tier} plan admits {maximum} active agents and {active} are active; terminate one, or move to {needs}"
    )
