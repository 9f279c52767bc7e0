"""What a process does when it ends in order: what it has registered for its end is run, what it has written is kept.

Python would do so by taking itself apart, object by object. In a process that shares its memory with its siblings
that copies all of it, so it is left out.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import sys
from collections.abc import Iterable
from typing import Any, Protocol

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class _Written(Protocol):
    def flush(self) -> Any: ...


def files_being_written() -> list[_Written]:
    """Those that were opened since the last `gc.freeze`; the text before the bytes that it becomes."""
    # By their types: an object may answer for its class by running code.
    found = [one for one in gc.get_objects() if issubclass(type(one), _KINDS)]
    return sorted(found, key=lambda one: not issubclass(type(one), io.TextIOWrapper))


def flush(files: Iterable[_Written]) -> None:
    for one in files:
        # Closed, or only read from, or nobody takes it any more.
        with contextlib.suppress(Exception):
            one.flush()


def take_leave(earlier: Iterable[_Written]) -> None:
    """With the files that were open before this process was forked."""
    atexit._run_exitfuncs()  # noqa: SLF001 - Python has no other name for it; what goes wrong in them it prints itself
    flush(earlier)
    flush(files_being_written())
    flush((sys.stdout, sys.stderr))
