"""What an agent sends to its manager: one connection, in order, from any thread.

A message is written at once, also while the agent's loop is blocked. Progress and metrics are dropped when the manager
reads too slowly or is away. Signals and token counts are numbered and held until acknowledged; answers are held until
acknowledged, questions until answered. A new manager gets everything that is held. While no manager is connected,
numbered messages are also appended to a file, so that they survive the death of the agent.
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
from ostler.agent_process.framing import MAX_UNASKED, TooLongError, encode
from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL, CallId
from ostler.errors import AgentBusyError, AgentGoneError, ValidationError
from ostler.model.validation import Fault

MAX_DROPPABLE = 1000
MAX_HELD = 100_000
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
        self._lines: deque[tuple[int, bytes]] = deque()
        self._held: deque[tuple[int, bytes]] = deque()  #: by message number
        self._number = 0
        self._answers: dict[CallId, bytes] = {}
        self._questions: dict[int, tuple[bytes, asyncio.Future[WaitAnswer]]] = {}
        self._question_numbers = itertools.count(1)
        self._spool = -1
        self.dropped = 0

    # --- the agent's voice ---

    def say(self, message: Message) -> None:
        if isinstance(message, Progress | MetricReported):
            with self._lock:
                self._send_droppable(message)
            return
        with self._lock:
            if len(self._held) >= MAX_HELD:
                raise AgentBusyError("the agent says more than its manager can hear; say less, or wait in between")
            body = self._numbered(replace(message, number=self._number + 1))
            self._number += 1
            self._held.append((self._number, body))
            if self._sock is None:
                self._write_spool(body)
            else:
                self._lines.append((next(self._sequence), body))
                self._send()

    def _numbered(self, message: Message) -> bytes:
        try:
            body = encode(_message_fields(message))
        except TooLongError:
            body = b"x" * (MAX_UNASKED + 1)
        if len(body) > MAX_UNASKED:
            bound = f"must be at most {MAX_UNASKED:,} bytes to leave its process; pass a path to larger data"
            raise ValidationError([Fault(field="payload", bound=bound)])
        return body

    def _send_droppable(self, message: Message) -> None:
        if self._sock is None:
            self.dropped += 1
            return
        try:
            fields = _message_fields(message)
            body = encode({**fields, "dropped": self.dropped} if self.dropped else fields)
        except (TypeError, ValueError) as error:
            self.dropped += 1
            complain(f"what the agent said cannot leave its process: {error}")
            return
        self._droppable.append((next(self._sequence), body))
        if len(self._droppable) + len(self._lines) > MAX_DROPPABLE:
            self._droppable.popleft()
            self.dropped += 1
        self._send()

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        future: asyncio.Future[WaitAnswer] = asyncio.get_running_loop().create_future()
        number = next(self._question_numbers)
        body = encode(_question_fields(number, wait))
        with self._lock:
            self._questions[number] = (body, future)
        self._put(body)
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
        self._put(encode(message))

    def answer(self, call: CallId, body: bytes) -> None:
        """Held until a manager acknowledges it."""
        self._answers[call] = body
        self._put(body)

    def repeat_answer(self, call: CallId) -> bool:
        body = self._answers.get(call)
        if body is not None:
            self._put(body)
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
                self._held.popleft()

    def connect(self, sock: socket.socket, welcome: Mapping[str, Any]) -> None:
        """A manager said hello: it gets the welcome, then all that is held."""
        with self._lock:
            self.disconnect(spool=False)
            self._sock = sock
            self._droppable.clear()
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
                for _, body in self._held:
                    self._write_spool(body)

    def drain(self, seconds: float) -> None:
        """Before the process ends."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                sock = self._sock
                if sock is None or self._send() or (left := end - time.monotonic()) <= 0:
                    return
            select.select([], [sock], [], left)

    # --- writing ---

    def _put(self, body: bytes) -> None:
        with self._lock:
            if self._sock is not None:
                self._lines.append((next(self._sequence), body))
                self._send()

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
            lines = self._lines
            if self._droppable and (not lines or self._droppable[0][0] < lines[0][0]):
                lines = self._droppable
            self._buffer += lines.popleft()[1]
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
        with contextlib.suppress(OSError):
            if self._spool < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                self._spool = os.open(self._unsent_path, flags, 0o600)
            os.write(self._spool, body)

    def _close_spool(self) -> None:
        if self._spool >= 0:
            os.close(self._spool)
            self._spool = -1
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
