"""What goes between a manager and an agent in a process of its own: messages as JSON, in numbered packets.

Each packet says for which start of the agent and under which manager it was sent. The socket belongs to the keeper as
well, so it outlives a manager; the next one says hello with its own epoch. After hello the agent says again what was
not acknowledged; what lies in the socket from an older epoch counts only for news, and for an agent that ended before
it could answer the hello. A message is one mapping with its kind under "t".

Manager to agent: hello, begin, call, cancel, acks, told, ping, stop. Each may carry acknowledgements: "ack" names
calls whose answers are committed, "heard" the last numbered message that is.
Agent to manager: state, made, answer, say, ask, unask, pong.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Raised when an older peer could not make sense of a newer one.
VERSION = 1
#: Version, flags, attempt, epoch.
_HEADER = struct.Struct("!BBIQ")
_FIRST, _LAST = 1, 2
#: What one packet carries; well below what a socket takes at once.
PIECE = 60_000
#: A longer message is refused where it is made, and is a fault where it arrives.
MAX_MESSAGE = 16 * 1024 * 1024
#: More deeply nested data may be written by one side and not be readable for the other: Python bounds the recursion,
#: and only one side may have raised that bound.
MAX_DEPTH = 500
_NESTS = (dict, list, tuple)
#: The kinds that an agent may send in more than one packet; whatever else it says is short, and so cheap to hear.
LONG_KINDS = ("answer", "ask", "made", "state")
#: What an agent may say unasked.
MAX_SAID = PIECE
_MAX_PACKET = PIECE + _HEADER.size
# Made once: `json.dumps` makes one for every call, and every agent that does so copies the memory for it.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder()


class WireError(Exception):
    """The peer said something that is no message."""


class TooLongError(ValueError):
    """A message that is longer than the channel carries."""


class TooDeepError(ValueError):
    """A message that is nested more deeply than the other side may be able to read."""


@dataclass(frozen=True, slots=True)
class Packet:
    attempt: int
    epoch: int
    first: bool
    last: bool
    body: bytes


def encode(message: Mapping[str, Any], *, paths: bool = False) -> bytes:
    """Raises `TypeError` or `ValueError` for what is no JSON, `TooLongError` and `TooDeepError` for too much of it.

    Text that is no UTF-8 is none either, unless there are `paths` in it: these may have any name, of which Python
    keeps what is no text as single surrogates. With a backslash, JSON can say those too.
    """
    body = _ENCODER.encode(message).encode(errors="backslashreplace" if paths else "strict")
    if len(body) > MAX_MESSAGE:
        raise TooLongError(f"{len(body):,} bytes are more than the {MAX_MESSAGE:,} that go over the channel")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(message):
        raise TooDeepError(f"it is nested more than {MAX_DEPTH} deep")
    return body


def _is_deep(message: Mapping[str, Any]) -> bool:
    """Level by level; it goes round in no circle, or it could not have been written."""
    level: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, Mapping) else one for one in level)
        level = [one for each in inner for one in each if isinstance(one, _NESTS)]
        if not level:
            return False
    return True


def packets(body: bytes, attempt: int, epoch: int) -> Iterator[bytes]:
    """One encoded message, cut into what the socket takes at once."""
    if len(body) <= PIECE:
        yield _HEADER.pack(VERSION, _FIRST | _LAST, attempt, epoch) + body
        return
    last = (len(body) - 1) // PIECE
    for number in range(last + 1):
        flags = (_FIRST if number == 0 else 0) | (_LAST if number == last else 0)
        yield _HEADER.pack(VERSION, flags, attempt, epoch) + body[number * PIECE : (number + 1) * PIECE]


def read(packet: bytes) -> Packet:
    if len(packet) < _HEADER.size or len(packet) > _MAX_PACKET:
        raise WireError(f"a packet of {len(packet)} bytes")
    version, flags, attempt, epoch = _HEADER.unpack_from(packet)
    if version != VERSION or flags & ~(_FIRST | _LAST):
        raise WireError(f"a packet of version {version}, flags {flags}")
    return Packet(attempt, epoch, bool(flags & _FIRST), bool(flags & _LAST), packet[_HEADER.size :])


class Joiner:
    """Puts messages together from their packets. A new first piece drops what was unfinished: its sender died."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def drop(self) -> None:
        self._pieces, self._size = [], 0

    def take(self, packet: Packet) -> dict[str, Any] | None:
        """The message that this packet completes, if it does. Raises `WireError` for what is none."""
        if packet.first:
            if packet.last:
                return decoded(packet.body)
            self.drop()
        elif not self._pieces:
            raise WireError("a packet that continues nothing")
        self._pieces.append(packet.body)
        self._size += len(packet.body)
        if self._size > MAX_MESSAGE:
            raise WireError(f"a message of more than {MAX_MESSAGE:,} bytes")
        if not packet.last:
            return None
        body = b"".join(self._pieces)
        self.drop()
        return decoded(body)


def decoded(body: bytes) -> dict[str, Any]:
    try:
        message = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message that cannot be read: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise WireError("a message without its kind")
    return message


class Sender:
    """Writes messages to a socket that does not block, and holds what it does not take yet."""

    def __init__(self, sock: socket.socket, attempt: int, epoch: int) -> None:
        self._sock = sock
        self._attempt = attempt
        self.epoch = epoch
        self._waiting: deque[bytes] = deque()

    def __len__(self) -> int:
        """Packets that wait for the peer to read."""
        return len(self._waiting)

    def put(self, body: bytes) -> bool:
        """Whether all has gone; if not, call `flush` when the socket takes more. Raises `OSError` when it is gone."""
        self._waiting.extend(packets(body, self._attempt, self.epoch))
        return self.flush()

    def flush(self) -> bool:
        while self._waiting:
            try:
                self._sock.send(self._waiting[0])
            except (BlockingIOError, InterruptedError):
                return False
            self._waiting.popleft()
        return True

    def clear(self) -> None:
        """Forget what waits: it was for a manager that is gone."""
        self._waiting.clear()


def receive(sock: socket.socket) -> bytes | None:
    """One packet; None when the peer has left. Raises `BlockingIOError` when there is none now."""
    try:
        packet = sock.recv(_MAX_PACKET + 1)
    except ConnectionError:
        return None
    return packet or None


def channel() -> tuple[socket.socket, socket.socket]:
    """The manager's end and the agent's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
