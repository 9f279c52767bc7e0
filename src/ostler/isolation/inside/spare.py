"""A process forked ahead of its time: the next agent takes it over, and does not wait for a fork.

A fork copies no memory, but each page is copied when it is first written, and taking the first steps of an agent
writes hundreds. A spare has taken them already when its agent comes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ostler.keeper.forking import fork_for_keeper
from ostler.keeper.protocol import Line

#: What it is to become: how to settle in, and its descriptors.
Order = tuple[Mapping[str, Any], list[int]]


class Spare:
    """The template's end of it."""

    def __init__(self, pid: int, line: Line) -> None:
        self.pid = pid
        self._line = line

    def hand_over(self, settle: Mapping[str, Any], fds: Sequence[int]) -> bool:
        """Whether it took the order; one that has died meanwhile cannot. It is not used again either way."""
        try:
            self._line.send({"settle": settle}, fds)
        except OSError:
            taken = False
        else:
            taken = not self._line.is_waiting
        self._line.close()
        return taken

    def dismiss(self) -> None:
        self._line.close()


def fork_spare() -> Spare | Line:
    """In the template the spare; in the spare itself the line on which its order comes. Raises `OSError`."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = fork_for_keeper()
    except OSError:
        ours.close()
        its.close()
        raise
    if pid == 0:
        ours.close()
        return Line(its)
    its.close()
    return Spare(pid, Line(ours))


def await_order(line: Line) -> Order:
    """In the spare. It ends by itself when it is not needed any more."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while True:
        poll.poll()
        with contextlib.suppress(BlockingIOError):
            heard = line.receive()
            if heard is None:
                os._exit(0)
            line.sock.detach()  # closed with all that is not the agent's
            return heard[0]["settle"], heard[1]
