"""From single probes to a state of health that does not flicker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ostler.model.instance import AgentHealthStatus
from ostler.model.spawn import HealthCheckConfig
from ostler.model.states import HealthState


class ProbeOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"  #: the agent answered badly, or not in time
    UNABLE = "unable"  #: the probe itself could not run; says nothing about the agent


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    outcome: ProbeOutcome
    details: str | None = None


def next_health(
    status: AgentHealthStatus,
    probe: ProbeResult,
    config: HealthCheckConfig,
    now: datetime,
    started_at: datetime,
) -> AgentHealthStatus:
    """The health after one more probe.

    The thresholds hold from every state: an agent that was never probed is unknown until it has passed or failed
    often enough in a row. Kubernetes takes the first success of a new container for health; here health resets the
    restart count, so a single success must not.
    """
    seen = status.evolve(checked_at=now, details=probe.details)
    match probe.outcome:
        case ProbeOutcome.UNABLE:
            # The rows are kept: a probe that could not run neither mends nor breaks what was seen before.
            return seen.evolve(state=HealthState.UNKNOWN)
        case ProbeOutcome.PASSED:
            return _passed(seen, config)
        case ProbeOutcome.FAILED if now - started_at < config.start_period:
            return seen.evolve(consecutive_successes=0)
        case ProbeOutcome.FAILED:
            return _failed(seen, config)


def _passed(status: AgentHealthStatus, config: HealthCheckConfig) -> AgentHealthStatus:
    row = status.consecutive_successes + 1
    state = HealthState.HEALTHY if row >= config.success_threshold else status.state
    return status.evolve(state=state, consecutive_successes=row, consecutive_failures=0)


def _failed(status: AgentHealthStatus, config: HealthCheckConfig) -> AgentHealthStatus:
    row = status.consecutive_failures + 1
    state = status.state
    if row >= config.failure_threshold:
        state = HealthState.UNHEALTHY
    elif state is HealthState.HEALTHY:
        state = HealthState.DEGRADED
    return status.evolve(state=state, consecutive_successes=0, consecutive_failures=row)
