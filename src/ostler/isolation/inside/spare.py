"""A process forked ahead of its time: the next agent takes it over, and does not wait for a fork.

A fork copies no memory, but each page is copied when it is first written, and taking the first steps of an agent
writes hundreds. A spare has taken them already when its agent comes. The keeper has the other end of its line.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from typing import Any

from ostler.keeper.forking import fork_for_keeper
from ostler.keeper.protocol import Line

#: What it is to become: how to settle in, and its descriptors.
Order = tuple[Mapping[str, Any], list[int]]


def fork_spare() -> tuple[int, Line]:
    """Its pid and the other end of its line; in the spare itself 0, and the line on which its order comes.

    Raises `OSError`.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = fork_for_keeper()
    except OSError:
        ours.close()
        its.close()
        raise
    (its if pid else ours).close()
    return pid, Line(ours if pid else its)


def await_order(line: Line) -> Order:
    """In the spare. It ends by itself when it is not needed any more."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while True:
        poll.poll()
        try:
            heard = line.receive()
        except BlockingIOError:
            continue
        if heard is None:
            os._exit(0)
        line.sock.detach()  # closed with all that is not the agent's
        return heard[0]["settle"], heard[1]
