"""The wall around a program whose agents live in processes of their own: they run as its user, and must not look in."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

from ostler import home as home_files
from ostler.keeper import protocol

#: Where the keeper of a home lives in it.
KEEPER = home_files.KEEPER
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
