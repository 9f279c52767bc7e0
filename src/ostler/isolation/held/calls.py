"""The calls of a manager to one agent process: who waits for which answer, and what is acknowledged when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from uuid import UUID

from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.errors import InvalidOperationError
from ostler.isolation.base import Verb
from ostler.isolation.calls import Call, Outcome, wake
from ostler.isolation.held.validate import key_of

Send = Callable[[Mapping[str, Any]], None]
#: How long an acknowledgement waits for a message that it can ride on.
_ACK_SECONDS = 0.05
#: While a backlog is being delivered, a cancelled call is looked at again after so long.
_BEHIND_SECONDS = 1.0
#: A cancelled caller of these is about to kill the agent, and does not wait.
ENDING_VERBS = frozenset({Verb.CLEANUP, Verb.FINAL_STATE, Verb.SHUTDOWN})


class Acknowledgements:
    """Ride on the next message to the agent, or go alone after 50 ms: each would wake the agent once more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._calls: list[str] = []
        self._message = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, calls: list[str], message: int) -> None:
        self._calls += calls
        if calls or message > self._message:
            self._message = max(self._message, message)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_ACK_SECONDS, self.flush)

    def onto(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._timer is None:
            return message
        self._timer.cancel()
        self._timer, calls, self._calls = None, self._calls, []
        return {**message, "ack": calls, "seen": self._message}

    def flush(self) -> None:
        if self._timer is not None:
            self._send({"t": "ack"})


class Calls:
    def __init__(self, clock: Clock, send: Send, acks: Acknowledgements, give_up_seconds: float) -> None:
        self._clock = clock
        self._send = send
        self._acks = acks
        self._give_up_seconds = give_up_seconds
        self._loop = asyncio.get_running_loop()
        self._running: dict[UUID, Call] = {}
        #: Of an earlier manager and not joined yet, running or answered.
        self._reported: dict[UUID, Call] = {}
        self._answered: dict[UUID, Verb] = {}  #: and not acknowledged
        self._acknowledged: asyncio.Future[None] | None = None
        self.closing = False
        #: The channel, which the cell knows. While the manager itself does not read, or has not read all that lies
        #: before the answer, a cancelled call may have stopped unseen.
        self.held: Callable[[], asyncio.Future[None] | None] = lambda: None
        self.hurry: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.delivered_beyond: Callable[[], int] = lambda: 0

    @property
    def is_stuck(self) -> bool:
        return any(call.given_up for call in self._running.values())

    def begin(self, call_id: UUID, verb: Verb) -> Call:
        if call_id in self._running or call_id in self._reported:
            raise InvalidOperationError(f"call {call_id} is being made already")
        call = self._running[call_id] = Call(call_id, verb, self._loop.create_future())
        return call

    def report(self, calls: Mapping[UUID, Verb]) -> None:
        """The agent said, after an adoption, what an earlier manager asked."""
        for call_id, verb in calls.items():
            if call_id not in self._running:
                self._reported[call_id] = self.begin(call_id, verb)

    def join(self, call_id: UUID) -> Call | None:
        return self._reported.pop(call_id, None)

    async def wait(self, call: Call, *, acknowledge: bool) -> Any:
        try:
            if call.verb in ENDING_VERBS:
                with self.hurry():
                    await call.done
            else:
                await call.done
        except asyncio.CancelledError:
            await self._cancel(call)
            raise
        if acknowledge:
            self.acknowledge([call.call_id])
        return call.result(is_closing=self.closing)

    def acknowledge(self, calls: list[UUID], message: int = 0) -> None:
        keys = []
        for call_id in calls:
            verb = self._answered.pop(call_id, None)
            if verb is not None:
                self._reported.pop(call_id, None)
                keys.append(key_of(verb, call_id))
        if self._acknowledged is not None and not self._answered:
            wake(self._acknowledged)
        self._acks.add(keys, message)

    def all_acknowledged(self) -> asyncio.Future[None]:
        """Done when every answer that has come is acknowledged."""
        self._acknowledged = self._loop.create_future()
        return self._acknowledged

    def answer(self, call_id: UUID, outcome: Outcome) -> None:
        """From the agent. An answer to no call is a repetition."""
        call = self._running.pop(call_id, None)
        if call is not None:
            self._answered[call_id] = call.verb
            call.finish(outcome)
            if call.given_up:
                self.acknowledge([call_id])

    def release(self, outcome: Outcome) -> None:
        running, self._running = self._running, {}
        for call in running.values():
            call.finish(outcome)

    async def _cancel(self, call: Call) -> None:
        """Wait until the work has stopped; further cancelling does not shorten that."""
        if call.call_id in self._running and call.outcome is None:
            stopped = call.done = self._loop.create_future()
            self._send({"t": "cancel", "id": key_of(call.verb, call.call_id)})
            seconds = 0.0 if call.verb in ENDING_VERBS else self._give_up_seconds
            give_up = partial(self._give_up, stopped, self.delivered_beyond())
            timer = self._clock.call_later(seconds, give_up if seconds else partial(wake, stopped))
            with self.hurry():
                await wait_ignoring_cancel(stopped)
            timer.cancel()
            call.given_up = call.call_id in self._running
        if not call.given_up:
            self.acknowledge([call.call_id])

    def _give_up(self, stopped: asyncio.Future[None], before: int) -> None:
        held, delivered = self.held(), self.delivered_beyond()
        if held is not None:
            held.add_done_callback(
                lambda _: self._clock.call_later(_BEHIND_SECONDS, partial(self._give_up, stopped, delivered))
            )
        elif delivered > before and not stopped.done():  # a backlog has an end, and so has this
            self._clock.call_later(_BEHIND_SECONDS, partial(self._give_up, stopped, delivered))
        else:
            wake(stopped)
