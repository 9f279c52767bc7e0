"""What follows when a member of a crew is done or has erred: a pure function of the policy and the errors so far."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ostler.durations import duration_text
from ostler.model.crew import MANUAL, CrewAction, CrewPolicy, CrewStrategy

MAX_BACKOFF = timedelta(minutes=5)


class Ends(StrEnum):
    """What ends with this generation of a member."""

    NOTHING = "nothing"  #: a fresh generation follows
    MEMBER = "member"
    CREW = "crew"
    EVERYTHING = "everything"


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewDecision:
    ends: Ends = Ends.NOTHING
    #: Before the next generation.
    delay: timedelta = timedelta(0)
    #: Said to a person where more than the generation ends.
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberEnd:
    """How a generation of a member ended."""

    member: str
    task: str
    #: None: its work was submitted.
    error: str | None = None


def decide_end(
    policy: CrewPolicy, end: MemberEnd, errors: tuple[datetime, ...], in_a_row: int, now: datetime
) -> CrewDecision:
    """`errors` are those of the crew, this one among them; `in_a_row` counts those of this member."""
    if end.error is None:
        return _done(policy, end)
    sentence = f"{end.member} erred on {end.task}: {_first_line(end.error)}"
    if policy.on_error is CrewAction.SHUTDOWN:
        return CrewDecision(ends=Ends.EVERYTHING, reason=f"{MANUAL}: {sentence}")
    recent = [moment for moment in errors if now - moment <= policy.error_window]
    if len(recent) > policy.max_errors:
        window = duration_text(policy.error_window)
        many = f"{len(recent)} errors within {window}, more than {policy.max_errors}"
        return CrewDecision(ends=Ends.CREW, reason=f"{MANUAL}: {many}; at last {sentence}")
    if policy.on_error is CrewAction.STOP:
        return CrewDecision(ends=Ends.MEMBER, reason=sentence)
    return CrewDecision(delay=backoff_of(policy, in_a_row))


def _done(policy: CrewPolicy, end: MemberEnd) -> CrewDecision:
    match policy.on_done:
        case CrewAction.SHUTDOWN:
            return CrewDecision(ends=Ends.EVERYTHING, reason=f"{end.member} is done with {end.task}")
        case CrewAction.STOP:
            return CrewDecision(ends=Ends.MEMBER, reason=f"{end.member} is done with {end.task}")
        case _:
            return CrewDecision()


def backoff_of(policy: CrewPolicy, in_a_row: int) -> timedelta:
    """Before the next generation: doubled with each error that follows another, up to five minutes."""
    doubled = policy.backoff.total_seconds() * 2.0 ** min(max(in_a_row - 1, 0), 30)
    return min(timedelta(seconds=doubled), MAX_BACKOFF)


def replaced_with(strategy: CrewStrategy, erred: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the other members, by number, begin afresh when one errs."""
    others = tuple(number for number in numbers if number != erred)
    match strategy:
        case CrewStrategy.ONE_FOR_ALL:
            return others
        case CrewStrategy.REST_FOR_ONE:
            return tuple(number for number in others if number > erred)
        case _:
            return ()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].removesuffix("; its last lines:") if text.strip() else "no reason was given"
