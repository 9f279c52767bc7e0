"""Children of the keeper that nobody knew, seen one after the other in short looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ostler.keeper import tree
from ostler.keeper.tree import Process, Stat

#: So long nobody new may be seen before a blow is over, or a box is said to be empty.
QUIET_SECONDS = 0.002


class Orphans:
    """`known` are those who are in a box or in none; `adopt` finds out where another belongs, if that can be said."""

    def __init__(self, known: set[int], adopt: Callable[[Process], bool]) -> None:
        self._seen = known
        self._adopt = adopt

    def look(self) -> tuple[list[Process], list[Stat]]:
        """Those who live, now known to a box or as strangers, and those who are dead already."""
        newborn: list[Process] = []
        passed: list[Stat] = []
        for pid in tree.children(os.getpid()):
            found = None if pid in self._seen else tree.stat(pid)
            if found is None:
                continue
            if found.is_dead:
                self._seen.add(pid)
                passed.append(found)
            elif self._adopt(found.process):
                self._seen.add(pid)
                newborn.append(found.process)
        return newborn, passed

    def until_quiet(self) -> tuple[list[Process], list[Stat]]:
        """One who forks and leaves is too fast for a look at all; its traces are here, orphans or what is left of them.

        Zombies of the first look were there before, and wait only to be reaped.
        """
        newborn, _ = self.look()
        passed: list[Stat] = []
        end = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            more, dead = self.look()
            newborn += more
            passed += dead
        return newborn, passed
