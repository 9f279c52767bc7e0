"""Who is at the other end of a connection, held fast: by a descriptor of the process, never by a number alone."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct

from ostler.keeper.tree import descendants, stat

#: Since Linux 6.5; has no name in Python before 3.14.
_SO_PEERPIDFD = 77
_INT = struct.calcsize("i")
#: An ancestor may end while the ancestry is walked; then its children have another.
_WALKS = 3
_STRANGER = "only the user of this keeper and root may speak to it"
_AGENT = "no agent may speak to its keeper, nor what an agent has started"
_UNKNOWN = (
    "it cannot be told whether an agent asks, for a process above it has ended or cannot be read; if /proc is mounted"
    " with hidepid, add this user to its gid"
)


class Peer:
    """The process that made a connection. `pidfd` is -1 when it is gone, and nobody can say who it was."""

    def __init__(self, sock: socket.socket) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._pid, self._uid, _ = struct.unpack("3i", credentials)
        self.pidfd = _hold(sock, self._pid)

    def is_alive(self) -> bool:
        """A descriptor of a process can be read once that has ended."""
        if self.pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def refusal(self) -> str:
        """Why it may not speak; empty when it may: our user or root, but no agent, nor anything that an agent has
        started, which are our descendants.

        Whoever is dead, or whose ancestors cannot be told, may not: an agent's child may have connected and left the
        connection to its parent.
        """
        if self._uid not in {0, os.geteuid()}:
            return _STRANGER
        found = None
        for _ in range(_WALKS):
            found = descends_from_us(self._pid)
            if found is not None:
                break
        # Asked last: it lived all the while, so the number that was looked at was its own.
        if found is None or not self.is_alive():
            return _UNKNOWN
        return _AGENT if found else ""

    def close(self) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.pidfd)
            self.pidfd = -1


def _hold(sock: socket.socket, pid: int) -> int:
    try:
        held: int = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT))[0]
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return -1  # it is reaped: its number may be anyone's
    else:
        return held
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def descends_from_us(pid: int) -> bool | None:
    """None when it cannot be said."""
    begun: int | None = None
    child = 0
    while pid > 1:
        if pid == os.getpid():
            return True
        found = stat(pid)
        if found is None:
            return _hidden(pid, child)
        # A parent that began after its child is another with the number of one that has ended.
        if begun is not None and found.process.start_time > begun:
            return None
        begun, child, pid = found.process.start_time, pid, found.parent
    return False if begun is not None else None


def _hidden(pid: int, child: int) -> bool | None:
    """The same for one that cannot be read, of which perhaps a `child` is known: /proc may show to each user only its
    own, and of those none that hides itself, as a manager does.
    """
    if os.geteuid() == 0:
        return None  # root can read all, so it has ended
    try:
        os.kill(pid, 0)
        found = _is_below_us(pid)
    except PermissionError:
        found = False  # another user's; no agent becomes one, for agents gain no rights
    except OSError:
        return None
    seen = stat(child) if child else None
    # Still its parent, so it was that one whom we looked at, and not a later one with its number.
    return found if not child or (seen is not None and seen.parent == pid) else None


def _is_below_us(pid: int) -> bool | None:
    """Seen from above. One below us that cannot be read either may be the one who has started it."""
    below = descendants(os.getpid())
    if pid in below:
        return True
    return None if any(stat(one) is None for one in below) else False
