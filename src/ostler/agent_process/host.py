"""The loop on which an agent lives in its process: takes connections of managers, runs calls, ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from ostler.agent_process.agent_loop import AgentLoop, Census, Workers
from ostler.agent_process.context import context_of
from ostler.agent_process.errors import complain, exit_code, rendered
from ostler.agent_process.framing import LineReader, ProtocolError, TooLongError, encode
from ostler.agent_process.import_source import maker_of
from ostler.agent_process.outbox import Outbox
from ostler.agents import AgentRunner, WaitAnswer
from ostler.agents.context import CallId
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.model.text import clean_text

_HELLO_SECONDS = 5.0
#: For clean-up and shutdown after a TERM; the sender kills afterwards.
_TERM_SECONDS = 5.0
_DRAIN_SECONDS = 2.0
_RECEIVE = 1 << 18
_ENDING_VERBS = frozenset({"cleanup", "shutdown"})


@dataclass(eq=False, slots=True)
class _Call:
    id: CallId
    verb: str
    task: asyncio.Task[Any] | None = None
    crashed: bool = False


class Host:
    """`run` returns the exit code of the process."""

    def __init__(
        self, listener: socket.socket, module: ModuleType, key: str, unsent_path: str, loop: HostLoop | None = None
    ) -> None:
        self._listener = listener
        self._module = module
        self._key = key
        self._loop = loop or HostLoop()
        self._outbox = Outbox(self._loop, unsent_path)
        self._connection: socket.socket | None = None
        self._epoch = 0
        self._runner: AgentRunner | None = None
        self._made: Mapping[str, Any] | None = None
        self._running: dict[CallId, _Call] = {}
        self._ending = False
        self._crash: BaseException | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._code = 0
        self._pid = os.getpid()

    def run(self) -> int:
        self.open()
        try:
            self._loop.run_forever()
            self._end_if_forked()
            if not self._ending and self._crash is None:
                self._crash = AgentExecutionError("the agent stopped the loop on which it lives")
            if self._crash is None:
                self._loop.end_tasks()
        except BaseException as error:  # noqa: BLE001 - a task of the agent ends the program
            self._crash = self._crash or error
            self._end_if_forked()
        if self._crash is not None and not self._ending:
            self._code = self._report_crash(self._crash)
        self._outbox.drain(_DRAIN_SECONDS)
        return self._code

    def open(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)

    def leave_loop(self) -> None:
        """Another host will live on it."""
        self._loop.remove_signal_handler(signal.SIGTERM)
        for sock in (self._connection, self._listener):
            if sock is not None:
                self._loop.remove_reader(sock.fileno())
        self.hang_up()

    def close(self) -> None:
        """For a process that goes on: the rehearsal of a template."""
        self.leave_loop()
        self._loop.close()
        asyncio.set_event_loop(None)

    def hang_up(self) -> None:
        """Everything is said: the manager knows now that the end has begun."""
        for sock in (self._connection, self._listener):
            if sock is not None:
                sock.close()

    def separate_children(self) -> None:
        """A process that the agent forks must neither answer for it nor take its signals."""

        def separate() -> None:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
            if getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == "asyncio.unix_events":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._outbox.silence()
            self.hang_up()
            self._loop.stop()

        os.register_at_fork(after_in_child=separate)

    def _end_if_forked(self) -> None:
        if os.getpid() != self._pid:
            if self._crash is None:
                complain("a process that the agent forked came back to the agent's loop; end it with os._exit")
            os._exit(1 if self._crash is None else exit_code(self._crash))

    # --- connections ---

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        reader = LineReader()
        self._loop.add_reader(sock.fileno(), self._readable, sock, reader)
        self._loop.call_later(_HELLO_SECONDS, self._require_hello, sock)
        self._readable(sock, reader)  # its hello has mostly come already

    def _require_hello(self, sock: socket.socket) -> None:
        if sock is not self._connection:
            self._close(sock)

    def _readable(self, sock: socket.socket, reader: LineReader) -> None:
        try:
            data = sock.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the manager is gone; the agent works on, and the keeper ends it when no other comes
            self._close(sock)
            return
        try:
            for line in reader.lines(data):
                self._take_line(sock, reader, line)
        except ProtocolError as error:
            complain(f"a connection is closed: {error}")
            self._close(sock)

    def _take_line(self, sock: socket.socket, reader: LineReader, line: bytes) -> None:
        """What the manager says and this agent does not understand is passed over; a stranger is sent away."""
        try:
            if sock is self._connection:
                self._take(reader.decode(line))
            elif sock.fileno() >= 0:
                self._take_hello(sock, reader.decode(line))
        except (ProtocolError, LookupError, TypeError, ValueError, AttributeError) as error:
            complain(f"what the manager sent makes no sense: {type(error).__name__}: {error}")
            if sock is not self._connection:
                self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if sock is self._connection:
            self._connection = None
            self._outbox.disconnect()
        elif sock.fileno() >= 0:
            self._loop.remove_reader(sock.fileno())
            sock.close()

    def _take_hello(self, sock: socket.socket, message: Mapping[str, Any]) -> None:
        if message["t"] != "hello" or message.get("key") != self._key:
            raise ProtocolError("a connection without the key of this agent")
        epoch = int(message["epoch"])
        if epoch < self._epoch:
            raise ProtocolError(f"a manager of epoch {epoch}, which is older than {self._epoch}")
        self._epoch, self._connection = epoch, sock
        calls = [call.id for call in self._running.values()]
        calls += [call for call in self._outbox.unacknowledged if call not in self._running]
        made = None if self._made is None else dict(self._made)
        questions = self._outbox.open_questions
        self._outbox.connect(sock, {"t": "welcome", "calls": calls, "questions": questions, "made": made})

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ack" in message or "seen" in message:
            self._outbox.acknowledged(message.get("ack", ()), int(message.get("seen", 0)))
        match message["t"]:
            case "call":
                self._begin_call(message)
            case "cancel":
                call = self._running.get(message["id"])
                if call is not None and call.task is not None:
                    call.task.cancel()
            case "reply":
                self._outbox.answered(message["id"], _reply(message))
            case "ping":
                self._outbox.tell({"t": "pong", "n": message["n"]})
            case "begin":
                self._begin(message["plan"])
            case "stop":
                self._stop()
            case "ack":
                pass
            case other:
                raise ProtocolError(f"an unknown message {other!r:.50}")

    # --- the agent object ---

    def _begin(self, plan: Mapping[str, Any]) -> None:
        if self._made is not None:
            self._outbox.tell(self._made)
            return
        try:
            context = context_of(plan, self._outbox)
            self._loop.workers.most = context.limits.max_worker_threads
            maker = maker_of(self._module, plan["source"]["qualname"])
            runner = AgentRunner(maker, context, workers=self._loop.workers)
            runner.make()
        except BaseException as error:  # noqa: BLE001 - reported, and the process ends
            self._made = {"t": "made", "error": rendered(error, ours=__file__)}
            self._outbox.tell(self._made)
            self._code = exit_code(error)
            self._stop()
            return
        self._runner, self._made = runner, {"t": "made"}
        self._outbox.tell(self._made)

    # --- calls ---

    def _begin_call(self, message: Mapping[str, Any]) -> None:
        call_id, verb = message["id"], message["verb"]
        if call_id in self._running or self._outbox.repeat_answer(call_id):
            return  # an earlier manager asked for it: the work runs once
        runner = self._runner
        if runner is None or self._ending:
            self._outbox.answer(call_id, encode({"t": "answer", "id": call_id, "cancelled": True}))
            return
        call = self._running[call_id] = _Call(call_id, verb)
        call.task = self._loop.create_task(self._work(call, runner, message.get("payload")))
        call.task.add_done_callback(partial(self._finished, call))

    async def _work(self, call: _Call, runner: AgentRunner, payload: Any) -> Any:
        try:
            return await runner.run(call.verb, payload, call_id=call.id)
        except (asyncio.CancelledError, Exception):
            raise
        except BaseException as error:  # noqa: BLE001 - raised from a task it would end the loop in mid-turn
            if not self._ending:
                self._crash, call.crashed = self._crash or error, True
                self._loop.stop()
            return None

    def _finished(self, call: _Call, task: asyncio.Task[Any]) -> None:
        if call.crashed:
            return  # `_report_crash` answers it
        self._running.pop(call.id, None)
        answer: dict[str, Any] = {"t": "answer", "id": call.id}
        if task.cancelled():
            answer["cancelled"] = True
        elif (error := task.exception()) is not None:
            answer["error"] = rendered(error, ours=__file__)
            if isinstance(error, AgentGoneError):
                answer["gone"] = str(error)
        else:
            answer["ok"] = task.result()
        try:
            body = encode(answer)
        except Exception as error:  # noqa: BLE001 - the answer is foreign, and so is how it is encoded
            too_long = isinstance(error, TooLongError)
            advice = "write it to a file and answer the path" if too_long else "answer plain JSON data"
            reason = clean_text(f"what {call.verb} answered cannot leave its process: {error}; {advice}")
            fields = {"message": reason, "exception_type": type(error).__name__, "stack_trace": None}
            body = encode({"t": "answer", "id": call.id, "error": fields})
        self._outbox.answer(call.id, body)

    # --- the end ---

    def _stop(self) -> None:
        if not self._ending:
            self._ending = True
            if self._runner is not None:
                self._runner.context.mark_stopping()
            self._loop.stop()

    def _terminate(self) -> None:
        """TERM: its sender cannot call, so clean-up and shutdown run here, unless they have."""
        if self._ending or self._leaving is not None:
            return
        if self._runner is None:
            self._stop()
        else:
            self._leaving = self._loop.create_task(self._shut_down(self._runner))

    async def _shut_down(self, runner: AgentRunner) -> None:
        runner.context.mark_stopping()
        try:
            async with asyncio.timeout(_TERM_SECONDS):
                tasks = [c.task for c in self._running.values() if c.task is not None and c.verb not in _ENDING_VERBS]
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks, timeout=_TERM_SECONDS / 2)
                for complaint in await runner.run("cleanup"):
                    complain(complaint)
                await runner.run("shutdown")
        except Exception as error:  # noqa: BLE001 - it ends all the same
            complain(f"the agent did not shut down: {error}")
        finally:
            self._stop()

    def _report_crash(self, crash: BaseException) -> int:
        fields = rendered(crash, ours=__file__)
        for call_id in self._running:
            self._outbox.answer(call_id, encode({"t": "answer", "id": call_id, "crash": fields}))
        if not isinstance(crash, SystemExit):
            complain(fields["stack_trace"] or str(crash))
        return exit_code(crash)


class HostLoop(AgentLoop):
    def __init__(self) -> None:
        super().__init__(Workers(1, "ostler-agent", Census(lambda: None)))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Its own; asyncio shows no other way to them."""
        return tuple(getattr(self, name).fileno() for name in ("_selector", "_ssock", "_csock"))


def _reply(message: Mapping[str, Any]) -> WaitAnswer | str:
    error = message.get("error")
    return WaitAnswer(outcome=str(message["outcome"]), answer=message.get("answer")) if error is None else str(error)
