"""Whether an agent that should be working has stopped.

Shooting a healthy agent is worse than waiting a little longer, so one silence proves nothing: an agent that thinks
is quiet, one that computes may not answer, one that waits does neither. Only when it owes work and its heartbeat,
its output and its CPU time have all stood still is it called stalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ostler.durations import span
from ostler.model.states import INACTIVE_STATES, AgentState

_NOTHING = timedelta(0)


class Liveness(StrEnum):
    """The verdict in one word."""

    WORKING = "working"  #: answers, and is seen to do something
    QUIET = "quiet"  #: answers, and shows nothing else; an agent that waits for a model looks like this
    UNRESPONSIVE = "unresponsive"  #: does not answer, but is not proven to stand still
    STALLED = "stalled"
    IDLE = "idle"  #: owes no work
    WAITING = "waiting"  #: for something from outside
    HELD = "held"  #: suspended, frozen or held back
    STARTING = "starting"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class StallFacts:
    """What was seen of an instance.

    All moments should come from one clock that does not jump: the monotonic one, laid onto the wall clock once. A
    wall clock that is set forward would make every agent look silent at the same moment.
    """

    state: AgentState
    now: datetime
    #: Nothing that was before counts as silence: set it when a thawed agent goes on.
    state_since: datetime | None = None
    #: None means never.
    last_heartbeat: datetime | None = None
    #: Anything it said: output, progress, a message. None means never.
    last_output: datetime | None = None
    #: When its CPU time was last seen to have grown; its first sample counts. None where it cannot be measured.
    last_cpu_change: datetime | None = None
    #: When the oldest request that is not answered was handed over; None where there is none.
    in_flight_since: datetime | None = None
    frozen: bool = False
    held: bool = False
    #: It has asked for something and has not got it yet.
    waits: bool = False
    #: None, or nothing, means that stalls are not looked for.
    stall_after: timedelta | None = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class StallVerdict:
    stalled: bool
    verdict: Liveness
    evidence: tuple[str, ...] = ()
    #: What to do about it; empty where nothing is to be done.
    remedy: str = ""


def judge_stall(facts: StallFacts) -> StallVerdict:
    """Clause by clause: first all that excuses silence, then the silence itself."""
    excused = _excused(facts)
    if excused is not None:
        return excused
    begun = facts.in_flight_since
    if begun is None:
        return _fine(Liveness.IDLE, "no request is in flight")
    limit = facts.stall_after
    if limit is None or limit <= _NOTHING:
        return _fine(Liveness.WORKING, "stalls are not looked for")
    # An agent that has just been given work, or was just thawed, has had no time to say anything.
    owes_since = max(begun, facts.state_since or begun)
    heartbeat = _silence(facts, facts.last_heartbeat, owes_since)
    output = _silence(facts, facts.last_output, owes_since)
    cpu = None if facts.last_cpu_change is None else _silence(facts, facts.last_cpu_change, owes_since)
    evidence = (
        f"a request has been in flight for {span(facts.now - begun)}",
        _sentence("heartbeat", heartbeat, facts.last_heartbeat, limit),
        _sentence("output", output, facts.last_output, limit),
        _sentence("use of CPU", cpu, facts.last_cpu_change, limit)
        if cpu is not None
        else "its CPU time is not measured",
    )
    return _judged(evidence, heartbeat >= limit, output >= limit, None if cpu is None else cpu >= limit)


def _excused(facts: StallFacts) -> StallVerdict | None:
    state = facts.state
    if state in INACTIVE_STATES:
        return _fine(Liveness.ENDED, f"it is {state}")
    if state is AgentState.TERMINATING:
        return _fine(Liveness.ENDING, "it is being terminated, which has a time-out of its own")
    if facts.frozen or facts.held or state is AgentState.SUSPENDED:
        how = "frozen" if facts.frozen else "held back" if facts.held else "suspended"
        return _fine(Liveness.HELD, f"it is {how}, so it cannot show signs of work")
    if state is AgentState.INITIALIZING:
        return _fine(Liveness.STARTING, "it is being started, which has a time-out of its own")
    if facts.waits or (state is AgentState.WAITING and facts.in_flight_since is not None):
        return _fine(Liveness.WAITING, "it waits for something from outside")
    if state is not AgentState.PROCESSING:
        return _fine(Liveness.IDLE, f"it is {state} and owes no work")
    return None


def _judged(evidence: tuple[str, ...], deaf: bool, mute: bool, still: bool | None) -> StallVerdict:
    if deaf and mute and still:
        return StallVerdict(
            stalled=True,
            verdict=Liveness.STALLED,
            evidence=evidence,
            remedy="restart it, or terminate it; what it was asked will fail and can be asked again",
        )
    if deaf:
        return StallVerdict(
            stalled=False,
            verdict=Liveness.UNRESPONSIVE,
            evidence=evidence,
            remedy="wait while it shows other signs of work; its execution time-out ends it at the latest",
        )
    quiet = mute and still is not False
    return StallVerdict(stalled=False, verdict=Liveness.QUIET if quiet else Liveness.WORKING, evidence=evidence)


def _silence(facts: StallFacts, last: datetime | None, owes_since: datetime) -> timedelta:
    """How long a sign has been missing; not negative where the clock was set back."""
    return max(facts.now - max(last or owes_since, owes_since), _NOTHING)


def _sentence(sign: str, silence: timedelta, last: datetime | None, limit: timedelta) -> str:
    if silence >= limit:
        return f"no {sign} for {span(silence)}; the limit is {span(limit)}"
    if last is None:
        return f"no {sign} yet"
    return f"the last {sign} was {span(silence)} ago"


def _fine(verdict: Liveness, why: str) -> StallVerdict:
    return StallVerdict(stalled=False, verdict=verdict, evidence=(why,))
