"""The calls to one agent over its channel: which caller waits for which answer, and what is acknowledged when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from ostler.aio import wait_ignoring_cancel
from ostler.clock import Clock
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError, ValidationError
from ostler.isolation import wire
from ostler.isolation.base import Verb
from ostler.isolation.calls import CANCELLED, Call, Outcome, wake
from ostler.isolation.process.hearing import key_of
from ostler.isolation.wire import WireError
from ostler.model.validation import Fault, shown

Say = Callable[[Mapping[str, Any]], None]
#: More are in flight at no agent.
_MOST_FOUND = 10_000
#: How long an acknowledgement waits for a message that it can go along with.
_ACK_SECONDS = 0.05
#: How long a channel must have been quiet for its backlog to be heard.
_BEHIND_SECONDS = 1.0
#: A caller that gives these up is about to end the agent, and does not wait for it.
ENDING = frozenset({Verb.CLEANUP, Verb.FINAL_STATE, Verb.SHUTDOWN})


class Acks:
    """What the manager has committed. It goes along with the next message, or by itself after a moment: a message of
    its own would wake the agent once more.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._calls: list[str] = []
        self._heard = 0
        self._later: asyncio.TimerHandle | None = None

    def add_call(self, verb: Verb, call_id: UUID) -> None:
        self._calls.append(key_of(verb, call_id))
        self._soon()

    def add_heard(self, number: int) -> None:
        if number > self._heard:
            self._heard = number
            self._soon()

    def _soon(self) -> None:
        if self._later is None:
            self._later = self._loop.call_later(_ACK_SECONDS, self.send)

    def onto(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with all that is to be acknowledged; `sent` follows."""
        return message if self._later is None else {**message, "ack": self._calls, "heard": self._heard}

    def sent(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later, self._calls = None, []

    def send(self) -> None:
        if self._later is not None:
            self._say({"t": "acks"})


class Calls:
    def __init__(self, clock: Clock, say: Say, acks: Acks, give_up: timedelta) -> None:
        self._clock = clock
        self._say = say
        self._acks = acks
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        #: Every call whose work has not stopped, also those whose caller was cancelled.
        self._running: dict[UUID, Call] = {}
        #: Of those, and of those answered since: what an earlier manager asked and this one has not taken up.
        self._found: dict[UUID, Call] = {}
        #: Answered, and not confirmed by the manager.
        self._unconfirmed: dict[UUID, Verb] = {}
        #: How its channel is kept open for an answer, until when it is not read, and what was heard of a backlog;
        #: the cell knows them.
        self.heard_out: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.held: Callable[[], asyncio.Future[None] | None] = lambda: None
        self.heard_beyond: Callable[[], int] = lambda: 0
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
        call = self._running[call_id] = Call(verb, None, self._loop.create_future(), call_id)
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
            raise WireError("calls that no manager made")
        call = self._found[call_id] = self.begin(call_id, verb)
        return call

    def take_up(self, call_id: UUID) -> Call | None:
        return self._found.pop(call_id, None)

    async def answered(self, call: Call, *, confirms: bool = False) -> Any:
        """Wait for it; when the caller is cancelled, stop its work first.

        `confirms`: the manager has no name for this call, so that hearing the answer confirms it.
        """
        try:
            await call.waiter
        except asyncio.CancelledError:
            await self._withdraw(call)
            raise
        if confirms:
            self.confirm(call.call_id)
        return self._answer(call)

    def confirm(self, call_id: UUID) -> None:
        """The agent may forget its answer."""
        verb = self._unconfirmed.pop(call_id, None)
        if verb is not None:
            self._found.pop(call_id, None)
            self._acks.add_call(verb, call_id)

    def settle(self, verb: Verb, call_id: UUID, outcome: Outcome) -> None:
        """The agent has answered. An answer to no call is passed over, unless an earlier manager may have asked."""
        call = self._running.pop(call_id, None)
        if call is None and self.catching_up and call_id not in self._unconfirmed:
            call = self._find(call_id, verb)
            del self._running[call_id]
        if call is not None:
            self._unconfirmed[call_id] = call.verb
            call.release(outcome)
            if call.given_up:
                self.confirm(call_id)

    def release(self, outcome: Outcome) -> None:
        """No caller waits any longer."""
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

    async def _withdraw(self, call: Call) -> None:
        """Stop the work of a cancelled caller, and wait for that. More cancelling does not shorten the wait."""
        call.withdrawn = True
        if call.call_id in self._running and call.outcome is None:
            stopped = call.waiter = self._loop.create_future()
            self._say({"t": "cancel", "id": key_of(call.verb, call.call_id)})
            if call.verb in ENDING:
                timer = self._clock.call_later(0.0, partial(wake, stopped))
            else:
                lose = partial(self._lose_patience, stopped, self.heard_beyond())
                timer = self._clock.call_later(self._give_up.total_seconds(), lose)
            try:
                with self.heard_out():
                    await wait_ignoring_cancel(stopped)
            finally:
                timer.cancel()
            call.given_up = call.call_id in self._running
        if not call.given_up:
            self.confirm(call.call_id)

    def _lose_patience(self, stopped: asyncio.Future[None], before: int) -> None:
        """While this manager does not listen, or is not through with the backlog, the agent may well have answered."""
        held, now = self.held(), self.heard_beyond()
        if held is not None:
            held.add_done_callback(lambda _: wake(stopped))
        elif now > before and not stopped.done():  # a backlog has an end, and so has this
            self._clock.call_later(_BEHIND_SECONDS, partial(self._lose_patience, stopped, now))
        else:
            wake(stopped)


def call_message(verb: Verb, call_id: UUID, payload: Any) -> dict[str, Any]:
    return {"t": "call", "id": key_of(verb, call_id), "verb": verb.value, "payload": payload}


def encoded_call(message: Mapping[str, Any]) -> bytes:
    try:
        return wire.encode(message)
    except (TypeError, ValueError, RecursionError) as error:
        bound = f"must be plain JSON data to reach a process of its own: {error}"
        if isinstance(error, wire.TooLongError):
            bound = f"must be shorter to reach a process of its own: {error}; write it to a file and send the path"
        raise ValidationError([Fault(field="request", bound=bound, value=shown(message.get("payload")))]) from error
