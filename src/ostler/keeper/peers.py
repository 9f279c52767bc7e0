"""Who may speak to the keeper: its user and root, but no agent and nothing that an agent started."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

from ostler.keeper import tree

_SO_PEERPIDFD = 77  #: Linux 6.5; no name in Python before 3.14
#: A process above the peer may end while the way up is walked; then its children have another parent.
_WALKS = 3


def refusal_of(sock: socket.socket) -> str:
    """Why the process at the other end may not speak; "" when it may.

    Agents descend from the keeper. A dead peer may not speak, because a child of an agent can connect, end, and leave
    the socket to the agent.
    """
    pid, uid, _ = _credentials(sock)
    if uid not in {0, os.geteuid()}:
        return "only the user of this keeper and root may speak to it"
    descriptor = peer_descriptor(sock)
    if descriptor < 0:
        return "the process that connected has ended"
    try:
        descends = None
        for _ in range(_WALKS):
            descends = descends_from_keeper(pid)
            if descends is not None:
                break
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(0) or descends is None:  # checked last: it lived all the while, so the pid was its own
            return (
                "it cannot be told whether an agent asks, because a process above it has ended or cannot be read; "
                "if /proc is mounted with hidepid, add this user to its gid"
            )
        return "no agent may speak to its keeper" if descends else ""
    finally:
        os.close(descriptor)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


def peer_descriptor(sock: socket.socket) -> int:
    """A pidfd of the process that connected; -1 when it has ended."""
    pid = _credentials(sock)[0]
    try:
        return int(struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def descends_from_keeper(pid: int) -> bool | None:
    """None when it cannot be told."""
    started: int | None = None
    child = 0
    while pid > 1:
        if pid == os.getpid():
            return True
        status = tree.stat(pid)
        if status is None:
            return _hidden_descends(pid, child)
        if started is not None and status.process.start_time > started:
            return None  # a parent that is younger than its child is another process with a reused pid
        started, child, pid = status.process.start_time, pid, status.parent
    return False if started is not None else None


def _hidden_descends(pid: int, child: int) -> bool | None:
    """The same for a process that cannot be read: /proc may show to each user only its own, and hide even a manager."""
    if os.geteuid() == 0:
        return None  # root can read all, so it has ended
    try:
        os.kill(pid, 0)
        descends = _is_below_keeper(pid)
    except PermissionError:
        descends = False  # of another user; no agent becomes one, because agents gain no rights
    except OSError:
        return None
    status = tree.stat(child) if child else None
    # Still its parent, so it was that process, and not a later one with its pid.
    return descends if not child or (status is not None and status.parent == pid) else None


def _is_below_keeper(pid: int) -> bool | None:
    """Looked for from above. None: one below the keeper that cannot be read either may have started it."""
    below = _descendants(os.getpid())
    if pid in below:
        return True
    return None if any(tree.stat(other) is None for other in below) else False


def _descendants(pid: int) -> set[int]:
    below: set[int] = set()
    waiting = [pid]
    while waiting:
        new = [child for child in tree.children(waiting.pop()) if child not in below]
        below.update(new)
        waiting += new
    return below
