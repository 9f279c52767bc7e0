"""Named points at which a test may crash, kill, delay or fail the program.

Code that takes steps accepts a `FaultPoint` and calls it with a dotted name before and after each one. In
production that is `no_fault`, which returns at once. Tests pass a `FaultPlan`.
"""

from __future__ import annotations

import difflib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ostler.clock import Clock, SystemClock
from ostler.ids import IdSource, Uuid7Source

FaultPoint = Callable[[str], None]
Action = Literal["raise", "kill", "sleep", "oserror"]
_ACTIONS: tuple[Action, ...] = ("raise", "kill", "sleep", "oserror")
_SLEEP_SECONDS = 0.05
#: Every point that Ostler passes; a test holds this to the code.
POINTS = frozenset(
    {
        *(f"store.{step}.{when}" for step in ("begin", "save", "commit") for when in ("before", "after")),
        *("store.ack.before", "store.ack.after"),
        *("store.migrate.before", "store.migrate.statement", "store.migrate.after"),
        *(f"spawn.{step}.{when}" for step in ("intent", "start", "ready") for when in ("before", "after")),
        *(f"stop.{step}.{when}" for step in ("intent", "kill", "final") for when in ("before", "after")),
        *(f"prepare.{step}.after" for step in ("mirror", "build", "place")),
        *(f"review.{step}.after" for step in ("commit", "objects", "ref", "files", "index")),
        *("review.ref.before",),
        *(f"retire.{step}.after" for step in ("move", "save", "publish", "remove")),
        *("restart.decide.after", "restart.spawn.before", "restart.spawn.after"),
    }
)


def no_fault(_name: str) -> None:
    """What production passes: nothing ever happens."""


class InjectedCrash(BaseException):
    """Stands for the death of the program at a fault point, for tests that cannot afford a real one."""


@dataclass
class FaultPlan:
    """Acts at the nth visit of one named point, and remembers every point it saw.

    `FaultPlan.parse("store.commit.before:3:kill")` kills the process the third time it passes there.
    """

    name: str = ""
    nth: int = 1
    action: Action = "raise"
    seen: list[str] = field(default_factory=list)
    _visits: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        name, _, rest = text.partition(":")
        nth, _, action = rest.partition(":")
        if not name:
            raise ValueError("a plan read from text must name its point; write point:nth:action")
        chosen: Any = action or "raise"
        return cls(name=name, nth=int(nth or "1"), action=chosen)

    def __setattr__(self, key: str, value: Any) -> None:
        """A plan that can never act would let a test pass that has tried nothing."""
        if key == "name":
            self._require_point(value)
        elif key == "nth" and (type(value) is not int or value < 1):
            raise ValueError(f"nth is counted from 1, so {value!r} never comes")
        elif key == "action" and value not in _ACTIONS:
            raise ValueError(f"unknown fault action {value!r}; use one of {', '.join(_ACTIONS)}")
        super().__setattr__(key, value)

    def _require_point(self, name: Any) -> None:
        # Empty: it only looks on. One that was passed exists, also where it is another's than ours.
        if name == "" or name in POINTS or name in getattr(self, "seen", ()):
            return
        near = difflib.get_close_matches(str(name), sorted(POINTS), n=3) or sorted(POINTS)
        raise ValueError(f"there is no fault point {name!r}; there are {', '.join(near)}")

    def __call__(self, name: str) -> None:
        self.seen.append(name)
        if name != self.name:
            return
        self._visits += 1
        if self._visits == self.nth:
            self._act()

    def _act(self) -> None:
        match self.action:
            case "raise":
                raise InjectedCrash(self.name)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(_SLEEP_SECONDS)
            case "oserror":
                raise OSError(5, f"injected at {self.name}")


@dataclass(frozen=True, kw_only=True)
class Seams:
    """The outside world as a store and a manager see it; tests pass their own."""

    clock: Clock = field(default_factory=SystemClock)
    #: None draws a seed from the system.
    chance: random.Random | None = None
    #: None makes rising ids from the clock and chance.
    ids: IdSource | None = None
    fault: FaultPoint = no_fault

    def id_source(self) -> IdSource:
        return self.ids or Uuid7Source(self.clock, self.chance)
