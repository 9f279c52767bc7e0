"""The calls to one agent over its channel: who waits for which answer, and which answers are confirmed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.isolation.base import Verb
from ostler.isolation.calls import CANCELLED, Call, Outcome, wake
from ostler.isolation.process.hearing import key_of
from ostler.isolation.wire import WireError
from ostler.seams import Clock

#: More are in flight at no agent.
_MOST_FOUND = 10_000
#: How long a confirmation waits for something that it can go along with.
_ACK_SECONDS = 0.05
#: How long a channel must have been quiet for its backlog to be heard.
_BEHIND_SECONDS = 1.0
#: Who gives these up is about to end the agent, and does not wait for it.
FAREWELL = frozenset({Verb.CLEANUP, Verb.FINAL_STATE, Verb.SHUTDOWN})


class Calls:
    def __init__(self, clock: Clock, say: Callable[[Mapping[str, Any]], None], give_up: timedelta) -> None:
        self._clock = clock
        self._say = say
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        #: Every call whose work has not stopped, also those that nobody waits for any more.
        self._running: dict[UUID, Call] = {}
        #: Of those, and of those answered since: what an earlier manager asked and nobody has taken up.
        self._found: dict[UUID, Call] = {}
        #: How its channel is kept open for an answer, until when it is not read, and what was heard of a backlog;
        #: the cell knows them.
        self.heard_out: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.held: Callable[[], asyncio.Future[None] | None] = lambda: None
        self.heard_beyond: Callable[[], int] = lambda: 0
        self._acks: list[str] = []
        self._later: asyncio.TimerHandle | None = None
        #: An earlier manager's answers are still coming in.
        self.catching_up = False
        #: The agent is about to end; what is not answered will not be.
        self.closing = False

    @property
    def is_stuck(self) -> bool:
        return any(call.given_up for call in self._running.values())

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        return {call_id: call.verb for call_id, call in self._found.items()}

    def require_new(self, call_id: UUID) -> None:
        if call_id in self._running or call_id in self._found:
            raise InvalidOperationError(f"call {call_id} was made before; rejoin it")

    def begin(self, call_id: UUID, verb: Verb) -> Call:
        call = self._running[call_id] = Call(verb, None, self._loop.create_future())
        return call

    def find_all(self, calls: Mapping[UUID, Verb]) -> None:
        """What an earlier manager asked and the agent works on."""
        for call_id, verb in calls.items():
            self._find(call_id, verb)

    def _find(self, call_id: UUID, verb: Verb) -> Call:
        known = self._running.get(call_id)
        if known is not None:  # asked again under its name before the agent could say that it works on it
            return known
        if not self.catching_up or len(self._found) >= _MOST_FOUND:
            raise WireError("calls that nobody made")
        call = self._found[call_id] = self.begin(call_id, verb)
        return call

    def take_up(self, call_id: UUID) -> Call | None:
        return self._found.pop(call_id, None)

    async def answered(self, call_id: UUID, call: Call) -> Any:
        """Wait for it; when the caller is cancelled, stop its work first."""
        try:
            await call.waiter
        except asyncio.CancelledError:
            await self._withdraw(call_id, call)
            raise
        self._confirm(call_id, call)
        return self._answer(call)

    def settle(self, verb: Verb, call_id: UUID, outcome: Outcome) -> None:
        """The agent has answered. What nobody asked is nothing, unless an earlier manager may have."""
        call = self._running.pop(call_id, None)
        if call is None and self.catching_up:
            call = self._find(call_id, verb)
            del self._running[call_id]
        if call is not None:
            call.release(outcome)
            if call.given_up:
                self._confirm(call_id, call)

    def release(self, outcome: Outcome) -> None:
        """Nobody waits any longer."""
        running, self._running = self._running, {}
        for call in running.values():
            call.release(outcome)

    def _answer(self, call: Call) -> Any:
        outcome = call.outcome or CANCELLED
        if outcome.error is not None:
            raise outcome.error
        if outcome.crash is not None:
            raise AgentGoneError(f"the agent ended before it answered: {outcome.crash.detail}")
        if not outcome.cancelled:
            return outcome.answer
        if self.closing:
            raise AgentGoneError
        raise AgentExecutionError(
            "CancelledError: the agent cancelled its own work", exception_type="asyncio.CancelledError"
        )

    async def _withdraw(self, call_id: UUID, call: Call) -> None:
        """Stop the work of a caller who has gone, and wait for that. More cancelling does not shorten the wait."""
        call.withdrawn = True
        if call_id in self._running and call.outcome is None:
            stopped = call.waiter = self._loop.create_future()
            self._say({"t": "cancel", "id": key_of(call.verb, call_id)})
            if call.verb in FAREWELL:
                timer = self._clock.call_later(0.0, partial(wake, stopped))
            else:
                lose = partial(self._lose_patience, stopped, self.heard_beyond())
                timer = self._clock.call_later(self._give_up.total_seconds(), lose)
            try:
                with self.heard_out():
                    while not stopped.done():
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.wait((stopped,))
            finally:
                timer.cancel()
            call.given_up = call_id in self._running
        if not call.given_up:
            self._confirm(call_id, call)

    def _lose_patience(self, stopped: asyncio.Future[None], before: int) -> None:
        """While it is we who do not listen, or are not through with its backlog, it may well have answered."""
        held, now = self.held(), self.heard_beyond()
        if held is not None:
            held.add_done_callback(lambda _: wake(stopped))
        elif now > before and not stopped.done():  # a backlog has an end, and so has this
            self._clock.call_later(_BEHIND_SECONDS, partial(self._lose_patience, stopped, now))
        else:
            wake(stopped)

    def _confirm(self, call_id: UUID, call: Call) -> None:
        """Whoever asked has the answer, so that the agent may forget it. There is no hurry: see `with_acks`."""
        if not self._acks and self._later is None:
            self._later = self._loop.call_later(_ACK_SECONDS, self.send_acks)
        self._acks.append(key_of(call.verb, call_id))

    def with_acks(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sent along with something else: a message of their own would wake the agent once more."""
        return {**message, "ack": self._acks} if self._acks else message

    def sent_acks(self) -> None:
        self._acks = []

    def send_acks(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._acks:
            acks, self._acks = self._acks, []
            self._say({"t": "ack", "ids": acks})
