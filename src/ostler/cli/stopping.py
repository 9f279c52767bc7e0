"""Ctrl-C and SIGTERM while turns are played: the first calls the work off, the second ends the program at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ostler.cli.output import plain

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: As shells tell a program that a signal has ended.
_BY_SIGNAL = 128
_SHOW_CURSOR = "\033[?25h"


class Stopping:
    """Heard by Python itself and not by the event loop, which may be held up by the very brain that hangs."""

    def __init__(self) -> None:
        #: The exit code that the first signal asks for.
        self.code: int | None = None
        #: What to say at once; None while there is nothing to go on with.
        self.hint: Callable[[], str] | None = None
        #: Whether a progress bar stands on the line, and hides the cursor.
        self.has_bar = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        code = _BY_SIGNAL + number
        if self.code is not None or self._loop is None or self._task is None or self._task.done():
            if self.has_bar:
                _write(_SHOW_CURSOR)
            # Not by an exception: threads in which something hangs would be waited for.
            os._exit(code)
        self.code = code
        if self.hint is not None:
            _write(("\n" if self.has_bar else "") + f"ostler: {plain(self.hint())}\n")
        self._loop.call_soon_threadsafe(self._task.cancel)

    def watch(self) -> None:
        """The task that runs now is the one to call off."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    @contextmanager
    def heard(self) -> Iterator[None]:
        before = {one: signal.signal(one, self) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _write(text: str) -> None:
    """Past the buffer: a signal may come while that is being written."""
    os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))
