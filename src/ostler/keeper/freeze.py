"""Freezing cells without blocking the loop: a cell stands still within a second, or goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ostler.keeper.loop import Loop
from ostler.keeper.state import Cell

_SECONDS = 1.0
_FIRST_LOOK, _SLOWEST_LOOK = 0.0002, 0.01


class Freezer:
    """A cell is `frozen` from the first attempt on: nothing may be started in it, and a stop thaws it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def freeze(self, cell: Cell, done: Callable[[], None], failed: Callable[[str], None]) -> None:
        cell.frozen = True
        self._look(cell, time.monotonic() + _SECONDS, _FIRST_LOOK, done, failed)

    def _look(
        self, cell: Cell, end: float, pause: float, done: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        try:
            if not cell.frozen or cell.stopping:
                failed("it was thawed before it stood still")
            elif cell.group.freeze():
                done()
            elif time.monotonic() > end:
                raise TimeoutError(f"it did not stand still within {_SECONDS:g} s")
            else:
                longer = min(pause * 2, _SLOWEST_LOOK)
                self._loop.later(pause, lambda: self._look(cell, end, longer, done, failed))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.thaw(cell)
            failed(str(error))

    @staticmethod
    def thaw(cell: Cell) -> None:
        """Raises `OSError`."""
        cell.group.thaw()
        cell.frozen = False
