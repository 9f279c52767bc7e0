"""How the manager's program is shut off from its agents, which run as its user, and from its own forks.

A program may fork at any time, above all by `multiprocessing`. The child gets a copy of every descriptor; with a copy
of the lock a home would stay locked long after its manager has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import weakref
from pathlib import Path
from typing import Protocol

from ostler.home import KEEPER
from ostler.keeper import protocol

_PR_SET_DUMPABLE = 4


def is_kept(home: Path) -> bool:
    """Whether there may be agents that lived on: a keeper that ends in order takes its socket along."""
    return (home / KEEPER / protocol.SOCKET).exists()


def harden() -> None:
    """No agent may look into this program, and there must be room for a socket to each."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Held(Protocol):
    def forked(self) -> None:
        """In the child: close the copy and do nothing else, for all the rest is shared with the parent."""


#: Of the whole process, because a fork copies the whole process.
_HELD: weakref.WeakSet[Held] = weakref.WeakSet()


def keep_from_children(held: Held) -> None:
    """Until `held` is garbage."""
    _HELD.add(held)


def _forked() -> None:
    for held in list(_HELD):
        with contextlib.suppress(OSError):
            held.forked()


os.register_at_fork(after_in_child=_forked)
