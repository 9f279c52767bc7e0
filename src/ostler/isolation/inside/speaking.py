"""The agent's way to its manager: everything it says goes over one socket, in order, from whichever thread.

What is said is written at once, also while the agent's loop is blocked. What the socket does not take waits here:
news make room for newer ones, and what counts is kept. Answers and questions are letters: they are held until the
manager has confirmed or settled them, and a new manager gets them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from ostler.agents import Message, MetricReported, Progress, Signal, WaitAnswer, WaitAsked
from ostler.errors import AgentGoneError, ValidationError
from ostler.isolation import wire
from ostler.isolation.backlog import Backlog
from ostler.isolation.inside.telling import complain
from ostler.model import Fault
from ostler.model.record import MAX_COUNT

#: What the manager calls a call.
CallId = int | str

#: The call in which the code that reads it runs; copied into the tasks and worker threads of that call.
CURRENT_CALL_ID: ContextVar[CallId | None] = ContextVar("ostler_current_call_id", default=None)

#: So many answers, and so much of them, are remembered after a manager has confirmed them.
MAX_KEPT = 100
MAX_KEPT_BYTES = 1024 * 1024

_GONE = "the manager has let go of this agent and hears nothing more from it"


class Letter:
    """A message that is already written down."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


class Outbox(Backlog):
    """What was said, and the letters between it, in one order."""

    __slots__ = ()

    def add_letter(self, body: bytes) -> None:
        """Never refused and never dropped: whoever waits for it would wait for ever."""
        self._count += 1
        letter: Any = Letter(body)
        self._weighty.append((self._count, letter))

    def next(self) -> Message | Letter | None:
        waiting = self._next()
        return waiting.popleft()[1] if waiting else None

    def drop_letters(self) -> None:
        waiting: list[tuple[int, Any]] = list(self._weighty)
        self._weighty.clear()
        self._weighty.extend(one for one in waiting if not isinstance(one[1], Letter))


class Kept:
    """The last answers that were confirmed: who asks the same again is not to have it done again."""

    __slots__ = ("_answers", "_size")

    def __init__(self) -> None:
        self._answers: dict[CallId, bytes] = {}
        self._size = 0

    def get(self, call: CallId) -> bytes | None:
        return self._answers.get(call)

    def add(self, call: CallId, body: bytes) -> None:
        self._size += len(body) - len(self._answers.pop(call, b""))
        self._answers[call] = body
        while len(self._answers) > MAX_KEPT or self._size > MAX_KEPT_BYTES:
            self._size -= len(self._answers.pop(next(iter(self._answers))))


