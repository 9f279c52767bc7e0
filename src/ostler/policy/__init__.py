"""What should happen: pure functions of facts and now. They decide; others act."""

from ostler.policy.access import (
    CROSS_PERMISSIONS,
    ROLE_PERMISSIONS,
    AccessDecision,
    decide_access,
    granted,
    require_access,
)
from ostler.policy.health import ProbeOutcome, ProbeResult, next_health
from ostler.policy.quota import PLANS, Plan, Refusal, gate_refusals, plan, slot_refusal
from ostler.policy.restart import (
    JITTER,
    Chance,
    RestartDecision,
    RestartFacts,
    RestartReason,
    backoff,
    decide_restart,
)
from ostler.policy.retention import RetentionPolicy, instance_due, task_due
from ostler.policy.stall import Liveness, StallFacts, StallVerdict, judge_stall
from ostler.policy.why import WhyFacts, explain

__all__ = [
    "CROSS_PERMISSIONS",
    "JITTER",
    "PLANS",
    "ROLE_PERMISSIONS",
    "AccessDecision",
    "Chance",
    "Liveness",
    "Plan",
    "ProbeOutcome",
    "ProbeResult",
    "Refusal",
    "RestartDecision",
    "RestartFacts",
    "RestartReason",
    "RetentionPolicy",
    "StallFacts",
    "StallVerdict",
    "WhyFacts",
    "backoff",
    "decide_access",
    "decide_restart",
    "explain",
    "gate_refusals",
    "granted",
    "instance_due",
    "judge_stall",
    "next_health",
    "plan",
    "require_access",
    "slot_refusal",
    "task_due",
]
