"""Gathers the facts behind "why is it like that?"; `policy.why` puts them into sentences."""

from __future__ import annotations

from ostler.durations import span
from ostler.lifecycle.health import stall_of
from ostler.lifecycle.instance import Instance, Runtime
from ostler.lifecycle.messages import Phase
from ostler.lifecycle.phases import Backoff, Leaving, Suspended
from ostler.model.events import AgentTerminatedEvent
from ostler.model.instance import AgentInstance, Why
from ostler.model.states import AgentState, SuspendDepth
from ostler.model.wait import Wait, WaitKind
from ostler.policy.restart import RestartFacts, decide_restart
from ostler.policy.why import WhyFacts, explain
from ostler.store import waits
from ostler.store.events import last_events


async def why(runtime: Runtime, record: AgentInstance) -> Why:
    instance = runtime.instances.get(record.instance_id)
    if record.state is AgentState.TERMINATED:
        return explain(await _ended(runtime, record))
    open_waits = tuple(await runtime.store.read(waits.open_waits, instance_id=record.instance_id))
    return explain(_facts(runtime, record, instance, open_waits))


async def _ended(runtime: Runtime, record: AgentInstance) -> WhyFacts:
    """The last event of a terminated instance says how and why, as long as it is kept."""
    last = await runtime.store.read(last_events, 1, workspace_id=record.workspace_id, instance_id=record.instance_id)
    event = last[-1] if last and isinstance(last[-1], AgentTerminatedEvent) else None
    return WhyFacts(
        instance=record,
        now=runtime.clock.wall(),
        state_since=record.updated_at,
        was_graceful=None if event is None else event.was_graceful,
        reason=None if event is None else event.reason,
    )


def _facts(
    runtime: Runtime, record: AgentInstance, instance: Instance | None, open_waits: tuple[Wait, ...]
) -> WhyFacts:
    problem = runtime.unrecovered.get(record.instance_id)
    if instance is None:
        return WhyFacts(
            instance=record,
            now=runtime.clock.wall(),
            state_since=record.updated_at,
            waits=open_waits,
            depth=_depth(record),
            restart_sentence=_restart_sentence(record, open_waits),
            reason=_pause_reason(open_waits),
            problem=problem,
        )
    liveness, phase = instance.liveness, instance.phase
    if record.is_active and liveness.health.checked_at is not None:
        record = record.evolve(health=liveness.health)  # the latest probe; the record has only what changed
    running = [call for call in instance.calls.values() if not call.ended]
    if isinstance(phase, Leaving):
        problem = phase.left_behind or phase.unwritten or problem
    unrecorded = isinstance(phase, Leaving) and phase.unwritten is not None and phase.empty
    return WhyFacts(
        instance=record,
        now=runtime.clock.wall(),
        state_since=liveness.moment(instance.moved_at),
        in_flight=len(running),
        in_flight_since=liveness.moment(min((call.began_at for call in running), default=None)),
        queued=len(instance.backlog),
        waits=open_waits,
        depth=phase.depth if isinstance(phase, Suspended) else None,
        grace=phase.grace if isinstance(phase, Leaving) else None,
        restart_sentence=_restart_sentence(record, open_waits),
        held_because=phase.held_because if isinstance(phase, Backoff | Suspended) else None,
        reason=phase.reason if isinstance(phase, Leaving) else _pause_reason(open_waits),
        stall=stall_of(instance),
        problem=problem,
        unrecorded_end=_exit_text(phase) if unrecorded else None,
    )


def _exit_text(phase: Phase) -> str:
    how = phase.exit if isinstance(phase, Leaving) else None
    return "it was ended" if how is None else how.detail or how.outcome.value


def _pause_reason(open_waits: tuple[Wait, ...]) -> str | None:
    """Why it was suspended, in the words of the caller."""
    return next((wait.reason for wait in open_waits if wait.kind is WaitKind.RESUME), None)


def _depth(record: AgentInstance) -> SuspendDepth | None:
    """Without a task nothing of it lives, so a suspended one is parked."""
    return SuspendDepth.PARK if record.state is AgentState.SUSPENDED else None


def doing(instance: Instance, *, shows_output: bool) -> str | None:
    """What a list says of it in a few words; its last line of output where nothing better is known."""
    phase, runtime = instance.phase, instance.runtime
    if isinstance(phase, Suspended):
        since = span(runtime.clock.wall() - (instance.liveness.moment(instance.moved_at) or runtime.clock.wall()))
        words = {SuspendDepth.FREEZE: "frozen", SuspendDepth.HOLD: "held", SuspendDepth.PARK: "parked"}[phase.depth]
        return f"{words} {since} ago"
    if isinstance(phase, Leaving):
        return phase.left_behind or ("ended, not recorded yet" if phase.unwritten else "ending")
    if isinstance(phase, Backoff):
        return phase.held_because or "restarts soon"
    waiting = next((open_wait.wait for open_wait in instance.waits.values()), None)
    if waiting is not None:
        who = "you" if waiting.kind is WaitKind.HUMAN else "an answer"
        return f"waits for {who}: {waiting.reason}"
    if instance.liveness.doing is not None:
        return instance.liveness.doing
    running = sum(not call.ended for call in instance.calls.values())
    if not running:
        return None
    output = instance.cell.last_output if shows_output and instance.cell is not None else None
    return (output and output.line) or f"{running} request{'s' if running > 1 else ''}"


class _NoChance:
    """Whether an instance is restarted is no matter of chance, only when."""

    def random(self) -> float:
        return 0.5


def _restart_sentence(record: AgentInstance, open_waits: tuple[Wait, ...]) -> str | None:
    """What was decided when it failed; asked again where the decision left no wait."""
    backoff = next((wait for wait in open_waits if wait.kind is WaitKind.BACKOFF), None)
    if backoff is not None or record.state is not AgentState.FAILED:
        return None if backoff is None else backoff.reason
    if record.attempt == 1 and record.enforcement is None:
        return "no restart: its first start failed, and its caller was told"
    facts = RestartFacts(
        restart_count=record.restart_count,
        lifetime_restarts=record.lifetime_restarts,
        failing_since=record.failing_since,
    )
    policy = record.spawn_options.restart_policy if record.spawn_options else None
    decision = decide_restart(policy, facts, record.terminated_at or record.updated_at, _NoChance())
    return None if decision.restart else decision.sentence
