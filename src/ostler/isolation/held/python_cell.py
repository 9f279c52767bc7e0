"""A Python agent in a process of its own: the contract of a cell over the agent's channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from uuid import UUID, uuid4, uuid5

from ostler.agent_process.framing import LineReader, ProtocolError, TooLongError, encode
from ostler.agents import WaitAsked
from ostler.agents.failures import MAX_MESSAGE, error_text
from ostler.clock import Clock, Timer
from ostler.errors import AgentGoneError, InvalidOperationError, ValidationError
from ostler.isolation.base import Exit, Listener, StartPlan, Verb
from ostler.isolation.calls import CANCELLED, Call, Outcome, wake
from ostler.isolation.held import validate
from ostler.isolation.held.calls import ENDING_VERBS, Acknowledgements, Calls
from ostler.isolation.held.cell import HeldCell, Tasks, enforcement_of
from ostler.isolation.held.channel import Channel
from ostler.isolation.held.exit import LOST, exit_of, with_crash, with_record
from ostler.isolation.holder import Holder, HolderError, StartOrder, UnitExit, UnitStatus
from ostler.model.attempt import AttemptOutcome
from ostler.model.states import IsolationLevel
from ostler.model.text import clipped
from ostler.model.validation import Fault, shown

_log = logging.getLogger("ostler.isolation")
#: From the end of its channel to the end of its process.
_EXIT_SECONDS = 5.0
#: For the manager to take the answers of an agent that has ended, before it is told of that end.
_ANSWER_SECONDS = 5.0
_MUTE = Exit(outcome=AttemptOutcome.ERROR, detail="it closed its channel and lived on, so it was ended")


class PythonCell(HeldCell):
    def __init__(  # noqa: PLR0913 - the parts of a cell, made in one place
        self,
        clock: Clock,
        holder: Holder,
        tasks: Tasks,
        plan: StartPlan,
        listener: Listener,
        *,
        level: IsolationLevel,
        epoch: int,
    ) -> None:
        super().__init__(clock, holder, tasks, plan, listener)
        self._level = level
        self._epoch = epoch
        self._channel: Channel | None = None
        self._acks = Acknowledgements(self._send)
        self._calls = Calls(clock, self._send, self._acks, self.GIVE_UP.total_seconds())
        self._questions: dict[str | int, asyncio.Task[None]] = {}
        self._made: asyncio.Future[None] = self._loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self._pings = 0
        self._adopted = False
        self._crash: Exit | None = None  #: what the agent said of its end
        self._verdict: Exit | None = None  #: why this manager ended it
        self._exit_timer: Timer | None = None
        self._identity: Mapping[str, Any] = {}
        self._first: Call | None = None  #: initialize, sent with `begin`

    # --- start and adoption ---

    async def open(self, order: StartOrder, begin: Mapping[str, Any]) -> None:
        """Raises `HolderError`, or what the agent's constructor raised."""
        status = await self._holder.start(order, self.unit_ended)
        self._know(status)
        channel = await self._connect(status)
        if channel is None:
            raise (self._ended or LOST).before_ready("it ended before it could be reached")
        self._first = self._calls.begin(uuid4(), Verb.INITIALIZE)
        channel.send(self._hello(status), {"t": "begin", "plan": begin}, _call_message(self._first, None))
        await self._made
        if self._ended is not None:
            raise self._ended.before_ready("it ended while it was initialising")
        self._quiet = False

    async def adopt(self, status: UnitStatus) -> Exit | None:
        """Does not wait for the agent: what it works on comes with its welcome. An `Exit` when it has just ended."""
        self._know(status)
        self._frozen = status.frozen
        wake(self._made)
        channel = await self._connect(status)
        if channel is None or self._gone.done():
            return self._ended or LOST
        channel.send(self._hello(status))
        self._adopted, self._quiet = True, False
        return None

    async def _connect(self, status: UnitStatus) -> Channel | None:
        """None when the agent has ended; then its exit is known."""
        try:
            sock = await self._holder.connect(status)
        except HolderError as error:
            if error.kind != "gone":
                raise
            await asyncio.wait((self._gone,), timeout=_EXIT_SECONDS)
            if not self._gone.done():  # it closed its socket and lives on: no manager can reach it
                self._verdict = _MUTE
                await self._kill()
                await asyncio.wait((self._gone,), timeout=_EXIT_SECONDS)
            if not self._gone.done():
                raise HolderError(
                    "late", f"the agent of unit {status.unit} can neither be reached nor ended"
                ) from error
            return None
        channel = self._channel = Channel(sock, self._received, self._channel_closed)
        self._calls.held = lambda: channel.held
        self._calls.hurry = channel.hurry
        self._calls.delivered_beyond = lambda: channel.delivered_beyond
        return channel

    async def adopt_record(self, record: UnitExit, how: Exit) -> Exit | None:
        """It ended while no manager was there. None when the cell has to stand for it; see `adopt_ended`."""
        self._left = bool(record.left) or record.by == "lost"
        self._left = bool(await self.kill_left())
        return self.adopt_ended(how)

    def adopt_ended(self, how: Exit) -> Exit | None:
        """Deliver what it could keep of its last messages.

        None when there are answers among them, or something of it lives on. Then the cell stands for an agent that ends
        as soon as its answers are acknowledged: the listener hears of the calls, and of the exit afterwards.
        """
        calls = self._read_unsent()
        how = with_crash(how, self._crash)
        if not calls and not self._left:
            return how
        wake(self._gone)
        self._closing, self._quiet, self._ended = True, False, how
        self._release(how)
        if calls:
            self._report(calls, frozenset())
        self._tasks.run(self._report_exit(how, acknowledged=not calls))
        return None

    async def _report_exit(self, how: Exit, *, acknowledged: bool) -> None:
        if not acknowledged:
            future = self._calls.all_acknowledged()
            timer = self._clock.call_later(_ANSWER_SECONDS, partial(wake, future))
            await asyncio.wait((future,))
            timer.cancel()
        self._report_end(how)

    def _read_unsent(self) -> dict[UUID, Verb]:
        """The calls that it answered."""
        data = self._holder.read_unsent(self.name)
        calls: dict[UUID, Verb] = {}
        try:
            for message in LineReader(from_agent=True).feed(data[: data.rfind(b"\n") + 1]):
                if message["t"] == "say":
                    self._hear(message)
                elif message["t"] == "answer":
                    verb, call_id = validate.read_key(message.get("id"))
                    outcome = validate.outcome_of(message)
                    if outcome.crash is not None:
                        self._crash = self._crash or outcome.crash
                    elif call_id not in calls and len(calls) < validate.MAX_CALLS:
                        calls[call_id] = verb
                        self._calls.report({call_id: verb})
                        self._calls.answer(call_id, outcome)
        except ProtocolError as error:
            _log.warning("what an agent kept for its next manager is damaged: %s", error)
        return calls

    def _hello(self, status: UnitStatus) -> Mapping[str, Any]:
        return {"t": "hello", "key": status.key, "epoch": self._epoch}

    def _know(self, status: UnitStatus) -> None:
        self._enforcement = enforcement_of(status.enforcement)
        self._identity = status.identity

    # --- the contract ---

    @property
    def handle(self) -> Mapping[str, Any]:
        who = {"instance_id": str(self._plan.instance_id), "attempt": self._plan.attempt}
        return {"level": self._level.value, **who, "unit": self.name, **self._identity}

    @property
    def ended(self) -> Exit | None:
        return self._ended or self._verdict or self._crash

    @property
    def is_stuck(self) -> bool:
        return self._calls.is_stuck

    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        if verb is Verb.INITIALIZE and self._first is not None:
            first, self._first = self._first, None
            answer = await self._calls.wait(first, acknowledge=True)
            if self._closing:
                raise AgentGoneError
            return answer
        if call_id is not None and (reported := self._calls.join(call_id)) is not None:
            return await self._calls.wait(reported, acknowledge=False)
        channel = self._channel
        if self._closing or channel is None:
            raise AgentGoneError
        if verb in ENDING_VERBS and self._frozen:
            try:
                await self.thaw()
            except InvalidOperationError:
                _log.warning("an agent that is to end cannot be thawed")
        call = self._calls.begin(call_id or uuid4(), verb)
        try:
            channel.write(encode(self._acks.onto(_call_message(call, payload))))
        except (TypeError, ValueError, RecursionError) as error:
            self._calls.answer(call.call_id, CANCELLED)
            raise _request_error(error, payload) from error
        return await self._calls.wait(call, acknowledge=call_id is None)

    def ack(self, calls: Collection[UUID] = (), message: int = 0) -> None:
        self._calls.acknowledge(list(calls), message)

    async def ping(self) -> None:
        if not self._closing and (self._channel is None or self._channel.held is None):
            if self._pong is None or self._pong.done():  # one at a time: a blocked agent does not gather them
                self._pong = self._loop.create_future()
                self._pings += 1
                self._send({"t": "ping", "n": self._pings})
            await asyncio.wait((self._pong,))
        if self._closing:
            raise AgentGoneError

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(self._acks.onto(message))

    # --- messages of the agent ---

    def _received(self, message: dict[str, Any]) -> None:
        try:
            self._take(message)
        except ProtocolError as error:
            self._condemn(str(error))
        except Exception as error:  # noqa: BLE001 - the agent's input brought it about
            _log.exception("a message of an agent could not be handled")
            self._condemn(f"{type(error).__name__}: {error}")

    def _take(self, message: dict[str, Any]) -> None:
        match message["t"]:
            case "say":
                self._hear(message)
            case "answer":
                _, call_id = validate.read_key(message.get("id"))
                self._answered(call_id, validate.outcome_of(message))
            case "ask":
                self._question(message)
            case "unask":
                task = self._questions.get(validate.ask_key(message.get("id")))
                if task is not None:
                    task.cancel()
            case "pong":
                if message.get("n") == self._pings and self._pong is not None:
                    wake(self._pong)
            case "made":
                self._is_made(message)
            case "welcome":
                self._welcome(message)
            case other:
                raise ProtocolError(f"a message of the unknown kind {other!r:.40}")

    def _hear(self, fields: Mapping[str, Any]) -> None:
        message = validate.message_of(fields)
        try:
            enough = self._listener.on_message(self._plan.attempt, message)
        except Exception:  # noqa: BLE001 - the listener's own; see `Listener`
            _log.exception("the listener failed to take a message of an agent")
            return
        if enough is not None and not self._closing and self._channel is not None:
            self._channel.hold(enough)
            if self._pong is not None:
                wake(self._pong)  # the agent lives; it is this manager that does not read

    def _answered(self, call_id: UUID, outcome: Outcome) -> None:
        self._calls.answer(call_id, outcome)
        if outcome.crash is not None and self._crash is None:
            self._crash = outcome.crash
            self._close_calls()
            self._expect_exit()

    def _welcome(self, message: Mapping[str, Any]) -> None:
        calls, keys = validate.calls_of(message), validate.questions_of(message)
        if self._adopted:
            self._adopted = False
            self._calls.report(calls)
            if not self._closing:
                self._report(calls, frozenset(map(self._question_id, keys)))

    def _report(self, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        try:
            self._listener.on_report(self._plan.attempt, calls, questions)
        except Exception:  # noqa: BLE001 - the listener's own; see `Listener`
            _log.exception("the listener failed to take the report of an agent")

    def _is_made(self, message: Mapping[str, Any]) -> None:
        if self._made.done():
            return
        if "error" in message:
            self._made.set_exception(validate.error_of(message["error"]))
            self._made.exception()  # the caller may have been cancelled
        else:
            self._made.set_result(None)

    def _question_id(self, key: str | int) -> UUID:
        """The same when it is asked again."""
        return uuid5(self._plan.instance_id, f"ask {self._plan.attempt} {key}")

    def _question(self, message: Mapping[str, Any]) -> None:
        key = validate.ask_key(message.get("id"))
        wait = validate.wait_of(message, self._question_id(key))
        if self._stopping is None and key not in self._questions:
            if len(self._questions) >= validate.MAX_QUESTIONS:
                raise ProtocolError(f"more than {validate.MAX_QUESTIONS} open questions")
            self._questions[key] = self._tasks.run(self._ask_listener(key, wait))

    async def _ask_listener(self, key: str | int, wait: WaitAsked) -> None:
        reply: dict[str, Any]
        try:
            answer = await self._listener.on_question(self._plan.attempt, wait)
            reply = {"outcome": answer.outcome, "answer": None if answer.answer is None else dict(answer.answer)}
        except Exception as error:  # noqa: BLE001 - the agent asked, so the agent is told
            reply = {"error": error_text(error)}
        finally:
            del self._questions[key]
        self._send({"t": "reply", "id": key, **reply})

    # --- the end ---

    def _close_calls(self) -> None:
        self._closing = self._calls.closing = True
        if self._channel is not None:
            self._channel.release()  # all that it still says is heard

    def _channel_closed(self, reason: str | None) -> None:
        if reason is not None:
            self._condemn(reason)
        else:
            self._expect_exit()

    def _condemn(self, reason: str) -> None:
        """It broke the protocol and is not believed any more."""
        if self._verdict is None and not self._gone.done():
            detail = clipped(f"it sent what is no message: {reason}", MAX_MESSAGE)
            self._verdict = Exit(outcome=AttemptOutcome.ERROR, detail=detail)
            self._close_calls()
            if self._channel is not None:
                self._channel.close()
            self._tasks.run(self._kill())

    def _expect_exit(self) -> None:
        """Its exit record follows. What closed its channel and lives on is killed."""
        if self._exit_timer is None and self._stopping is None and not self._gone.done():
            self._exit_timer = self._clock.call_later(_EXIT_SECONDS, self._overdue)

    def _overdue(self) -> None:
        if not self._gone.done():
            self._verdict = self._crash or _MUTE
            self._tasks.run(self._kill())

    def unit_ended(self, record: UnitExit) -> None:
        """From the holder: everything of it is gone."""
        if record.by == "taken":
            self.detach()
            return
        self._left = bool(record.left)
        if self._channel is not None:
            self._channel.drain()
        if self._verdict is _MUTE and record.by in {"", "lost"}:
            self._verdict = None
        how: Exit | None = exit_of(record, self._plan.limits.max_memory_mb, self._crash)
        if self._verdict is not None:
            how = with_record(self._verdict, record)
        elif self._adopted and self._stopping is None and how is not None:
            how = self.adopt_ended(how)  # it never answered the hello
        if how is not None:
            self._end_unasked(how)

    async def _end(self, over: asyncio.Future[None]) -> tuple[bool, list[str]]:
        self._close_calls()
        if self._channel is not None and not self._gone.done() and not over.done():
            self._send({"t": "stop"})
            await asyncio.wait((self._gone, self._words_over, over), return_when=asyncio.FIRST_COMPLETED)
        return await self._end_processes(over, is_running=not self._gone.done())

    def _release(self, how: Exit | None) -> None:
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self._close_calls()
        if self._channel is not None and not self._detached:
            self._channel.drain()
            self._channel.close()
        for task in tuple(self._questions.values()):
            task.cancel()
        self._calls.release(CANCELLED if how is None else Outcome(crash=how))
        if not self._made.done():
            stopped = Exit(outcome=AttemptOutcome.STOPPED, detail="it was stopped")
            self._made.set_exception((how or stopped).before_ready("it ended before the agent was made"))
            self._made.exception()
        if self._pong is not None:
            wake(self._pong)

    def _disconnect(self) -> None:
        self._acks.flush()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _call_message(call: Call, payload: Any) -> dict[str, Any]:
    return {"t": "call", "id": validate.key_of(call.verb, call.call_id), "verb": call.verb.value, "payload": payload}


def _request_error(error: Exception, payload: Any) -> ValidationError:
    bound = f"must be plain JSON data to reach a process of its own: {error}"
    if isinstance(error, TooLongError):
        bound = f"must be shorter to reach a process of its own: {error}; write it to a file and send the path"
    return ValidationError([Fault(field="request", bound=bound, value=shown(payload))])