class Speaker:
    """The `Voice` of one agent process, and its host's pen."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, attempt: int, epoch: int) -> None:
        sock.setblocking(False)
        self.dropped = 0
        self._sock = sock
        self._loop = loop
        # Reentrant: a garbage collection under the lock may run foreign code that says something.
        self._lock = threading.RLock()
        self._sender = wire.Sender(sock, attempt, epoch)
        self._outbox = Outbox()
        #: What the socket has taken only in part; nobody has heard it.
        self._half_said: Message | None = None
        self._pumping = self._watched = False
        #: Answers that no manager has confirmed, by their call.
        self._answers: dict[CallId, bytes] = {}
        self._kept = Kept()
        self._asks: dict[int, tuple[bytes, asyncio.Future[WaitAnswer]]] = {}
        self._numbers = itertools.count(1)

    # --- the voice -----------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        if isinstance(message, Signal) and message.payload:
            _require_short(message)
        with self._lock:
            self.dropped += self._outbox.add(message)
            self._pump()

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[WaitAnswer] = loop.create_future()
        number = next(self._numbers)
        body = wire.encode(_question(number, wait))
        with self._lock:
            self._asks[number] = (body, future)
            self._outbox.add_letter(body)
            self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            self.tell({"t": "unask", "id": number})
            raise
        finally:
            with self._lock:
                self._asks.pop(number, None)

    def told(self, number: int, outcome: WaitAnswer | str) -> None:
        """A question is settled: by an answer, or by a sentence that says why there will be none."""
        _, future = self._asks.get(number, (b"", None))
        if future is None:
            return
        if future.get_loop() is self._loop:
            _settle(future, outcome)
        else:
            # An agent may wait on a loop of its own, in a thread of its own.
            future.get_loop().call_soon_threadsafe(_settle, future, outcome)

    # --- the pen -------------------------------------------------------------------------------------

    def tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._outbox.add_letter(wire.encode(message))
            self._pump()

    def answer(self, call: CallId, body: bytes) -> None:
        """Written down until a manager says that it has it."""
        with self._lock:
            self._answers[call] = body
            self._outbox.add_letter(body)
            self._pump()

    def answer_again(self, call: CallId) -> bool:
        """Whether it was answered before, as far as that is remembered; then it is answered so again."""
        body = self._answers.get(call) or self._kept.get(call)
        if body is not None:
            self.answer(call, body)
        return body is not None

    def forget(self, calls: Iterable[CallId]) -> None:
        """A manager has them; but one that dies now may not have passed them on."""
        with self._lock:
            for call in calls:
                body = self._answers.pop(call, None)
                if body is not None:
                    self._kept.add(call, body)

    def greet(self, epoch: int, state: Mapping[str, Any]) -> None:
        """A new manager: first how things stand, then what nobody has heard, then all that is not confirmed."""
        with self._lock:
            self._sender.clear()
            self._sender.epoch = epoch
            self._outbox.drop_letters()
            first = [wire.encode({**state, "asks": list(self._asks), "dropped": self.dropped})]
            if self._half_said is not None:
                first.append(_spoken(self._half_said, self.dropped))
            # When nobody is there any more the loop hears of it.
            with contextlib.suppress(OSError):
                for body in first:
                    self._sender.put(body)
            for body in (*self._answers.values(), *(body for body, _ in self._asks.values())):
                self._outbox.add_letter(body)
            self._pump()

    def drain(self, seconds: float) -> None:
        """Before the end: wait until all is said, or nobody reads it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        end = time.monotonic() + seconds
        with self._lock:
            while not self._pump() and (left := end - time.monotonic()) > 0:
                poll.poll(left * 1000)

    def _pump(self) -> bool:
        """With the lock held. Whether all has gone."""
        if self._pumping:
            return False
        self._pumping = True
        try:
            done = self._write()
        except OSError:
            # Manager and keeper are gone; the loop hears it as well, and ends.
            self._sender.clear()
            return True
        finally:
            self._pumping = False
        if not done and not self._watched:
            self._watched = True
            self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._writable)
        return done

    def _write(self) -> bool:
        while self._sender.flush():
            self._half_said = None
            item = self._outbox.next()
            if item is None:
                return True
            if isinstance(item, Letter):
                self._sender.put(item.body)
                continue
            try:
                body = _spoken(item, self.dropped)
            except (TypeError, ValueError) as error:
                self.dropped += 1
                complain(f"what the agent said cannot leave its process: {error}")
                continue
            self._half_said = item
            self._sender.put(body)
        return False

    def _writable(self) -> None:
        with self._lock:
            if self._pump():
                self._watched = False
                self._loop.remove_writer(self._sock)


def _settle(future: asyncio.Future[WaitAnswer], outcome: WaitAnswer | str) -> None:
    if future.done():
        return
    if isinstance(outcome, str):
        future.set_exception(AgentGoneError(outcome or _GONE))
    else:
        future.set_result(outcome)


def _question(number: int, wait: WaitAsked) -> dict[str, Any]:
    return {
        "t": "ask",
        "id": number,
        "kind": wait.kind,
        "reason": wait.reason,
        "timeout_seconds": None if wait.timeout is None else wait.timeout.total_seconds(),
        "detail": wait.detail,
        "call": CURRENT_CALL_ID.get(),
    }


def _spoken(message: Message, dropped: int) -> bytes:
    said: dict[str, Any]
    if isinstance(message, Progress):
        said = {"kind": "progress", "fraction": message.fraction, "message": message.message}
        said["details"] = message.details
    elif isinstance(message, Signal):
        said = {"kind": "signal", "name": message.name, "payload": message.payload}
    elif isinstance(message, MetricReported):
        said = {"kind": "metric", "name": message.name, "value": message.value}
    else:
        said = {"kind": "tokens", "count": message.count, "model": message.model}
    if dropped:
        # So many news had to make room until now.
        said["dropped"] = dropped
    body = wire.encode({"t": "say", **said})
    if len(body) > wire.MAX_SAID:
        raise wire.TooLongError(f"{len(body):,} bytes are more than the {wire.MAX_SAID:,} that can be said unasked")
    return body


def _require_short(signal: Signal) -> None:
    """News that are too long are dropped with a complaint; a signal counts, so whoever sends it is told."""
    try:
        _spoken(signal, MAX_COUNT)
    except wire.TooLongError as error:
        bound = f"must be at most {wire.MAX_SAID:,} bytes to leave its process; pass a path to larger data"
        raise ValidationError([Fault(field="payload", bound=bound)]) from error
    except (TypeError, ValueError):
        return  # told when it is its turn
