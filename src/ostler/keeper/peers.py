"""Who is at the other end of a connection, held fast: by a descriptor of the process, never by a number alone."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct

from ostler.keeper.tree import stat

#: Since Linux 6.5; has no name in Python before 3.14.
_SO_PEERPIDFD = 77
_INT = struct.calcsize("i")
#: An ancestor may end while the ancestry is walked; then its children have another.
_WALKS = 3


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

    def may_speak(self) -> bool:
        """Our user or root; but no agent, nor anything that an agent has started: those are our descendants.

        Whoever is dead, or whose ancestors cannot be told, may not: an agent's child may have connected and left the
        connection to its parent.
        """
        if self._uid not in {0, os.geteuid()}:
            return False
        found = None
        for _ in range(_WALKS):
            found = _descends_from_us(self._pid)
            if found is not None:
                break
        # Asked last: it lived all the while, so the number that was looked at was its own.
        return found is False and self.is_alive()

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


def _descends_from_us(pid: int) -> bool | None:
    """None when it cannot be said."""
    begun: int | None = None
    while pid > 1:
        if pid == os.getpid():
            return True
        found = stat(pid)
        # A parent that began after its child is another with the number of one that has ended.
        if found is None or (begun is not None and found.process.start_time > begun):
            return None
        begun, pid = found.process.start_time, found.parent
    return False if begun is not None else None
