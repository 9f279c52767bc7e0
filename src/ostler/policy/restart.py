"""Whether a failed agent is restarted, and when.

Four brakes: retries since it was last healthy, a circuit breaker on continuous failure, a window against bursts,
and a budget for the whole life of the instance.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from ostler.durations import duration_text
from ostler.model.spawn import RestartPolicy
from ostler.model.states import RestartPolicyType

#: How far the jitter may go to either side.
JITTER = 0.25
_AT_ONCE = timedelta(0)


class Chance(Protocol):
    """A source of numbers from 0 up to, but not including, 1."""

    def random(self) -> float: ...


class RestartReason(StrEnum):
    RESTART = "restart"
    BURST_WINDOW = "burst_window"  #: restarted later than the backoff alone would have it
    NO_POLICY = "no_policy"
    LIFETIME_SPENT = "lifetime_spent"
    RETRIES_SPENT = "retries_spent"
    CIRCUIT_OPEN = "circuit_open"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartFacts:
    """What is known of the agent at the moment it failed."""

    #: Restarts since it was last healthy.
    restart_count: int
    #: Restarts in its whole life.
    lifetime_restarts: int
    #: Its latest starts, in any order, also those that a person asked for.
    recent_starts: tuple[datetime, ...] = ()
    #: The first failure since it was last healthy; None where this is the first.
    failing_since: datetime | None = None
    #: What ended it, in words.
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """What to do, and a sentence that is shown to the operator verbatim."""

    restart: bool
    delay: timedelta
    #: The number of the restart that is decided on, from 1.
    attempt_number: int
    max_attempts: int
    reason: RestartReason
    sentence: str


def decide_restart(policy: RestartPolicy | None, facts: RestartFacts, now: datetime, chance: Chance) -> RestartDecision:
    """Clause by clause, the most final first. No policy means no restart."""
    if policy is None or policy.type is RestartPolicyType.NONE:
        return _give_up(policy, facts, RestartReason.NO_POLICY, "its policy is not to restart")
    if facts.lifetime_restarts >= policy.lifetime_limit:
        why = f"{facts.lifetime_restarts} of {policy.lifetime_limit} restarts of its whole life are spent"
        return _give_up(policy, facts, RestartReason.LIFETIME_SPENT, why)
    if facts.restart_count >= policy.max_retries:
        why = f"{facts.restart_count} of {policy.max_retries} restarts since it was last healthy are spent"
        return _give_up(policy, facts, RestartReason.RETRIES_SPENT, why)
    if facts.failing_since is not None and now - facts.failing_since >= policy.circuit_breaker_timeout:
        why = f"it has been failing for {duration_text(policy.circuit_breaker_timeout)} or longer"
        return _give_up(policy, facts, RestartReason.CIRCUIT_OPEN, why)
    delay = backoff(policy, facts.restart_count + 1, chance)
    wait = _burst_wait(policy, facts.recent_starts, now)
    if wait > delay:
        # systemd gives up here. Waiting suits an unattended run, and it is bounded: every restart is paid for
        # from the retries and from the budget for life. The wait may exceed max_delay, which caps the backoff.
        why = f"the limit is {policy.burst_limit} starts in {duration_text(policy.burst_window)}"
        return _go_on(policy, facts, wait, RestartReason.BURST_WINDOW, why)
    return _go_on(policy, facts, delay, RestartReason.RESTART, "")


def backoff(policy: RestartPolicy, number: int, chance: Chance) -> timedelta:
    """The delay before the restart of this number, from 1: jittered, then capped."""
    if policy.type in {RestartPolicyType.NONE, RestartPolicyType.IMMEDIATE}:
        return _AT_ONCE
    seconds = policy.initial_delay.total_seconds() * _growth(policy, number)
    if policy.use_jitter:
        seconds *= 1 + JITTER * (2 * chance.random() - 1)
    # The cap comes last, so that no jitter lifts a delay above it, and is taken as a number of seconds,
    # because a timedelta cannot hold what an exponent may reach.
    return min(policy.max_delay, timedelta(seconds=min(seconds, policy.max_delay.total_seconds())))


def _growth(policy: RestartPolicy, number: int) -> float:
    try:
        if policy.type is RestartPolicyType.LINEAR:
            return float(number)
        return float(policy.backoff_multiplier) ** (number - 1)  # the first restart waits `initial_delay`
    except OverflowError:
        return float("inf") if policy.initial_delay else 0.0


def _burst_wait(policy: RestartPolicy, starts: tuple[datetime, ...], now: datetime) -> timedelta:
    """How long until one more start keeps to the window. An immediate policy is bounded by its retries alone."""
    if policy.type is RestartPolicyType.IMMEDIATE or len(starts) < policy.burst_limit:
        return _AT_ONCE
    frees = sorted(starts)[-policy.burst_limit] + policy.burst_window
    # A start that seems to lie in the future comes from a clock that was set back; it holds for one window.
    return min(max(frees - now, _AT_ONCE), policy.burst_window)


def _give_up(policy: RestartPolicy | None, facts: RestartFacts, reason: RestartReason, why: str) -> RestartDecision:
    return RestartDecision(
        restart=False,
        delay=_AT_ONCE,
        attempt_number=facts.restart_count + 1,
        max_attempts=policy.max_retries if policy else 0,
        reason=reason,
        sentence=f"no restart: {why}{_after(facts)}",
    )


def _go_on(
    policy: RestartPolicy, facts: RestartFacts, delay: timedelta, reason: RestartReason, why: str
) -> RestartDecision:
    number = facts.restart_count + 1
    rounded = timedelta(seconds=round(delay.total_seconds(), 1))  # the jitter has microseconds
    when = f"in {duration_text(rounded)}" if rounded else "at once"
    because = f", because {why}" if why else ""
    return RestartDecision(
        restart=True,
        delay=delay,
        attempt_number=number,
        max_attempts=policy.max_retries,
        reason=reason,
        sentence=f"restart {number} of {policy.max_retries} {when}{because}{_after(facts)}",
    )


def _after(facts: RestartFacts) -> str:
    return f" (it ended with: {facts.cause.splitlines()[0].removesuffix('; its last lines:')})" if facts.cause else ""
