"""Named points at which a test may crash, kill, delay or fail the program.

Code that takes steps accepts a `FaultPoint` and calls it with a dotted name before and after each one. In
production that is `no_fault`, which returns at once. Tests pass a `FaultPlan`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FaultPoint = Callable[[str], None]
Action = Literal["raise", "kill", "sleep", "oserror"]
_ACTIONS: tuple[Action, ...] = ("raise", "kill", "sleep", "oserror")
_SLEEP_SECONDS = 0.05


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
        for known in _ACTIONS:
            if (action or "raise") == known:
                return cls(name=name, nth=int(nth or "1"), action=known)
        raise ValueError(f"unknown fault action {action!r}; use one of {', '.join(_ACTIONS)}")

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
