"""What a process does when it ends in order: what it has registered for its end is run, what it has written is kept.

Python would do so by taking itself apart, object by object. In a process that shares its memory with its siblings
that copies all of it, so it is left out. And it has only so long: a child that is waited for, or a pipe that is not
read, must not keep from its end what was told to end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

#: For all of it together.
SECONDS = 2.0
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
        # Closed, or only read from, or its reader is gone.
        with contextlib.suppress(Exception):
            one.flush()


def forget_what_was_registered() -> None:
    """Before the first fork. It is for the end of all that share it, and not for that of the first."""
    atexit._clear()  # noqa: SLF001 - Python has no other name for it
    registry: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for one in registry:
        one.atexit = False
    # These two are registered once, when they are first needed.
    atexit.register(logging.shutdown)
    if registry:
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # noqa: SLF001 - as above


def take_leave(earlier: Iterable[_Written], code: int) -> None:
    """With the files that were open before this process was forked. May end the process itself, with this code."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    children = sys.modules.get("multiprocessing.util")
    if children is not None:
        # It waits for children without end. They end with the agent, and are asked before.
        atexit.unregister(children._exit_function)  # noqa: SLF001 - what it registers has no other name
    atexit._run_exitfuncs()  # noqa: SLF001 - as above; what goes wrong in them Python prints itself
    flush(earlier)
    flush(files_being_written())
    flush((sys.stdout, sys.stderr))
