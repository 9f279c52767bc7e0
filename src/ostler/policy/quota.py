"""How much a workspace may have: the four plans, what each admits, and which one would admit more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ostler.errors import LicenseError
from ostler.model import (
    AgentPriority,
    AgentSpawnOptions,
    HealthCheckConfig,
    IsolationLevel,
    RestartPolicyType,
    Tier,
)


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
    #: How many are active and how many may be, where that is why.
    current: int | None = None
    maximum: int | None = None

    def to_error(self) -> LicenseError:
        return LicenseError(self.sentence, tier=self.tier, current=self.current, maximum=self.maximum)


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
    asked = options or AgentSpawnOptions()
    restart = asked.restart_policy.type if asked.restart_policy else RestartPolicyType.NONE
    check = asked.health_check or HealthCheckConfig()
    gates: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
        (f"{asked.isolation_level} isolation", lambda plan: asked.isolation_level in plan.isolation),
        (f"the {restart} restart policy", lambda plan: restart in plan.restart),
        (f"the {check.probe} health check", lambda plan: plan.custom_health_checks or not check.is_custom),
        (f"{asked.priority} priority", lambda plan: asked.priority in plan.priorities),
    )
    return tuple(_gate_refusal(tier, what, admits) for what, admits in gates if not admits(PLANS[tier]))


def slot_refusal(tier: Tier, active: int) -> Refusal | None:
    """The refusal of one more instance beside the active ones; None where there is room.

    The sentence for it: what holds the limit is the conditional write in the store.
    """
    if _has_room(PLANS[tier], active):
        return None
    needs = _lowest(lambda plan: _has_room(plan, active))
    sentence = (
        f"the {tier} plan admits {PLANS[tier].max_concurrent} active agents and {active} are active; "
        f"terminate one, or move to {needs}"
    )
    maximum = PLANS[tier].max_concurrent
    return Refusal(tier=tier, needs=needs, sentence=sentence, current=active, maximum=maximum)


def _has_room(plan: Plan, active: int) -> bool:
    return plan.max_concurrent is None or active < plan.max_concurrent


def _gate_refusal(tier: Tier, what: str, admits: Callable[[Plan], bool]) -> Refusal:
    needs = _lowest(admits)
    remedy = f"it needs {needs}" if needs else "no plan does"
    return Refusal(tier=tier, needs=needs, sentence=f"the {tier} plan does not admit {what}; {remedy}")


def _lowest(admits: Callable[[Plan], bool]) -> Tier | None:
    return next((plan.tier for plan in PLANS.values() if admits(plan)), None)
