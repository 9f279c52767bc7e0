"""What is told about a turn and about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ostler.simulation.engine import Decisions
from ostler.simulation.requests import Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An agent that gave no answer, and what became of it: paused, removed or kept."""

    timed_out: bool
    error_type: str
    message: str
    became: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Performed:
    """An operation that was asked for, and whether it was done."""

    operation: Operation
    agent_name: str
    #: The name of the agent that asked; None: somebody outside, or the policy for failures.
    by: str | None = None
    #: "outside", "policy" or "agent".
    cause: str = "outside"
    done: bool = True
    reason: str | None = None
    #: Of an addition: the name that it got, and how the brain is made again.
    resolved_name: str | None = None
    kind: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    initial_state: Any = None
    #: Of a pause.
    auto_resume_turns: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Only what says something."""
        found: dict[str, Any] = {"operation": self.operation.value, "agent_name": self.agent_name, "cause": self.cause}
        if self.by is not None:
            found["by"] = self.by
        if not self.done:
            return {**found, "done": False, "reason": self.reason}
        if self.operation is Operation.ADD:
            found |= {"resolved_name": self.resolved_name, "kind": self.kind, "params": dict(self.params)}
            found["initial_state"] = self.initial_state
        if self.operation is Operation.PAUSE:
            found["auto_resume_turns"] = self.auto_resume_turns
        return found


@dataclass(frozen=True, kw_only=True)
class TurnReport:
    turn: int
    #: Who went on by itself at the start.
    resumed: tuple[str, ...]
    decisions: Decisions
    failures: Mapping[str, Failure]
    #: In the order in which they were done, those from outside before the turn first.
    operations: tuple[Performed, ...]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    #: The last complete turn.
    turn: int
    #: How many were played by this call.
    played: int
    #: Why the run is over; None when more turns can be played.
    ended: str | None = None
    #: How many times an agent raised or hung, and the first few of them in words.
    failed: int = 0
    first_failures: tuple[str, ...] = ()


#: More failures than these are only counted.
_TOLD = 5


class Tally:
    """Counts over the turns of one run."""

    def __init__(self) -> None:
        self._failed = 0
        self._first: list[str] = []

    def count(self, report: TurnReport) -> None:
        self._failed += len(report.failures)
        for name, one in report.failures.items():
            if len(self._first) >= _TOLD:
                break
            self._first.append(f"{name} in turn {report.turn}, {one.became}: {one.message}")

    def report(self, *, turn: int, played: int, ended: str | None = None) -> RunReport:
        return RunReport(turn=turn, played=played, ended=ended, failed=self._failed, first_failures=tuple(self._first))
