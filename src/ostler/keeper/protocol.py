"""How a manager and its keeper speak: packets of JSON over a Unix socket, with descriptors beside them.

A request is {"id": n, "op": name, ...}. Its answer is {"id": n, "ok": {...}} or {"id": n, "error": sentence,
"kind": word}. What the keeper says unasked is {"event": name, ...}. One packet is one message, so that a peer that
dies in mid-sentence leaves nothing half said; a message that is too long for a packet travels in a file in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

#: Raised when an older peer could not make sense of a newer one, or the other way round.
VERSION = 1
SOCKET = "keeper.sock"
LOCK = "keeper.lock"
LOG = "keeper.log"
TOKEN = "token"  # noqa: S105 - the name of a file
EXITS = "exits.jsonl"
#: The variable by which a process is known as ours: "<token of the home>:<unit>".
MARK = "OSTLER_MARK"
#: Said at once to one that may not speak at all, with the reason; then the line ends.
REFUSED = "refused"

_MAX_PACKET = 60_000
_MAX_FDS = 8
#: A longer message is refused: nothing that is asked of a keeper needs so much.
MAX_MESSAGE = 8 * 1024 * 1024
#: So many messages may wait for a peer that does not read; then it is taken for gone.
MAX_WAITING = 50_000
_LARGE = b"\x00large"


class ProtocolError(Exception):
    """The peer said something that is no message."""


class LostDescriptorsError(ProtocolError):
    """What came with a message could not be taken: no descriptor is left here."""


class Line:
    """One end of a conversation; never blocks. `send` queues what the socket does not take, `flush` goes on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def is_waiting(self) -> bool:
        """Something could not be sent yet: call `flush` when the socket takes more."""
        return bool(self._waiting)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """The descriptors are copied; they stay the caller's.

        Raises a `ConnectionError` when the peer is gone, another `OSError` when this one message could not be sent:
        most likely no descriptor is left here (EMFILE). Then nothing of it was sent and no copy stays open.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_MESSAGE:
            raise ProtocolError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE}")
        if len(self._waiting) >= MAX_WAITING:
            raise BrokenPipeError("the peer does not read")
        copies: list[int] = []
        try:
            for one in fds:
                copies.append(os.dup(one))  # noqa: PERF401 - those made before one that fails must be closed
            if len(body) > _MAX_PACKET:
                copies.append(_in_memory(body))
                body = _LARGE
        except OSError:
            _close_all(copies)
            raise
        self._waiting.append((body, tuple(copies)))
        self.flush()

    def flush(self) -> None:
        """Raises `OSError` for a message that cannot be sent; that one is dropped, the others still wait."""
        while self._waiting:
            body, fds = self._waiting[0]
            try:
                socket.send_fds(self.sock, [body], fds) if fds else self.sock.send(body)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._waiting.popleft()
                _close_all(fds)
                raise
            self._waiting.popleft()
            _close_all(fds)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """One message and its descriptors, which are the caller's from now on; None when the peer has left.

        Raises `BlockingIOError` when there is none now, and `ProtocolError` for what is no message.
        """
        try:
            body, fds, flags, _ = socket.recv_fds(self.sock, _MAX_PACKET + 1, _MAX_FDS)
        except ConnectionError:
            return None
        if not body:
            _close_all(fds)
            return None
        for one in fds:
            os.set_inheritable(one, False)
        try:
            return _read(body, fds, flags), fds
        except ProtocolError:
            _close_all(fds)
            raise

    def close(self) -> None:
        for _, fds in self._waiting:
            _close_all(fds)
        self._waiting.clear()
        self.sock.close()


def _read(body: bytes, fds: list[int], flags: int) -> dict[str, Any]:
    if flags & socket.MSG_TRUNC:
        raise ProtocolError("a packet is longer than was agreed")
    if flags & socket.MSG_CTRUNC:
        raise LostDescriptorsError("the descriptors of a message were lost: there are more than can be taken")
    try:
        message = json.loads(_read_memory(fds) if body == _LARGE else body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message must be an object, was {type(message).__name__}")
    return message


def _in_memory(body: bytes) -> int:
    descriptor = os.memfd_create("ostler-message", os.MFD_CLOEXEC)
    left = memoryview(body)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_memory(fds: list[int]) -> bytes:
    if not fds:
        raise ProtocolError("a long message came without its text")
    descriptor = fds.pop()
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_MESSAGE:
            raise ProtocolError(f"a message of {size} bytes is longer than {MAX_MESSAGE}")
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def _close_all(fds: Sequence[int]) -> None:
    for one in fds:
        with contextlib.suppress(OSError):
            os.close(one)


def connect(directory: int | str, *, timeout: float = 5.0) -> socket.socket:
    """To the keeper of a directory. By a descriptor of it, for a path may be longer than a socket's address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        if isinstance(directory, int):
            sock.connect(f"/proc/self/fd/{directory}/{SOCKET}")
        else:
            descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{descriptor}/{SOCKET}")
            finally:
                os.close(descriptor)
    except BaseException:
        sock.close()
        raise
    return sock
