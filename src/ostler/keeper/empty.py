"""Emptying a unit whose main process has ended: ask what it left to end, then kill it, and prove that nothing is left.

The group is not the whole proof: a process with the rights to it can leave its control group. Such a process is found
by its tag among the children of the keeper.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ostler.keeper import tree
from ostler.keeper.loop import Loop
from ostler.keeper.process_tree import kill_pids, strays
from ostler.keeper.state import State, Unit
from ostler.keeper.tree import Process

#: How long what an agent left has to end by itself after SIGTERM.
ASK_SECONDS = 0.5
#: After this long `stuck` is called with what is left, and killing goes on.
_EMPTY_SECONDS = 5.0
_FIRST_LOOK, _SLOWEST_LOOK, _LATE_LOOK = 0.001, 0.05, 0.2


class Emptier:
    """`is_claimed`: whether a child of the keeper is the main process of a unit or a template."""

    def __init__(self, loop: Loop, state: State, is_claimed: Callable[[int], bool]) -> None:
        self._loop = loop
        self._state = state
        self._is_claimed = is_claimed

    def empty(self, unit: Unit, stuck: Callable[[list[str]], None], done: Callable[[], None]) -> None:
        """`stuck` is called at most once, with sentences; `done` when nothing is left."""
        _Emptying(self, unit, stuck, done).look(_FIRST_LOOK)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop.later(seconds, call)

    def find(self, unit: Unit) -> tuple[set[int], set[int]]:
        """In the group; and when that is empty, what has left it."""
        pids = unit.cell.group.pids(unit.name)
        return pids, set() if pids else strays(self._state.token, unit.name, self._is_claimed)


class _Emptying:
    def __init__(
        self, emptier: Emptier, unit: Unit, stuck: Callable[[list[str]], None], done: Callable[[], None]
    ) -> None:
        self._emptier = emptier
        self._unit = unit
        self._stuck: Callable[[list[str]], None] | None = stuck
        self._done = done
        self._since = time.monotonic()
        self._asked: set[Process] = set()

    def look(self, pause: float) -> None:
        grouped, strayed = self._emptier.find(self._unit)
        if not grouped and not strayed:
            self._done()
            return
        passed = time.monotonic() - self._since
        if passed < ASK_SECONDS and not self._unit.killed and not self._unit.cell.frozen:
            self._ask(grouped | strayed)
        else:
            self._kill(grouped, strayed)
        if passed >= _EMPTY_SECONDS:
            pause = _LATE_LOOK
            self._give_up(grouped | strayed)
        self._emptier.later(pause, lambda: self.look(max(pause, min(pause * 2, _SLOWEST_LOOK))))

    def _ask(self, pids: set[int]) -> None:
        """Each once: TERM, then CONT, because a stopped process hears TERM only when it goes on."""
        for process in {process for pid in pids if (process := tree.living(pid)) is not None} - self._asked:
            self._asked.add(process)
            for number in (signal.SIGTERM, signal.SIGCONT):
                tree.signal_process(process, number)

    def _kill(self, grouped: set[int], strayed: set[int]) -> None:
        if grouped:
            self._unit.cell.group.kill(self._unit.name)
        kill_pids(strayed)

    def _give_up(self, pids: set[int]) -> None:
        if self._stuck is not None:
            stuck, self._stuck = self._stuck, None
            stuck([tree.describe(pid) for pid in sorted(pids)])
