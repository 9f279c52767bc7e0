"""What an agent sends to its manager: one connection, in order, from any thread.

A message is written at once, also while the agent's loop is blocked. Progress and metrics are dropped when the manager
reads too slowly or is away. Signals and token counts are numbered and held until acknowledged; answers are held until
acknowledged, questions until answered. A new manager gets everything that is held. While no manager is connected,
numbered messages and answers are also written to a file, so that they survive the death of the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ostler.agent_process.errors import complain
from ostler.agent_process.framing import MAX_SHORT, MAX_UNSENT, TooLongError, encode
from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL, CallId
from ostler.errors import AgentBusyError, AgentGoneError, ValidationError
from ostler.model.validation import Fault

MAX_DROPPABLE = 1000
MAX_HELD = 100_000
#: Of the messages that may be dropped, and of those that are held until they are acknowledged, each.
MAX_BYTES = 8 << 20
_SEND_AT_ONCE = 1 << 17


class Outbox:
    """The `Voice` of the agent, and what its host writes with."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unsent_path: str) -> None:
        self._loop = loop
        self._unsent_path = unsent_path
        # Reentrant: a garbage collection under the lock may run the agent's code.
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._buffer = bytearray()
        self._watching = self._sending = False
        self._sequence = itertools.count()
        self._droppable: deque[tuple[int, bytes]] = deque()
        self._droppable_bytes = 0
        self._lines: deque[tuple[int, bytes]] = deque()
        self._held: deque[tuple[int, bytes]] = deque()  #: by message number
        self._held_bytes = 0
        self._number = 0
        self._answers: dict[CallId, bytes] = {}
        self._questions: dict[int, tuple[bytes, asyncio.Future[WaitAnswer]]] = {}
        self._question_numbers = itertools.count(1)
        self._spool = -1
        self._spool_size = 0
        self._silent = False  #: in a process that the agent forked
        self.dropped = 0

    # --- the agent's voice ---

    def say(self, message: Message) -> None:
        if isinstance(message, Progress | MetricReported):
            with self._lock:
                self._send_droppable(message)
            return
        with self._lock:
            if self._silent:
                return
            body = _numbered(replace(message, number=self._number + 1))
            if len(self._held) >= MAX_HELD or self._held_bytes + len(body) > MAX_BYTES:
                raise AgentBusyError("the agent says more than its manager can hear; say less, or wait in between")
            self._number += 1
            self._held.append((self._number, body))
            self._held_bytes += len(body)
            self._put(body)

    def _send_droppable(self, message: Message) -> None:
        if self._sock is None:
            self.dropped += 1
            return
        if len(self._droppable) + len(self._lines) >= MAX_DROPPABLE:
            if not self._droppable:
                self.dropped += 1
                return
            self._drop_oldest()
        try:
            fields = _message_fields(message)
            body = encode({**fields, "dropped": self.dropped} if self.dropped else fields)
        except (TypeError, ValueError) as error:
            self.dropped += 1
            complain(f"what the agent said cannot leave its process: {error}")
            return
        self._droppable.append((next(self._sequence), body))
        self._droppable_bytes += len(body)
        while self._droppable_bytes > MAX_BYTES:
            self._drop_oldest()
        self._send()

    def _drop_oldest(self) -> None:
        self.dropped += 1
        self._droppable_bytes -= len(self._droppable.popleft()[1])

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        future: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        number = next(self._question_numbers)
        body = encode(_question_fields(number, wait))
        with self._lock:
            self._questions[number] = (body, future)
            self._put(body, spool=False)
        try:
            return await future
        except asyncio.CancelledError:
            self.tell({"t": "unask", "id": number})
            raise
        finally:
            with self._lock:
                self._questions.pop(number, None)

    def answered(self, number: int, reply: WaitAnswer | str) -> None:
        """The manager answered a question; a string says why there is no answer."""
        _, future = self._questions.get(number, (b"", None))
        if future is None:
            return
        if future.get_loop() is self._loop:
            _resolve(future, reply)
        else:  # the agent may wait on a loop of its own in another thread
            future.get_loop().call_soon_threadsafe(_resolve, future, reply)

    # --- for the host ---

    def tell(self, message: Mapping[str, Any]) -> None:
        """To the present manager only."""
        body = encode(message)
        with self._lock:
            self._put(body, spool=False)

    def answer(self, call: CallId, body: bytes) -> None:
        """Held until a manager acknowledges it."""
        with self._lock:
            self._answers[call] = body
            self._put(body)

    def repeat_answer(self, call: CallId) -> bool:
        with self._lock:
            body = self._answers.get(call)
            if body is not None:
                self._put(body, spool=False)
        return body is not None

    @property
    def unacknowledged(self) -> list[CallId]:
        return list(self._answers)

    @property
    def open_questions(self) -> list[int]:
        return list(self._questions)

    def acknowledged(self, calls: Iterable[CallId], number: int) -> None:
        with self._lock:
            for call in calls:
                self._answers.pop(call, None)
            while self._held and self._held[0][0] <= number:
                self._held_bytes -= len(self._held.popleft()[1])

    def connect(self, sock: socket.socket, welcome: Mapping[str, Any]) -> None:
        """A manager said hello: it gets the welcome, then all that is held."""
        with self._lock:
            self.disconnect(spool=False)
            self._sock = sock
            self._droppable.clear()
            self._droppable_bytes = 0
            self._lines.clear()
            lines = [encode({**welcome, "dropped": self.dropped}), *(body for _, body in self._held)]
            lines += [*self._answers.values(), *(body for body, _ in self._questions.values())]
            self._lines.extend((next(self._sequence), body) for body in lines)
            self._close_spool()
            self._send()

    def disconnect(self, *, spool: bool = True) -> None:
        """The manager is gone, or another one has come."""
        with self._lock:
            sock, self._sock = self._sock, None
            self._buffer.clear()
            if sock is None:
                return
            if self._watching:
                self._watching = False
                self._loop.call_soon_threadsafe(self._loop.remove_writer, sock.fileno())
            self._loop.call_soon_threadsafe(_close, self._loop, sock)
            if spool:
                for body in (*(body for _, body in self._held), *self._answers.values()):
                    self._write_spool(body)

    def drain(self, seconds: float) -> None:
        """Before the process ends."""
        end = time.monotonic() + seconds
        poll = select.poll()
        while True:
            with self._lock:
                sock = self._sock
                if sock is None or self._send() or (left := end - time.monotonic()) <= 0:
                    return
            poll.register(sock, select.POLLOUT)
            poll.poll(left * 1000)

    def silence(self) -> None:
        """In a process that the agent forked: it must not speak for the agent, by socket or by file."""
        self._lock = threading.RLock()  # another thread, which is not in this process, may hold the old one
        self._silent = True
        self._sock = None  # closed by the host
        self._buffer.clear()
        self._watching = self._sending = False
        if self._spool >= 0:
            os.close(self._spool)
            self._spool = -1

    # --- writing ---

    def _put(self, body: bytes, *, spool: bool = True) -> None:
        """With the lock held. `spool`: also for the next manager, where there is none now."""
        if self._sock is not None:
            self._lines.append((next(self._sequence), body))
            self._send()
        elif spool:
            self._write_spool(body)

    def _send(self) -> bool:
        """With the lock held. Whether everything is written."""
        if self._sending or self._sock is None:
            return self._sock is None
        self._sending = True
        try:
            while self._fill():
                del self._buffer[: self._sock.send(self._buffer)]
        except BlockingIOError:
            if not self._watching:
                self._watching = True
                self._loop.call_soon_threadsafe(self._watch)
            return False
        except OSError:
            self.disconnect()
        finally:
            self._sending = False
        return True

    def _fill(self) -> bool:
        while len(self._buffer) < _SEND_AT_ONCE and (self._lines or self._droppable):
            if self._droppable and (not self._lines or self._droppable[0][0] < self._lines[0][0]):
                body = self._droppable.popleft()[1]
                self._droppable_bytes -= len(body)
            else:
                body = self._lines.popleft()[1]
            self._buffer += body
        return bool(self._buffer)

    def _watch(self) -> None:
        with self._lock:
            if self._sock is not None and self._watching:
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            if self._sock is not None and self._send() and self._sock is not None:
                self._watching = False
                self._loop.remove_writer(self._sock.fileno())

    def _write_spool(self, body: bytes) -> None:
        if self._silent or self._spool_size + len(body) > MAX_UNSENT:
            return
        with contextlib.suppress(OSError):
            if self._spool < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._spool, self._spool_size = os.open(self._unsent_path, flags, 0o600), 0
            if os.write(self._spool, body) == len(body):
                self._spool_size += len(body)
            else:  # the disk is full; half a line would spoil the one after it
                os.ftruncate(self._spool, self._spool_size)

    def _close_spool(self) -> None:
        if self._spool >= 0:
            os.close(self._spool)
            self._spool, self._spool_size = -1, 0
            with contextlib.suppress(OSError):
                os.unlink(self._unsent_path)


