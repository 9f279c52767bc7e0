"""How much a workspace may have: the four plans, what each admits, and which one would admit more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ostler.errors import LicenseError
from ostler.model.spawn import AgentSpawnOptions, HealthCheckConfig
from ostler.model.states import AgentPriority, IsolationLevel, RestartPolicyType, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one tier admits."""

    tier: Tier
    #: Active instances at a time; None means unlimited.
    max_concurrent: int | None
    isolation: frozenset[IsolationLevel]
    restart: frozenset[RestartPolicyType]
    custom_health_checks: bool
    priorities: frozenset[AgentPriority]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """What a plan does not admit, and the lowest tier that does; None where no tier does."""

    tier: Tier
    needs: Tier | None
    sentence: str


_THREADS = frozenset({IsolationLevel.NONE, IsolationLevel.THREAD})
_PROCESSES = _THREADS | {IsolationLevel.PROCESS}
_SIMPLE = frozenset({RestartPolicyType.NONE, RestartPolicyType.IMMEDIATE})
_NORMAL = frozenset({AgentPriority.NORMAL})

#: In rising order, so that the first that admits something is the lowest.
PLANS: Mapping[Tier, Plan] = MappingProxyType(
    {
        plan.tier: plan
        for plan in (
            Plan(
                tier=Tier.CORE,
                max_concurrent=2,
                isolation=_THREADS,
                restart=_SIMPLE,
                custom_health_checks=False,
                priorities=_NORMAL,
            ),
            Plan(
                tier=Tier.WRITER_PRO,
                max_concurrent=5,
                isolation=_THREADS,
                restart=_SIMPLE | {RestartPolicyType.LINEAR},
                custom_health_checks=True,
                priorities=_NORMAL,
            ),
            Plan(
                tier=Tier.TEAMS,
                max_concurrent=20,
                isolation=_PROCESSES,
                restart=frozenset(RestartPolicyType),
                custom_health_checks=True,
                priorities=_NORMAL,
            ),
            Plan(
                tier=Tier.ENTERPRISE,
                max_concurrent=None,
                isolation=frozenset(IsolationLevel),
                restart=frozenset(RestartPolicyType),
                custom_health_checks=True,
                priorities=frozenset(AgentPriority),
            ),
        )
    }
)


def plan(tier: Tier) -> Plan:
    return PLANS[tier]


def gate_refusals(tier: Tier, options: AgentSpawnOptions | None) -> tuple[Refusal, ...]:
    """All that these options ask for and the plan does not admit. No options means the defaults."""
    requested = options or AgentSpawnOptions()
    restart = requested.restart_policy.type if requested.restart_policy else RestartPolicyType.NONE
    check = requested.health_check or HealthCheckConfig()
    other = " or ".join(policy for policy in RestartPolicyType if policy in PLANS[tier].restart and policy != "none")
    gates: tuple[tuple[str, Callable[[Plan], bool], str], ...] = (
        (f"{requested.isolation_level} isolation", lambda plan: requested.isolation_level in plan.isolation, ""),
        (f"the {restart} restart policy", lambda plan: restart in plan.restart, f"; or choose {other}"),
        (f"the {check.probe} health check", lambda plan: plan.custom_health_checks or not check.is_custom, ""),
        (f"{requested.priority} priority", lambda plan: requested.priority in plan.priorities, ""),
    )
    return tuple(_gate_refusal(tier, what, admits, hint) for what, admits, hint in gates if not admits(PLANS[tier]))


def slot_error(tier: Tier, active: int) -> LicenseError:
    """The refusal of one more instance beside the active ones. The store holds the limit by a conditional write."""
    needs = _lowest(lambda plan: plan.max_concurrent is None or active < plan.max_concurrent)
    maximum = PLANS[tier].max_concurrent
    return LicenseError(
        f"the {tier} plan admits {maximum} active agents and {active} are active; terminate one, or move to {needs}",
        tier=tier,
        current=active,
        maximum=maximum,
    )


def _gate_refusal(tier: Tier, what: str, admits: Callable[[Plan], bool], hint: str) -> Refusal:
    needs = _lowest(admits)
    remedy = f"it needs {needs}" if needs else "no plan does"
    return Refusal(tier=tier, needs=needs, sentence=f"the {tier} plan does not admit {what}; {remedy}{hint}")


def _lowest(admits: Callable[[Plan], bool]) -> Tier | None:
    return next((plan.tier for plan in PLANS.values() if admits(plan)), None)
