"""Health of an instance: probes, stalls, memory of a shared program; unhealthy with a restart policy is a failure."""

from __future__ import annotations

from ostler.isolation.base import Exit
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Probed
from ostler.lifecycle.operations import fail_with
from ostler.lifecycle.phases import Adopting, Pausing, Suspended
from ostler.model.attempt import AttemptOutcome
from ostler.model.instance import AgentHealthStatus
from ostler.model.states import HealthState, RestartPolicyType, SuspendDepth
from ostler.policy.health import ProbeOutcome, ProbeResult, next_health
from ostler.policy.stall import StallFacts, StallVerdict, judge_stall
from ostler.store import reports as commands

#: The same health for another reason is written at most this often.
_REASON_SECONDS = 10.0


def probed(instance: Instance, message: Probed) -> None:
    if message.attempt != instance.attempt:
        return
    if message.gone is not None:
        fail_with(instance, message.gone)
        return
    if message.result is None or isinstance(instance.phase, Adopting):
        return  # what a blocked, adopted agent works on is not known yet, so a silence is no stall
    before = instance.liveness.health
    result = _explained(instance, message.result)
    started = instance.liveness.moment(instance.liveness.started) or instance.runtime.clock.wall()
    after = next_health(before, result, instance.check, instance.runtime.clock.wall(), started)
    after = _with_memory(instance, after)
    instance.liveness.health = after
    _write(instance, before, after)
    if after.state is HealthState.UNHEALTHY and before.state is not HealthState.UNHEALTHY and _restarts(instance):
        detail = f"unhealthy: {after.details or 'its probes failed'}"
        fail_with(instance, Exit(outcome=AttemptOutcome.STOPPED, detail=detail))


def _write(instance: Instance, before: AgentHealthStatus, after: AgentHealthStatus) -> None:
    liveness, runtime = instance.liveness, instance.runtime
    changed = after.state is not before.state or instance.record.health.state is not before.state
    now = runtime.clock.mono()
    says_more = after.details != instance.record.health.details and now - liveness.reason_written >= _REASON_SECONDS
    if not changed and not says_more:
        return
    liveness.reason_written = float("-inf") if changed else now
    instance.write_lazily(commands.report_health, after)
    if after.state is not before.state:
        runtime.metrics.count("lifecycle.health.changes", state=after.state.value)
        runtime.log.emit(
            "health_changed",
            instance_id=instance.instance_id,
            from_health=before.state,
            to_health=after.state,
            details=after.details,
        )


def _restarts(instance: Instance) -> bool:
    policy = instance.options.restart_policy
    return policy is not None and policy.type is not RestartPolicyType.NONE


def _explained(instance: Instance, result: ProbeResult) -> ProbeResult:
    """A failed probe says more when nothing else of the agent moves either; one that could not run is logged once."""
    liveness, log = instance.liveness, instance.runtime.log
    if result.outcome is ProbeOutcome.UNABLE:
        details = f"the probe could not run: {result.details or 'it is not known why'}"
        if not liveness.unable:
            log.emit("look_failed", instance_id=instance.instance_id, error=details)
        liveness.unable = True
        return ProbeResult(outcome=ProbeOutcome.UNABLE, details=details)
    liveness.unable = False
    verdict = stall_of(instance) if result.outcome is ProbeOutcome.FAILED else None
    if verdict is None or not verdict.stalled:
        liveness.stalled = False
        return result
    evidence = "; ".join(verdict.evidence)
    if not liveness.stalled:
        log.emit("stalled", instance_id=instance.instance_id, evidence=evidence)
    liveness.stalled = True
    return ProbeResult(outcome=ProbeOutcome.FAILED, details=f"stalled: {evidence}")


def _with_memory(instance: Instance, health: AgentHealthStatus) -> AgentHealthStatus:
    """At levels inside the program the memory limit is advisory: a breach is health degraded, nothing more."""
    used, limit = instance.liveness.shared_memory_mb, instance.limits.max_memory_mb
    if used is None or used <= limit or health.state is not HealthState.HEALTHY:
        return health
    details = f"the program that it lives in uses {used} MB of memory, its limit is {limit} MB"
    return health.evolve(state=HealthState.DEGRADED, details=details)


def stall_of(instance: Instance) -> StallVerdict:
    """Whether it stands still although it owes work."""
    liveness, phase = instance.liveness, instance.phase
    output = None if instance.cell is None else instance.cell.last_output
    if output is not None:
        liveness.note_output(output.at)
    working = [call for call in instance.calls.values() if not call.ended]
    oldest = min((call.began_at for call in working), default=None)
    return judge_stall(
        StallFacts(
            state=instance.state,
            now=instance.runtime.clock.wall(),
            state_since=liveness.moment(instance.moved_at),
            last_heartbeat=liveness.moment(liveness.heartbeat),
            last_output=liveness.moment(liveness.output),
            last_cpu_change=liveness.moment(liveness.cpu_change),
            in_flight_since=liveness.moment(oldest),
            frozen=isinstance(phase, Suspended) and phase.depth is SuspendDepth.FREEZE,
            held=isinstance(phase, Pausing),
            waits=bool(instance.waits) and not any(call.works for call in working),
            stall_after=instance.runtime.settings.stall_after,
        )
    )
