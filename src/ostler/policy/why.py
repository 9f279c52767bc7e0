"""Why an instance is as it is, and what would change that: one answer for every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

from ostler.durations import due, duration_text, moment, since, span
from ostler.model.instance import AgentInstance, Why
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState, HealthState, SuspendDepth
from ostler.model.text import clipped
from ostler.model.wait import Wait, WaitKind
from ostler.policy.stall import Liveness, StallVerdict

#: Foreign text in a sentence: an error, a reason.
MAX_QUOTE = 500
_MAX_WAITS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyFacts:
    """What is known of the instance. What is left out is left out of the answer."""

    instance: AgentInstance
    now: datetime
    #: When it came into its present state.
    state_since: datetime | None = None
    in_flight: int = 0
    in_flight_since: datetime | None = None
    #: Requests that are accepted and not yet handed over.
    queued: int = 0
    #: Those that are open.
    waits: tuple[Wait, ...] = ()
    #: How deep it is suspended.
    depth: SuspendDepth | None = None
    #: How long a termination may take before it is forced.
    grace: timedelta | None = None
    #: A restart that is decided on; a wait of kind backoff says it too.
    restart_at: datetime | None = None
    #: The sentence of the latest `RestartDecision`.
    restart_sentence: str | None = None
    was_graceful: bool | None = None
    #: Why it was suspended or terminated, in the words of the caller.
    reason: str | None = None
    stall: StallVerdict | None = None
    #: A restart that is due, and why it has not happened.
    held_because: str | None = None
    #: What could not be recovered, ended or written.
    problem: str | None = None
    #: How it ended, where that could not be written yet; `trouble` says why not.
    unrecorded_end: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    verdict: str
    evidence: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def explain(facts: WhyFacts) -> Why:
    answer = _unrecorded(facts) if facts.unrecorded_end else _STATES[facts.instance.state](facts)
    evidence = [*answer.evidence, *_membership(facts.instance)]
    changes = [*answer.changes]
    verdict = answer.verdict
    if facts.instance.is_active and not facts.unrecorded_end:
        verdict = _verdict_with_problems(facts, verdict)
        evidence += _problems(facts)
        changes += _cures(facts)
    evidence += [*_quoted(facts.held_because), *_quoted(facts.problem)]
    return Why(
        instance_id=facts.instance.instance_id,
        state=facts.instance.state,
        verdict=verdict,
        evidence=tuple(evidence),
        what_would_change_it=tuple(changes),
    )


# --- the states --------------------------------------------------------------------------------------


def _unrecorded(facts: WhyFacts) -> _Answer:
    return _Answer(
        verdict="it has ended, but that could not be recorded yet",
        evidence=tuple(f"how it ended: {text}" for text in _quoted(facts.unrecorded_end)),
        changes=("it is recorded as soon as the store can write; free some space where the disk is full",),
    )


def _initializing(facts: WhyFacts) -> _Answer:
    begun = facts.state_since or facts.instance.created_at
    limit = (facts.instance.spawn_options or AgentSpawnOptions()).initialization_timeout
    changes = (
        "it becomes ready when its initialize returns",
        f"it fails when that has not happened {due(begun + limit, facts.now)} (time-out {duration_text(limit)})",
        "terminating it ends the start",
    )
    evidence = [f"being started {since(begun, facts.now)}", f"this is its start number {facts.instance.attempt}"]
    return _Answer(verdict="it is being started", evidence=tuple(evidence), changes=changes)


def _ready(facts: WhyFacts) -> _Answer:
    return _Answer(
        verdict="it is ready" if facts.queued else "it is ready and has nothing to do",
        evidence=(*_since(facts), *_queue(facts)),
        changes=("a request makes it work", "suspending or terminating it takes it out of service"),
    )


def _processing(facts: WhyFacts) -> _Answer:
    evidence = [*_since(facts), *_flight(facts), *_queue(facts), *_waits(facts)]
    options = facts.instance.spawn_options
    limit = options.resource_limits.execution_timeout if options and options.resource_limits else None
    changes = ["it goes on when it answers what is in flight"]
    if limit is not None and facts.in_flight_since is not None:
        ends = due(facts.in_flight_since + limit, facts.now)
        changes.append(f"the oldest request is cancelled {ends} (execution time-out {duration_text(limit)})")
    works = f"it works on {_counted(facts.in_flight, 'request')}" if facts.in_flight else "it is working"
    return _Answer(verdict=works, evidence=tuple(evidence), changes=tuple(changes))


def _waiting(facts: WhyFacts) -> _Answer:
    evidence = (*_since(facts), *_flight(facts), *_queue(facts), *_waits(facts))
    if not facts.waits:
        return _Answer(
            verdict="it has worked and waits for the next request",
            evidence=evidence,
            changes=("a request makes it work",),
        )
    kinds = ", ".join(dict.fromkeys(_WAIT_WORDS[wait.kind] for wait in facts.waits))
    return _Answer(verdict=f"it waits for {kinds}", evidence=evidence, changes=tuple(_endings(facts)))


def _suspended(facts: WhyFacts) -> _Answer:
    how, then = _DEPTHS[facts.depth] if facts.depth is not None else ("suspended", "lets it go on")
    evidence = (*_since(facts), *_reason(facts), *_flight(facts), *_queue(facts), *_waits(facts))
    resumes = _due_of(facts, WaitKind.RESUME)
    by_itself = (f"it resumes by itself {due(resumes, facts.now)}",) if resumes else ()
    return _Answer(verdict=f"it is {how}", evidence=evidence, changes=(*by_itself, f"resuming it {then}"))


def _terminating(facts: WhyFacts) -> _Answer:
    changes = ["it is gone when its cleanup is done and nothing of it lives"]
    if facts.grace is not None and facts.state_since is not None:
        forced = due(facts.state_since + facts.grace, facts.now)
        changes.append(f"it is forced {forced} (grace {duration_text(facts.grace)})")
    evidence = (*_since(facts), *_reason(facts), *_flight(facts))
    return _Answer(verdict="it is being terminated", evidence=evidence, changes=tuple(changes))


def _terminated(facts: WhyFacts) -> _Answer:
    ended = facts.instance.terminated_at
    evidence = [f"it ended at {moment(ended)}, after {span(facts.instance.uptime(facts.now))}"] if ended else []
    if facts.was_graceful is not None:
        evidence.append("it ended when it was asked to" if facts.was_graceful else "it had to be forced")
    evidence += [*_reason(facts), *_error(facts)]
    return _Answer(
        verdict="it was terminated on purpose", evidence=tuple(evidence), changes=("nothing; spawn a new instance",)
    )


def _failed(facts: WhyFacts) -> _Answer:
    ended = facts.instance.terminated_at
    evidence = [f"it failed at {moment(ended)}"] if ended else []
    evidence += [*_error(facts), *_quoted(facts.restart_sentence)]
    evidence.append(
        f"restarts: {facts.instance.restart_count} since it was last healthy, {facts.instance.lifetime_restarts} in all"
    )
    returns = facts.restart_at or _due_of(facts, WaitKind.BACKOFF)
    if returns is not None:
        changes = (
            f"it is restarted {due(returns, facts.now)}",
            "restarting it by hand does so now; terminating it calls the restart off",
        )
        return _Answer(verdict="it failed and will be restarted", evidence=tuple(evidence), changes=changes)
    changes = (
        "restarting it by hand gives it another start",
        "terminating it closes its record",
    )
    return _Answer(verdict="it failed and stays down", evidence=tuple(evidence), changes=changes)


_STATES: Mapping[AgentState, Callable[[WhyFacts], _Answer]] = MappingProxyType(
    {
        AgentState.INITIALIZING: _initializing,
        AgentState.READY: _ready,
        AgentState.PROCESSING: _processing,
        AgentState.WAITING: _waiting,
        AgentState.SUSPENDED: _suspended,
        AgentState.TERMINATING: _terminating,
        AgentState.TERMINATED: _terminated,
        AgentState.FAILED: _failed,
    }
)
#: What each depth of a suspension means, and what resuming does.
_DEPTHS: Mapping[SuspendDepth, tuple[str, str]] = MappingProxyType(
    {
        SuspendDepth.HOLD: ("held: it takes nothing new", "lets it take requests again"),
        SuspendDepth.FREEZE: ("frozen in mid-work", "lets it go on where it was"),
        SuspendDepth.PARK: ("parked: its process has ended, its record and its files stay", "starts it afresh"),
    }
)
_WAIT_WORDS: Mapping[WaitKind, str] = MappingProxyType(
    {
        WaitKind.BACKOFF: "the end of a delay",
        WaitKind.RESUME: "the end of a pause",
        WaitKind.DEPENDENCY: "something it depends on",
        WaitKind.CI: "a CI run",
        WaitKind.PULL_REQUEST: "a pull request",
        WaitKind.HUMAN: "an answer from a person",
        WaitKind.QUOTA: "quota",
        WaitKind.AGENT: "what it asked for",
    }
)


# --- what is wrong with a living one -----------------------------------------------------------------


def _verdict_with_problems(facts: WhyFacts, verdict: str) -> str:
    if facts.stall is not None and facts.stall.stalled:
        return "it is stalled: it owes work and shows no sign of life"
    if facts.stall is not None and facts.stall.verdict is Liveness.UNRESPONSIVE:
        return f"{verdict}, but it does not answer"
    if facts.instance.health.state is HealthState.UNHEALTHY:
        return f"{verdict}, but it is unhealthy"
    return verdict


def _problems(facts: WhyFacts) -> Iterator[str]:
    health = facts.instance.health
    if health.state in {HealthState.DEGRADED, HealthState.UNHEALTHY}:
        checked = f", looked at {moment(health.checked_at)}" if health.checked_at else ""
        yield f"health: {health.state}, {_counted(health.consecutive_failures, 'failed probe')} in a row{checked}"
        yield from (f"the latest probe said: {text}" for text in _quoted(health.details))
    elif health.state is HealthState.UNKNOWN:
        yield from (f"health: not known yet; {text}" for text in _quoted(health.details))
    # While it is at work its signs of life are worth reading even when they are good.
    if facts.stall is not None and facts.instance.state is AgentState.PROCESSING:
        yield from facts.stall.evidence


def _cures(facts: WhyFacts) -> Iterator[str]:
    if facts.stall is not None and facts.stall.remedy:
        yield facts.stall.remedy
    if facts.instance.health.state is HealthState.UNHEALTHY:
        yield "probes that pass again make it healthy; restarting it gives it a fresh start"


# --- pieces of sentences -----------------------------------------------------------------------------


def _since(facts: WhyFacts) -> Iterator[str]:
    if facts.state_since is not None:
        yield f"{facts.instance.state} {since(facts.state_since, facts.now)}"


def _flight(facts: WhyFacts) -> Iterator[str]:
    if facts.in_flight:
        oldest = f"; the oldest {since(facts.in_flight_since, facts.now)}" if facts.in_flight_since else ""
        yield f"{_counted(facts.in_flight, 'request')} in flight{oldest}"


def _queue(facts: WhyFacts) -> Iterator[str]:
    if facts.queued:
        yield f"{_counted(facts.queued, 'request')} queued behind it"


def _membership(instance: AgentInstance) -> Iterator[str]:
    if instance.crew is not None:
        yield f"{instance.agent_id} of crew {instance.crew}, generation {instance.generation}"


def _waits(facts: WhyFacts) -> Iterator[str]:
    for wait in facts.waits[:_MAX_WAITS]:
        reason = "".join(f": {text}" for text in _quoted(wait.reason))
        again = f", looks again {due(wait.due_at, facts.now)}" if wait.due_at else ""
        yield f"waits for {_WAIT_WORDS[wait.kind]} {since(wait.created_at, facts.now)}{again}{reason}"
    if len(facts.waits) > _MAX_WAITS:
        yield f"and for {len(facts.waits) - _MAX_WAITS} things more"


def _endings(facts: WhyFacts) -> Iterator[str]:
    kinds = {wait.kind for wait in facts.waits}
    if WaitKind.HUMAN in kinds:
        yield "an answer ends its wait"
    if kinds - {WaitKind.HUMAN}:
        yield "it goes on when what it waits for has come, or its wait is ended by hand"


def _due_of(facts: WhyFacts, kind: WaitKind) -> datetime | None:
    return min((wait.due_at for wait in facts.waits if wait.kind is kind and wait.due_at), default=None)


def _reason(facts: WhyFacts) -> Iterator[str]:
    yield from (f"the reason given: {text}" for text in _quoted(facts.reason))


def _error(facts: WhyFacts) -> Iterator[str]:
    yield from (f"its last error: {text}" for text in _quoted(facts.instance.error_message))


def _quoted(text: str | None) -> Iterator[str]:
    """Foreign words, on one line and no longer than a sentence bears; nothing where there are none."""
    if text and (words := " ".join(clipped(text, MAX_QUOTE).split())):
        yield words


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
