"""What a forked child of this program must not keep: a copy of our lock on the home, or of our line to the keeper.

A program may fork whenever it likes, by `multiprocessing` above all. The child gets a copy of every descriptor, and by
such a copy a home would stay locked, and a keeper believe in its manager, long after that has ended.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Held(Protocol):
    def forked(self) -> None:
        """In the child: close the copy and do nothing else, for all the rest is shared with the parent."""


#: Of the whole process, for it is the whole process that is copied.
_HELD: weakref.WeakSet[Held] = weakref.WeakSet()


def keep_from_children(held: Held) -> None:
    """Until `held` is garbage."""
    _HELD.add(held)


def _forked() -> None:
    for held in list(_HELD):
        with contextlib.suppress(OSError):
            held.forked()


os.register_at_fork(after_in_child=_forked)
