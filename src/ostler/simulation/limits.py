"""How long brains may think and how many at once, and the count of those that would not stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ostler.seams import Clock
from ostler.simulation.view import AgentView

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    clock: Clock
    #: Seconds for one brain.
    timeout: float
    #: How many may think at a time, those that hang included.
    most: int


class Hanging(Generic[_T]):
    """Threads or tasks that were told to stop. One counts as hung from when it should have been gone."""

    def __init__(self, clock: Clock, is_over: Callable[[_T], bool]) -> None:
        self._clock = clock
        self._is_over = is_over
        self._due: dict[_T, float] = {}

    def add(self, one: _T, within: float = 0.0) -> None:
        """It has been told; it may take so many seconds before it counts."""
        self._due[one] = self._clock.mono() + within

    def __len__(self) -> int:
        if not self._due:
            return 0
        self._due = {one: due for one, due in self._due.items() if not self._is_over(one)}
        now = self._clock.mono()
        return sum(due <= now for due in self._due.values())

    def all(self) -> tuple[_T, ...]:
        return tuple(one for one in self._due if not self._is_over(one))


class Stuck:
    """Who still thinks about something that nobody waits for any more, by the view that it was asked with."""

    def __init__(self) -> None:
        self._over: dict[AgentView, Callable[[], bool]] = {}

    def add(self, view: AgentView, is_over: Callable[[], bool]) -> None:
        self._over[view] = is_over

    def __contains__(self, view: AgentView) -> bool:
        is_over = self._over.get(view)
        if is_over is not None and is_over():
            del self._over[view]
            return False
        return is_over is not None
