"""A process that an agent forks has its memory, and with it its channel, its loop and its handlers.

It is not the agent: it must neither answer for it, nor take the signals that are meant for it, nor pass on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

_ASYNCIO = "asyncio.unix_events"


def part_children(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    """From now on, with whatever is forked from this process."""

    def part() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)  # it is a socket of the agent's: a signal of the child would be heard there
        if getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == _ASYNCIO:
            # Only a loop does something at this handler, and the child's own does not run.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        channel.close()
        loop.stop()  # for one that comes back to it

    os.register_at_fork(after_in_child=part)
