"""The agent's way to its manager: everything it says goes over one socket, in order, from whichever thread.

What is said is written at once, also while the agent's loop is blocked. What the socket does not take waits here.
Progress and metrics make room for newer ones. Signals and token counts are numbered and held until the manager has
acknowledged them; answers are held until they are confirmed, questions until they are answered. A new manager gets
all that is held again: first the numbered messages, then the answers and questions, so that what was said before an
answer is heard before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL, CallId
from ostler.errors import AgentBusyError, AgentGoneError, ValidationError
from ostler.isolation import wire
from ostler.isolation.backlog import MAX_WEIGHTY, TOO_MUCH, Backlog
from ostler.isolation.inside.telling import complain
from ostler.model.types import MAX_COUNT
from ostler.model.validation import Fault

_GONE = "the manager has detached from this agent and hears nothing more from it"


class Letter:
    """A message that is already written down."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body


class Outbox(Backlog):
    """What was said, and the letters between it, in one order; and what is held until it is acknowledged."""

    __slots__ = ("_held", "_number")

    def __init__(self) -> None:
        super().__init__()
        #: Numbered messages that the manager has not acknowledged, with their places in the order.
        self._held: deque[tuple[int, Any]] = deque()
        self._number = 0

    def add(self, message: Message) -> int:
        if not isinstance(message, Signal | TokensUsed):
            return super().add(message)
        if len(self._held) >= MAX_WEIGHTY:
            raise AgentBusyError(TOO_MUCH)
        dropped = super().add(replace(message, number=self._number + 1))
        self._number += 1
        self._held.append(self._weighty[-1])
        return dropped

    def forget(self, number: int) -> None:
        """The manager has every numbered message up to this one."""
        while self._held and self._held[0][1].number <= number:
            self._held.popleft()

    def add_letter(self, body: bytes) -> None:
        """Never refused and never dropped: the manager would wait for it for ever."""
        self._count += 1
        letter: Any = Letter(body)
        self._weighty.append((self._count, letter))

    def next(self) -> tuple[int, Message | Letter] | None:
        waiting = self._next()
        return waiting.popleft() if waiting else None

    def repeat(self, unsent: tuple[int, Message] | None, letters: Iterable[bytes]) -> None:
        """For a new manager: all that is held, in its old order, then these letters.

        `unsent` was taken from here and did not get through.
        """
        if unsent is not None and isinstance(unsent[1], Progress | MetricReported):
            self._news.appendleft(unsent)
        self._weighty.clear()
        self._weighty.extend(self._held)
        for body in letters:
            self.add_letter(body)


class Speaker:
    """The `Voice` of one agent process, and the writer of its host."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, attempt: int, epoch: int) -> None:
        sock.setblocking(False)
        self.dropped = 0
        self._sock = sock
        self._loop = loop
        # Reentrant: a garbage collection under the lock may run foreign code that says something.
        self._lock = threading.RLock()
        self._sender = wire.Sender(sock, attempt, epoch)
        self._outbox = Outbox()
        #: What the socket has not taken yet.
        self._unsent: tuple[int, Message] | None = None
        self._pumping = self._watched = False
        #: Answers that no manager has confirmed, by their call.
        self._answers: dict[CallId, bytes] = {}
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
        """A question is answered, or this sentence says why there will be no answer."""
        _, future = self._asks.get(number, (b"", None))
        if future is None:
            return
        if future.get_loop() is self._loop:
            _settle(future, outcome)
        else:
            # An agent may wait on a loop of its own, in a thread of its own.
            future.get_loop().call_soon_threadsafe(_settle, future, outcome)

    # --- what the host says and hears ------------------------------------------------------------------

    def tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._outbox.add_letter(wire.encode(message))
            self._pump()

    def answer(self, call: CallId, body: bytes) -> None:
        """Kept until a manager confirms it."""
        with self._lock:
            self._answers[call] = body
            self._outbox.add_letter(body)
            self._pump()

    def answer_again(self, call: CallId) -> bool:
        """Whether it was answered before and not confirmed; then it is answered so again."""
        body = self._answers.get(call)
        if body is not None:
            self.answer(call, body)
        return body is not None

    def acknowledged(self, calls: Iterable[CallId], number: int) -> None:
        """A manager has committed the answers of these calls, and every numbered message up to this one."""
        with self._lock:
            for call in calls:
                self._answers.pop(call, None)
            self._outbox.forget(number)

    def greet(self, epoch: int, state: Mapping[str, Any]) -> None:
        """A new manager: first the state, then all that is held."""
        with self._lock:
            self._sender.clear()
            self._sender.epoch = epoch
            unsent, self._unsent = self._unsent, None
            self._outbox.repeat(unsent, (*self._answers.values(), *(body for body, _ in self._asks.values())))
            # When neither manager nor keeper is there any more the loop sees it.
            with contextlib.suppress(OSError):
                self._sender.put(wire.encode({**state, "asks": list(self._asks), "dropped": self.dropped}))
            self._pump()

    def drain(self, seconds: float) -> None:
        """Before the end: wait until all is said, or is not read in time."""
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
            self._unsent = None
            taken = self._outbox.next()
            if taken is None:
                return True
            place, item = taken
            if isinstance(item, Letter):
                self._sender.put(item.body)
                continue
            try:
                body = _spoken(item, self.dropped)
            except (TypeError, ValueError) as error:
                self.dropped += 1
                complain(f"what the agent said cannot leave its process: {error}")
                continue
            self._unsent = (place, item)
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


def _spoken(message: Message, dropped: int) -> bytes:
    said: dict[str, Any]
    if isinstance(message, Progress):
        said = {"kind": "progress", "fraction": message.fraction, "message": message.message}
        said["details"] = message.details
    elif isinstance(message, Signal):
        said = {"kind": "signal", "name": message.name, "payload": message.payload, "number": message.number}
    elif isinstance(message, MetricReported):
        said = {"kind": "metric", "name": message.name, "value": message.value}
    else:
        said = {"kind": "tokens", "count": message.count, "model": message.model, "number": message.number}
    if dropped:
        # So many news had to make room until now.
        said["dropped"] = dropped
    body = wire.encode({"t": "say", **said})
    if len(body) > wire.MAX_SAID:
        raise wire.TooLongError(f"{len(body):,} bytes are more than the {wire.MAX_SAID:,} that can be said unasked")
    return body


def _require_short(signal: Signal) -> None:
    """News that are too long are dropped with a complaint; a signal counts, so its sender gets an error."""
    try:
        _spoken(replace(signal, number=MAX_COUNT), MAX_COUNT)
    except wire.TooLongError as error:
        bound = f"must be at most {wire.MAX_SAID:,} bytes to leave its process; pass a path to larger data"
        raise ValidationError([Fault(field="payload", bound=bound)]) from error
    except (TypeError, ValueError):
        return  # told when it is its turn
