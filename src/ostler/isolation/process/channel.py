"""The manager's end of the channel to one agent: whole messages in, whole messages out, nothing believed unread."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ostler.isolation.backlog import MAX_WAITING, MAX_WEIGHTY
from ostler.isolation.wire import LONG_KINDS, Joiner, Packet, Sender, WireError, decoded, encode, read, receive

#: So much is read in one turn of the loop, and for so long, so that one talkative agent does not keep it from others.
_BYTES_PER_TURN = 64 * 1024
_SECONDS_PER_TURN = 0.001
#: More cannot lie in a socket; what still comes is said by a process that should be dead.
_MOST_LEFT = 4096
#: So many packets may wait for an agent that does not read, before its callers have to wait too.
_FULL = 256
#: More than this an agent cannot have said and not got rid of: what waits with it, and what lies in the socket.
_BACKLOG = MAX_WEIGHTY + MAX_WAITING + _MOST_LEFT
_LONG = re.compile(rf'\{{"t":"({"|".join(LONG_KINDS)})"'.encode())


class Channel:
    """`heard` gets each message; `left` is told once when the peer is gone, or why it is no longer believed."""

    def __init__(
        self,
        sock: socket.socket,
        attempt: int,
        epoch: int,
        heard: Callable[[dict[str, Any]], None],
        left: Callable[[str | None], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._attempt = attempt
        self._sender = Sender(sock, attempt, epoch)
        self._joiner = Joiner()
        self._heard = heard
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._greeting = False
        #: Numbered messages that an earlier manager did not read. The agent says them again when it answers the hello.
        self._older: list[dict[str, Any]] = []
        self._writing = False
        self._room: list[asyncio.Future[None]] = []
        self._rest: asyncio.Handle | None = None
        #: Nothing is read until then, so that the agent's own side fills up.
        self._held: asyncio.Future[None] | None = None
        #: So many callers wait for an answer that lies behind all that was said, and so much is heard for them.
        self._urgent = self._allowance = 0
        #: What was delivered although the listener had enough.
        self.heard_beyond = 0
        self._loop.add_reader(sock, self._read)

    def greet(self) -> None:
        """Take over from an earlier manager: until the agent says its state to us, all was said to the earlier one."""
        self._greeting = True
        self.put({"t": "hello", "epoch": self._sender.epoch})

    @property
    def is_greeting(self) -> bool:
        return self._greeting

    def put(self, message: Mapping[str, Any]) -> None:
        """Raises `TypeError` or `ValueError` for what is no JSON; to a peer that has left it says nothing."""
        self.send(encode(message, paths=message["t"] == "begin"))  # what else is in it was checked before

    def send(self, body: bytes) -> None:
        if not self._open:
            return
        try:
            through = self._sender.put(body)
        except OSError:
            return  # the reader sees the end as well, after what the agent said before it
        if not through and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._write)

    async def has_room(self) -> None:
        """Until the agent has read enough of what waits for it."""
        while self._open and len(self._sender) > _FULL:
            woken: asyncio.Future[None] = self._loop.create_future()
            self._room.append(woken)
            await woken

    @property
    def held(self) -> asyncio.Future[None] | None:
        return self._held

    def hold(self, until: asyncio.Future[None]) -> None:
        """The listener has enough for now. Read no more until then, or until `release`."""
        if self._urgent and self._allowance > 0:
            self._allowance -= 1
            self.heard_beyond += 1
        elif self._open and self._held is None:
            self._held = until
            self._loop.remove_reader(self._sock)
            until.add_done_callback(self._go_on_reading)

    def release(self) -> None:
        """It is about to end: all that it still says is heard."""
        if self._held is not None:
            self._go_on_reading(self._held)

    @contextlib.contextmanager
    def heard_out(self) -> Iterator[None]:
        """A caller waits for an answer that may lie behind all that was said before, so that is heard first.

        No more of it than an agent can have on its own side: one that goes on and on has to wait again.
        """
        self._urgent += 1
        self._allowance = _BACKLOG
        self.release()
        try:
            yield
        finally:
            self._urgent -= 1

    def _go_on_reading(self, held: asyncio.Future[None]) -> None:
        if self._held is held:
            self._held = None
            if self._open and self._rest is None:
                self._go_on()

    def close(self) -> None:
        """The keeper has an end of its own, so this alone ends nothing."""
        if not self._open:
            return
        self._open = False
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._wake()

    def drain(self) -> None:
        """Hear all that lies there already, to the last word. The agent has ended, or is about to be left."""
        for _ in range(_MOST_LEFT):
            if not (self._open and self._read_one()):
                break
        if self._open:
            self._hear_older()

    def _read(self) -> None:
        began, size = time.perf_counter(), 0
        while self._open and (got := self._read_one()):
            size += got
            spent = time.perf_counter() - began
            if self._held is not None:
                return
            if size >= _BYTES_PER_TURN or spent >= _SECONDS_PER_TURN:
                if self._open:
                    self._pause(spent)
                return

    def _pause(self, spent: float) -> None:
        """The others' turn. One that takes long to hear waits as long again: half the loop's time is theirs."""
        self._loop.remove_reader(self._sock)
        if spent < _SECONDS_PER_TURN:
            self._rest = self._loop.call_soon(self._go_on)
        else:
            self._rest = self._loop.call_later(spent, self._go_on)

    def _go_on(self) -> None:
        self._rest = None
        if self._held is None:
            self._loop.add_reader(self._sock, self._read)

    def _read_one(self) -> int:
        """How many bytes came; 0 when there is nothing more now."""
        try:
            packet = receive(self._sock)
        except BlockingIOError:
            return 0
        except OSError:
            packet = None
        if packet is None:
            self._end(None)
            return 0
        try:
            message = self._message(packet)
        except WireError as error:
            self._end(str(error))
            return 0
        if message is not None:
            self._heard(message)
        return len(packet)

    def _message(self, packet: bytes) -> dict[str, Any] | None:
        piece = read(packet)
        if piece.attempt != self._attempt:
            raise WireError(f"a packet of attempt {piece.attempt}")
        if piece.epoch != self._sender.epoch:
            return self._unheard(piece)
        if not self._greeting:
            return self._joined(piece)
        try:
            message = self._joined(piece)
        except WireError:
            return None  # the rest of a message that an earlier manager began to read
        if message is None or message["t"] != "state":
            return None
        self._greeting = False
        self._older.clear()
        return message

    def _unheard(self, piece: Packet) -> dict[str, Any] | None:
        """Meant for an earlier manager, which did not read it.

        What is held by the agent it says again to us, in order with what the earlier manager read and did not commit.
        So numbered messages count only if the agent ends before it does. News are said only once.
        """
        if piece.epoch > self._sender.epoch or not (piece.first and piece.last):
            return None
        try:
            message = decoded(piece.body)
        except WireError:
            return None
        if message["t"] != "say":
            return None
        if self._greeting and message.get("number"):
            self._older.append(message)
            return None
        return message

    def _hear_older(self) -> None:
        older, self._older = self._older, []
        for message in older:
            self._heard(message)

    def _joined(self, piece: Packet) -> dict[str, Any] | None:
        if piece.first and not piece.last and not _LONG.match(piece.body):
            raise WireError("more in one message than may be said unasked")
        message = self._joiner.take(piece)
        if message is not None and not piece.first and message["t"] not in LONG_KINDS:
            raise WireError("a long message that hides what it is")
        return message

    def _end(self, why: str | None) -> None:
        self._hear_older()
        self.close()
        self._left(why)

    def _write(self) -> None:
        try:
            through = self._sender.flush()
        except OSError:
            through = True
        if through:
            self._writing = False
            self._loop.remove_writer(self._sock)
        if len(self._sender) <= _FULL:
            self._wake()

    def _wake(self) -> None:
        room, self._room = self._room, []
        for woken in room:
            if not woken.done():
                woken.set_result(None)
