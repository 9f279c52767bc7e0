"""A Python agent in a process of its own: the contract of a cell, over the channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from uuid import UUID, uuid4, uuid5

from ostler.agents.failures import MAX_MESSAGE
from ostler.clock import Clock, Timer
from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation import wire
from ostler.isolation.base import Exit, Listener, StartPlan, Verb
from ostler.isolation.calls import CANCELLED, Call, Outcome, wake
from ostler.isolation.process import hearing
from ostler.isolation.process.asks import MAX_OPEN, Asks
from ostler.isolation.process.calling import ENDING, Acks, Calls, call_message, encoded_call
from ostler.isolation.process.channel import Channel
from ostler.isolation.process.ending import KeptCell, enforcement_of
from ostler.isolation.process.exits import LOST, exit_of, with_record
from ostler.isolation.process.home import KeeperHome
from ostler.isolation.wire import WireError
from ostler.model.attempt import AttemptOutcome
from ostler.model.text import clipped

_log = logging.getLogger("ostler.isolation")
#: How long after its last word a process may take to end.
_LAST_STEPS_SECONDS = 5.0
#: As long as a keeper waits at most after a TERM; the manager's own clock says when it is enough.
_PATIENCE_SECONDS = 60.0
#: How long a new manager waits to hear what it works on. One that blocks its loop tells later.
_CATCH_UP_SECONDS = 1.5
_MUTE = Exit(outcome=AttemptOutcome.ERROR, detail="it closed its channel and lived on, so it was ended")


class ProcessCell(KeptCell):
    def __init__(self, clock: Clock, home: KeeperHome, plan: StartPlan, listener: Listener, epoch: int) -> None:
        super().__init__(clock, home, plan, listener)
        self._epoch = epoch
        self._channel: Channel | None = None
        self._asks = Asks(listener, plan.attempt, self._say)
        self._acks = Acks(self._say)
        self._calls = Calls(clock, self._say, self._acks, self.GIVE_UP)
        self._calls.heard_out, self._calls.held = self._heard_out, self._held
        self._calls.heard_beyond = lambda: 0 if self._channel is None else self._channel.heard_beyond
        self._made: asyncio.Future[None] = self._loop.create_future()
        self._stated: asyncio.Future[None] = self._loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self._pings = 0
        #: What it said of its own end, or what we hold against it.
        self._crash: Exit | None = None
        self._verdict: Exit | None = None
        self._deadline: Timer | None = None
        #: Its main process has ended, and something that it had started does not die.
        self._survived = False
        self._identity: dict[str, Any] = {}
        #: Called when an adopted agent has reported.
        self._when_reported: list[Callable[[], None]] = []
        #: Its initialisation, which begins before it is called for.
        self._first: Call | None = None

    # --- the beginning -------------------------------------------------------------------------------

    async def open(self, asked: Mapping[str, Any], begin: Mapping[str, Any]) -> None:
        """Have the keeper start it, and wait until the agent object exists."""
        mine, theirs = wire.channel()
        self._channel = Channel(mine, self._plan.attempt, self._epoch, self._heard, self._left)
        with contextlib.closing(theirs):
            self._home.move_in(self.box, self)
            # Both lie in the socket until the agent reads them, so that a start is one way and back.
            self._channel.put({"t": "begin", "plan": begin})
            self._first = self._begin(self._channel, Verb.INITIALIZE)
            answer = self._home.ask("start", fds=(theirs.fileno(), mine.fileno()), unit=self.box, box=self.box, **asked)
        self._know((await answer)[0])
        await self._made
        if self._how is not None:
            raise self._how.before_ready("it ended while it was initialising")
        self._quiet = False

    async def adopt(self, sock: socket.socket, status: Mapping[str, Any]) -> None:
        """Take over what an earlier manager started; `in_flight` is known when this returns, unless it is frozen."""
        self._know(status)
        self._frozen = bool(status.get("frozen"))
        self._calls.catching_up = True
        self._made.set_result(None)
        self._channel = Channel(sock, self._plan.attempt, self._epoch, self._heard, self._left)
        self._channel.greet()
        self._say({"t": "ping", "n": 0})
        if not self._frozen:
            await self._caught_up()
        self._quiet = self._how is not None

    def hear_out(self, sock: socket.socket) -> None:
        """It ended while there was no manager; what it said meanwhile lies there still."""
        channel = Channel(sock, self._plan.attempt, self._epoch, self._heard, lambda _: None)
        channel.drain()
        channel.close()

    async def _caught_up(self) -> None:
        """For so long; one that is busy with something that never awaits may need more, and is no worse for it."""
        timer = self._clock.call_later(_CATCH_UP_SECONDS, partial(wake, self._stated))
        try:
            await asyncio.wait((self._stated,))
        finally:
            timer.cancel()
        if self._calls.catching_up and not self._closing:
            self._stated = self._loop.create_future()

    def _know(self, status: Mapping[str, Any]) -> None:
        self._enforcement = enforcement_of(status.get("enforcement") or {})
        self._identity = {key: status.get(key) for key in ("pid", "start_time", "boot_id")}

    # --- the contract --------------------------------------------------------------------------------

    @property
    def handle(self) -> Mapping[str, Any]:
        who = {"instance_id": str(self._plan.instance_id), "attempt": self._plan.attempt}
        return {"level": "process", **who, "unit": self.box, **self._identity}

    @property
    def memory_mb(self) -> int:
        return self._plan.limits.max_memory_mb

    @property
    def ended(self) -> Exit | None:
        """What it said of its own end, or what we hold against it, is known a moment before the keeper sees it end."""
        return self._how or self._verdict or self._crash

    @property
    def is_stuck(self) -> bool:
        return self._calls.is_stuck

    @property
    def _takes_words(self) -> bool:
        return self._channel is not None and not self.is_stuck

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        return self._calls.in_flight

    @property
    def open_asks(self) -> frozenset[UUID]:
        return self._asks.ids

    def _begin(self, channel: Channel, verb: Verb) -> Call:
        call = self._calls.begin(uuid4(), verb)
        channel.put(call_message(verb, call.call_id, None))
        return call

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if verb is Verb.INITIALIZE and self._first is not None:
            first, self._first = self._first, None
            answer = await self._calls.answered(first, confirms=True)
            if self._closing:  # it may have answered and ended before it was called for
                raise AgentGoneError
            return answer
        channel = self._channel
        if self._closing or channel is None:
            raise AgentGoneError
        if verb not in ENDING:
            return await self._ask_it(verb, payload, call_id, channel)
        if self._frozen:
            with contextlib.suppress(InvalidOperationError):
                await self.thaw()  # or its whole grace would pass before it hears of its end
        with self._heard_out():  # its answer comes after all that it has said before
            return await self._ask_it(verb, payload, call_id, channel)

    async def _ask_it(self, verb: Verb, payload: Any, given: UUID | None, channel: Channel) -> Any:
        await channel.has_room()
        if self._closing:
            raise AgentGoneError
        call_id = given or uuid4()
        if call_id in self._calls.in_flight:
            return await self.rejoin(call_id)
        self._calls.require_new(call_id)
        body = encoded_call(self._acks.onto(call_message(verb, call_id, payload)))
        call = self._calls.begin(call_id, verb)
        channel.send(body)
        self._acks.sent()
        return await self._calls.answered(call, confirms=given is None)

    async def rejoin(self, call_id: UUID) -> Any:
        call = self._calls.take_up(call_id)
        if call is None:
            return await super().rejoin(call_id)
        return await self._calls.answered(call)

    def confirm(self, call_id: UUID) -> None:
        self._calls.confirm(call_id)

    def confirm_heard(self, number: int) -> None:
        self._acks.add_heard(number)

    async def ping(self) -> None:
        if not self._closing and self._held() is None:
            # One question is under way at a time, so that a blocked loop does not gather them.
            if self._pong is None or self._pong.done():
                self._pong = self._loop.create_future()
                self._pings += 1
                self._say({"t": "ping", "n": self._pings})
            await asyncio.wait((self._pong,))
        if self._closing:
            raise AgentGoneError

    async def thaw(self) -> None:
        if not self._frozen:
            return
        await super().thaw()
        if self._calls.catching_up and not self._closing:
            await self._caught_up()

    def on_reported(self, tell: Callable[[], None]) -> None:
        if self._calls.catching_up:
            self._when_reported.append(tell)
        else:
            self._loop.call_soon(self._tell_reported, tell)

    def _tell_reported(self, tell: Callable[[], None]) -> None:
        if not self._closing:
            tell()

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._channel.put(self._acks.onto(message))
            self._acks.sent()

    def _heard_out(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._channel is None else self._channel.heard_out()

    def _held(self) -> asyncio.Future[None] | None:
        return None if self._channel is None else self._channel.held

    # --- hearing -------------------------------------------------------------------------------------

    def _heard(self, message: dict[str, Any]) -> None:
        try:
            self._take(message)
        except WireError as error:
            self._condemn(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent has brought it about
            _log.exception("what an agent said could not be dealt with")
            self._condemn(f"{type(error).__name__}: {error}")

    def _take(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "say":
                self._hear(message)
            case "answer":
                self._settle(*hearing.read_key(message.get("id")), hearing.outcome_of(message))
            case "ask":
                self._asked(message)
            case "unask":
                self._asks.call_off(hearing.ask_key(message.get("id")))
            case "pong":
                self._ponged(message.get("n"))
            case "made":
                self._is_made(message)
            case "state":
                self._calls.find_all(hearing.calls_of(message))
            case other:
                raise WireError(f"a message of the unknown kind {other!r:.40}")

    def _hear(self, message: Mapping[str, Any]) -> None:
        said = hearing.message_of(message)
        try:
            enough = self._listener.heard(self._plan.attempt, said)
        except Exception:  # noqa: BLE001 - logged; the next message may fare better
            _log.exception("the manager failed to hear a message of an agent")
            return
        if enough is not None and not self._closing and self._channel is not None:
            self._channel.hold(enough)
            if self._pong is not None:
                wake(self._pong)  # it lives, and it is the manager that does not listen

    def _settle(self, verb: Verb, call_id: UUID, outcome: Outcome) -> None:
        self._calls.settle(verb, call_id, outcome)
        if outcome.crash is not None and self._crash is None:
            self._crash = outcome.crash
            self._shut()
            self._expect_end()

    def _asked(self, message: Mapping[str, Any]) -> None:
        key = hearing.ask_key(message.get("id"))
        ask_id = uuid5(self._plan.instance_id, f"ask {self._plan.attempt} {key}")
        wait = hearing.wait_of(message, ask_id)
        if len(self._asks) >= MAX_OPEN:
            raise WireError(f"more than {MAX_OPEN} open questions")
        if self._stopping is None:
            self._asks.open(key, wait, ask_id)

    def _ponged(self, number: Any) -> None:
        if number == 0:
            self._calls.catching_up = False
            wake(self._stated)
            waiting, self._when_reported = self._when_reported, []
            for tell in waiting:
                self._loop.call_soon(self._tell_reported, tell)
        elif number == self._pings and self._pong is not None:
            wake(self._pong)

    def _is_made(self, message: Mapping[str, Any]) -> None:
        if self._made.done():
            return
        if "error" in message:
            self._made.set_exception(hearing.error_of(message["error"]))
            self._made.exception()  # the caller may have been cancelled
        else:
            self._made.set_result(None)

    # --- the end -------------------------------------------------------------------------------------

    def _shut(self) -> None:
        super()._shut()
        self._calls.closing = True
        if self._channel is not None:
            self._channel.release()

    def _left(self, why: str | None) -> None:
        """The channel is at its end."""
        if why is not None:
            self._condemn(why)
        else:
            self._expect_end()

    def _condemn(self, why: str) -> None:
        """It is not believed any more."""
        if self._verdict is None and not self._gone.done():
            detail = clipped(f"it sent what is no message: {why}", MAX_MESSAGE)
            self._verdict = Exit(outcome=AttemptOutcome.ERROR, detail=detail)
            self._shut()
            if self._channel is not None:
                self._channel.close()
            self._end_it()

    def _expect_end(self) -> None:
        """It is about to end, and the keeper will say how. What closed its channel and lives on is made to."""
        if self._deadline is None and self._stopping is None and not self._gone.done():
            self._deadline = self._clock.call_later(_LAST_STEPS_SECONDS, self._overdue)

    def _overdue(self) -> None:
        if not self._gone.done():
            self._verdict = self._crash or _MUTE
            self._end_it()

    def _end_it(self) -> None:
        self._home.run(self._force())

    def has_ended(self, record: Mapping[str, Any]) -> None:
        self._survived = bool(record.get("left"))
        try:
            if self._channel is not None:
                self._channel.drain()  # all that it ever said lies there now
        finally:  # it is dead, whatever it said
            if self._verdict is _MUTE and record.get("by") in {None, "lost"}:
                self._verdict = None  # it had ended without us; what it left took the keeper long
            how = exit_of(record, self.memory_mb, self._crash)
            self._die(how if self._verdict is None else with_record(self._verdict, record))

    def was_lost(self) -> None:
        self._die(LOST)

    async def _wind_up(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        if self._channel is not None and not self._gone.done() and not over.done():
            self._say({"t": "stop"})
            await asyncio.wait((self._gone, self._words_over, over), return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done() and not self._survived:
            return True, []
        if not over.done() and (left := await self._signal(over, _PATIENCE_SECONDS)) is not None:
            return True, left
        return False, await self._force()

    def _release(self, how: Exit | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
            self._channel = None  # one that is stopped once more is told nothing
        self._asks.close()
        self._calls.release(CANCELLED if how is None else Outcome(crash=how))
        if not self._made.done():
            stopped = Exit(outcome=AttemptOutcome.STOPPED, detail="it was stopped")
            self._made.set_exception((how or stopped).before_ready("it ended before the agent was made"))
            self._made.exception()  # the caller may have been cancelled
        for waiter in (self._pong, self._stated):
            if waiter is not None:
                wake(waiter)

    def _close(self) -> None:
        self._home.move_out(self.box, self)
        self._acks.send()
        if self._channel is not None:
            self._channel.close()
