"""How an agent is ended, and how that went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from ostler.model.bounds import Interval
from ostler.model.instance import AgentInstance
from ostler.model.record import Record
from ostler.model.text import plain_text_faults
from ostler.model.validation import Fault, all_are, shown

MAX_REASON = 2000


@dataclass(frozen=True, kw_only=True)
class TerminationOptions(Record):
    #: 1 s to 5 min; zero means at once (`immediate()`).
    graceful_timeout: Annotated[timedelta, Interval(ge=timedelta(0), le=timedelta(minutes=5))] = timedelta(seconds=10)
    force_if_timeout: bool = True
    reason: str | None = None
    persist_final_state: bool = False

    @classmethod
    def default(cls) -> TerminationOptions:
        return cls()

    @classmethod
    def immediate(cls) -> TerminationOptions:
        return cls(graceful_timeout=timedelta(0), force_if_timeout=True, reason="Immediate termination requested")

    def rules(self) -> Iterator[Fault]:
        yield from plain_text_faults("reason", self.reason, MAX_REASON)
        grace = self.graceful_timeout
        if all_are(timedelta, grace) and timedelta(0) < grace < timedelta(seconds=1):
            yield Fault(
                field="graceful_timeout",
                bound="must be 1 s to 5 min, or 0 for at once",
                value=shown(grace),
            )


@dataclass(frozen=True, kw_only=True)
class TerminationResult(Record):
    success: bool
    was_graceful: bool
    error_message: str | None = None
    final_instance: AgentInstance | None = None
    duration: timedelta = timedelta(0)

    @classmethod
    def successful(cls, instance: AgentInstance, was_graceful: bool, duration: timedelta) -> TerminationResult:
        return cls(success=True, was_graceful=was_graceful, final_instance=instance, duration=duration)

    @classmethod
    def failed(cls, error: str) -> TerminationResult:
        return cls(success=False, was_graceful=False, error_message=error)
