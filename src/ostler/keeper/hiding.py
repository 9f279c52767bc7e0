"""Out of the sight of agents of the same user: neither our memory nor our descriptors can be read by them."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4
#: The first words of the keeper's program, before a line of ours is read: to execute a program makes a process
#: readable again, and who opens its memory in that moment keeps it open.
HIDE = f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_DUMPABLE}, 0, 0, 0, 0)"


def hide() -> None:
    """It holds for what this process forks, until that executes something."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
