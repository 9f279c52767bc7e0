"""What an agent says while it works. Plain data, so that it can cross a thread, a pipe or a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far it is: a fraction from 0 to 1, words, or both."""

    fraction: float | None = None
    message: str | None = None
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """A named message to the supervisor of the agent."""

    name: str
    payload: Mapping[str, Any] | None = None
    #: At level process 1, 2, 3 ... per attempt, counted together with `TokensUsed`; elsewhere 0.
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensUsed:
    count: int
    model: str | None = None
    #: As in `Signal`.
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricReported:
    """A number that the agent itself counts, by its own name."""

    name: str
    value: float


Message = Progress | Signal | TokensUsed | MetricReported


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitAsked:
    """It cannot go on without something from outside."""

    kind: str
    reason: str | None = None
    timeout: timedelta | None = None
    detail: Mapping[str, Any] | None = None
    #: Set by the isolation level: which question it is, the same when it is asked again, and in which call it is asked.
    ask_id: UUID | None = None
    call_id: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitAnswer:
    """How a wait ended: `outcome` is the word that was answered, or "timeout"."""

    outcome: str
    answer: Mapping[str, Any] | None = None

    @property
    def timed_out(self) -> bool:
        return self.outcome == "timeout"


class Voice(Protocol):
    """The way from an agent to its manager. An isolation level gives it to the context."""

    def say(self, message: Message) -> None:
        """Returns at once, from any thread; the manager hears it in order."""
        ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        """Awaited on the agent's own loop."""
        ...
