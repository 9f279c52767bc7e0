"""The manager's connection to one agent process: lines of JSON, read and written on the manager's loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ostler.agent_process.framing import LineReader, ProtocolError, encode
from ostler.isolation.hardening import keep_from_children
from ostler.isolation.held.send_buffer import SendBuffer

_RECEIVE = 1 << 18
#: So long messages are dispatched before the loop has another turn, so that one agent does not keep it.
_SECONDS_PER_TURN = 0.001
#: An agent cannot hold more messages than this, so an answer lies behind at most so many (see `Outbox`).
_BACKLOG = 110_000


class Channel:
    """`on_message` gets each message in order; `on_closed` comes once, with a sentence for a broken protocol."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[dict[str, Any]], None], on_closed: Callable[[str | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = LineReader(from_agent=True)
        self._queue: deque[dict[str, Any]] = deque()
        self._buffer = SendBuffer(sock)
        self._hold: asyncio.Future[None] | None = None
        #: Callers that wait for an answer behind the backlog, and how many messages are delivered for them.
        self._hurried = self._allowance = 0
        self.delivered_beyond = 0  #: messages that were delivered although the listener had enough
        self._again: asyncio.Handle | None = None
        self._at_end = False
        self._loop.add_reader(sock.fileno(), self._readable)
        keep_from_children(self)

    @property
    def held(self) -> asyncio.Future[None] | None:
        return self._hold

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    def send(self, *messages: Mapping[str, Any]) -> None:
        self.write(b"".join(encode(message, paths=message["t"] == "begin") for message in messages))

    def write(self, body: bytes) -> None:
        if self.is_open:
            self._buffer.write(body)

    def hold(self, until: asyncio.Future[None]) -> None:
        """Deliver nothing before this is done (back-pressure): the agent's messages wait in its outbox."""
        if self._hurried and self._allowance > 0:
            self._allowance -= 1
            self.delivered_beyond += 1
        elif self._hold is None and self.is_open:
            self._hold = until
            self._loop.remove_reader(self._sock.fileno())
            until.add_done_callback(self._released)

    def release(self) -> None:
        """Go on although the listener has enough: the agent is about to end."""
        if self._hold is not None:
            self._released(self._hold)

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """While a caller waits for an answer that lies behind the backlog, the backlog is delivered.

        Not more than an agent can hold: one that goes on and on has to wait again.
        """
        self._hurried += 1
        self._allowance = _BACKLOG
        self.release()
        try:
            yield
        finally:
            self._hurried -= 1

    def _released(self, hold: asyncio.Future[None]) -> None:
        if self._hold is not hold:
            return
        self._hold = None
        if self.is_open and self._again is None:
            if not self._at_end:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            self._again = self._loop.call_soon(self._dispatch)

    def _readable(self) -> None:
        if self._again is None:  # else what was read last is not dispatched yet: the agent has to wait
            self._receive()
            self._dispatch()

    def _receive(self) -> bool:
        """Whether something was read."""
        try:
            data = self._sock.recv(_RECEIVE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        reason = None
        try:
            if data:
                self._queue.extend(self._reader.feed(data))
                return True
        except ProtocolError as error:
            reason = str(error)
        self._at_end = True
        self._loop.remove_reader(self._sock.fileno())
        if reason is not None:
            self._break_off(reason)
        return False

    def _break_off(self, reason: str) -> None:
        """What came before the fault still counts."""
        queue, self._queue = self._queue, deque()
        for message in queue:
            self._on_message(message)
        if self.is_open:
            self.close()
            self._on_closed(reason)

    def _dispatch(self) -> None:
        self._again = None
        end = time.perf_counter() + _SECONDS_PER_TURN
        while self._queue and self._hold is None:
            self._on_message(self._queue.popleft())
            if time.perf_counter() >= end:
                break
        if not self.is_open or self._hold is not None:
            return
        if self._queue:
            self._again = self._loop.call_soon(self._dispatch)
        elif self._at_end:
            self.close()
            self._on_closed(None)

    def drain(self) -> None:
        """The agent has ended: deliver all that it wrote, also what is held back."""
        while self.is_open and not self._at_end and self._receive():
            pass
        while self._queue:
            self._on_message(self._queue.popleft())

    def forked(self) -> None:
        """In a forked child: without a word to the loop, which is that of the parent."""
        self._sock.close()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self.is_open:
            self._loop.remove_reader(self._sock.fileno())
            self._buffer.close()
            self._sock.close()