def _close(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    if sock.fileno() >= 0:
        loop.remove_reader(sock.fileno())
        sock.close()


def _resolve(future: asyncio.Future[WaitAnswer], reply: WaitAnswer | str) -> None:
    if future.done():
        return
    if isinstance(reply, str):
        future.set_exception(AgentGoneError(reply))
    else:
        future.set_result(reply)


def _numbered(message: Message) -> bytes:
    try:
        body = encode(_message_fields(message))
    except TooLongError:
        body = b""
    if not 0 < len(body) <= MAX_SHORT:
        bound = f"must be at most {MAX_SHORT:,} bytes to leave its process; pass a path to larger data"
        raise ValidationError([Fault(field="payload", bound=bound)])
    return body


def _question_fields(number: int, wait: WaitAsked) -> dict[str, Any]:
    call = CURRENT_CALL.get()
    return {
        "t": "ask",
        "id": number,
        "kind": wait.kind,
        "reason": wait.reason,
        "timeout_seconds": None if wait.timeout is None else wait.timeout.total_seconds(),
        "detail": wait.detail,
        "call": None if call is None else call.call_id,
    }


def _message_fields(message: Message) -> dict[str, Any]:
    if isinstance(message, Progress):
        fields = {"kind": "progress", "fraction": message.fraction, "message": message.message}
        return {"t": "say", **fields, "details": message.details}
    if isinstance(message, Signal):
        return {
            "t": "say",
            "kind": "signal",
            "name": message.name,
            "payload": message.payload,
            "number": message.number,
        }
    if isinstance(message, MetricReported):
        return {"t": "say", "kind": "metric", "name": message.name, "value": message.value}
    assert isinstance(message, TokensUsed)  # noqa: S101 - the last kind
    return {"t": "say", "kind": "tokens", "count": message.count, "model": message.model, "number": message.number}
