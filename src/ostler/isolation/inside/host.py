"""The loop on which an agent lives in a process of its own: hears the manager, runs the calls, ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from ostler.agents import AgentRunner, WaitAnswer
from ostler.agents.context import CallId
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation import wire
from ostler.isolation.agentloop import AgentLoop
from ostler.isolation.inside.begin import context_of
from ostler.isolation.inside.finding_source import maker_of
from ostler.isolation.inside.parting import part_children
from ostler.isolation.inside.speaking import Speaker
from ostler.isolation.inside.telling import complain, exit_code, rendered
from ostler.isolation.workers import Census, Workers
from ostler.model.text import clean_text

#: Neither the manager nor the keeper is left.
ORPHANED = 70
#: How long clean-up and shutdown may take after a TERM; its sender has a KILL ready.
_LEAVE_SECONDS = 5.0
#: How long the last messages wait to be read.
_DRAIN_SECONDS = 2.0
_PACKETS_PER_TURN = 64
_PLAIN = "answer plain JSON data"
_STRAY = (
    "a process that the agent forked came back to the loop of the agent, and is ended; "
    "end it with os._exit, or use multiprocessing or subprocess"
)
#: These belong to the end, and are not cut off by it.
_ENDING = frozenset({"cleanup", "shutdown"})


@dataclass(eq=False, slots=True)
class _Call:
    id: CallId
    verb: str
    task: asyncio.Task[Any] | None = None
    crashed: bool = False


class Host:
    """One agent. `run` returns the code with which the process should exit."""

    def __init__(self, channel: socket.socket, module: ModuleType, loop: HostLoop | None = None) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._module = module
        self._loop = loop or HostLoop()
        self._joiner = wire.Joiner()
        self._speaker: Speaker | None = None
        self._runner: AgentRunner | None = None
        self._attempt = self._epoch = 0
        self._running: dict[CallId, _Call] = {}
        #: Its end was asked for.
        self._ending = False
        self._crash: BaseException | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._code = 0
        self._process = os.getpid()

    def run(self) -> int:
        loop = self._loop
        asyncio.set_event_loop(loop)
        self.listen()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        try:
            loop.run_forever()
            self._end_stray()
            if not self._ending and self._crash is None:
                self._crash = AgentExecutionError("the agent stopped the loop on which it lives")
            if self._crash is None:
                self._end_tasks()
        except BaseException as error:  # noqa: BLE001 - a task of the agent's own wants to end the program
            self._crash = self._crash or error
            self._end_stray()
        if self._crash is not None and not self._ending:
            self._code = self._tell_crash(self._crash)
        if self._speaker is not None:
            self._speaker.drain(_DRAIN_SECONDS)
        return self._code

    def hang_up(self) -> None:
        """All is said. The manager knows from now on that the end has begun, however long that takes."""
        self._channel.close()

    def part_children(self) -> None:
        part_children(self._loop, self._channel)

    def _end_stray(self) -> None:
        if os.getpid() == self._process:
            return
        if self._crash is None:
            complain(_STRAY)
        os._exit(1 if self._crash is None else exit_code(self._crash))

    def listen(self) -> None:
        # By its number: asyncio looks a socket up by writing it out, in an error that it swallows.
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def close(self) -> None:
        """For a process that goes on after it."""
        self._loop.remove_signal_handler(signal.SIGTERM)
        self._loop.close()
        asyncio.set_event_loop(None)

    # --- hearing -------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = wire.receive(self._channel)
            except (BlockingIOError, InterruptedError):
                return
            if packet is None:
                # Not even the keeper is there any more, so nothing will ever look after this process.
                os._exit(ORPHANED)
            try:
                self._take(wire.read(packet))
            except (wire.WireError, LookupError, TypeError, ValueError, AttributeError) as error:
                complain(f"what the manager says makes no sense: {type(error).__name__}: {error}")

    def _take(self, packet: wire.Packet) -> None:
        if packet.epoch < self._epoch:
            return  # from a manager that is gone
        message = self._joiner.take(packet)
        if message is None:
            return
        kind = message["t"]
        if self._speaker is None:
            if kind not in {"begin", "hello", "stop"}:
                raise wire.WireError(f"{kind} before the agent was begun")
            self._attempt, self._epoch = packet.attempt, packet.epoch
            self._speaker = Speaker(self._channel, self._loop, packet.attempt, packet.epoch)
        if packet.attempt != self._attempt:
            raise wire.WireError(f"a message for start {packet.attempt}; this is start {self._attempt}")
        if packet.epoch > self._epoch and kind != "hello":
            raise wire.WireError(f"{kind} from a manager that has not said hello")
        if "ack" in message or "heard" in message:
            self._speaker.acknowledged(message.get("ack", ()), int(message.get("heard", 0)))
        if kind != "acks":
            self._obey(kind, message, packet.epoch, self._speaker)

    def _obey(self, kind: str, message: Mapping[str, Any], epoch: int, speaker: Speaker) -> None:
        match kind:
            case "call":
                self._begin_call(message, speaker)
            case "cancel":
                call = self._running.get(message["id"])
                if call is not None and call.task is not None:
                    call.task.cancel()
            case "told":
                speaker.told(message["id"], _told(message))
            case "ping":
                speaker.tell({"t": "pong", "n": message["n"]})
            case "hello":
                self._epoch = epoch
                calls = [{"id": call.id, "verb": call.verb} for call in self._running.values()]
                speaker.greet(epoch, {"t": "state", "calls": calls, "made": self._runner is not None})
            case "begin":
                self._begin(message["plan"], speaker)
            case "stop":
                self._stop()
            case _:
                raise wire.WireError(f"an unknown kind of message: {kind!r:.50}")

    # --- the beginning -------------------------------------------------------------------------------

    def _begin(self, plan: Mapping[str, Any], speaker: Speaker) -> None:
        if self._runner is not None:
            raise wire.WireError("the agent was begun before")
        try:
            context = context_of(plan, speaker)
            workers = self._loop.pool
            workers.most = context.limits.max_worker_threads
            runner = AgentRunner(maker_of(self._module, plan["source"]["qualname"]), context, workers=workers)
            runner.make()
        except BaseException as error:  # noqa: BLE001 - told, and the process ends
            speaker.tell({"t": "made", "error": rendered(error, ours=__file__)})
            self._code = exit_code(error)
            self._stop()
            return
        self._runner = runner
        speaker.tell({"t": "made"})

    # --- calls ---------------------------------------------------------------------------------------

    def _begin_call(self, message: Mapping[str, Any], speaker: Speaker) -> None:
        number, verb = message["id"], message["verb"]
        if number in self._running or speaker.answer_again(number):
            return  # asked before, by a manager that is gone: nothing is done twice
        runner = self._runner
        if runner is None or self._ending:
            speaker.answer(number, wire.encode({"t": "answer", "id": number, "cancelled": True}))
            return
        call = self._running[number] = _Call(number, verb)
        call.task = self._loop.create_task(self._work(call, runner, message.get("payload")))
        call.task.add_done_callback(partial(self._finished, call))

    async def _work(self, call: _Call, runner: AgentRunner, payload: Any) -> Any:
        try:
            return await runner.run(call.verb, payload, call_id=call.id)
        except (asyncio.CancelledError, Exception):
            raise
        except BaseException as error:  # noqa: BLE001 - let out of a task it would end the loop in mid-turn
            if not self._ending:
                # It stays among the running: all of them are told how it ended.
                self._crash, call.crashed = self._crash or error, True
                self._loop.stop()
            return None

    def _finished(self, call: _Call, task: asyncio.Task[Any]) -> None:
        if self._speaker is None or call.crashed:
            return
        self._running.pop(call.id, None)
        answer: dict[str, Any] = {"t": "answer", "id": call.id}
        if task.cancelled():
            answer["cancelled"] = True
        elif (error := task.exception()) is not None:
            answer["error"] = rendered(error, ours=__file__)
            if isinstance(error, AgentGoneError):  # of ours; what the agent itself raises is wrapped
                answer["gone"] = str(error)
        else:
            answer["ok"] = task.result()
        try:
            body = wire.encode(answer)
        except Exception as error:  # noqa: BLE001 - what the agent answers is foreign, and so is how it is written
            advice = "write it to a file and answer the path" if isinstance(error, wire.TooLongError) else _PLAIN
            why = f"what {call.verb} answered cannot leave its process: {error}; {advice}"
            told = {"message": clean_text(why), "exception_type": type(error).__name__, "stack_trace": None}
            body = wire.encode({"t": "answer", "id": call.id, "error": told})
        self._speaker.answer(call.id, body)

    # --- the end -------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._ending:
            return
        self._ending = True
        if self._runner is not None:
            self._runner.context.mark_stopping()
        self._loop.stop()

    def _leave(self) -> None:
        """TERM: its sender cannot call, so hooks and shutdown are run here, if they were not before."""
        if self._ending or self._leaving is not None:
            return
        if self._runner is None:
            self._stop()
            return
        self._leaving = self._loop.create_task(self._go(self._runner))

    async def _go(self, runner: AgentRunner) -> None:
        runner.context.mark_stopping()
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._cancel_calls()
                for complaint in await runner.run("cleanup"):
                    complain(complaint)
                await runner.run("shutdown")
        except Exception as error:  # noqa: BLE001 - it leaves all the same
            complain(f"the agent did not shut down: {error}")
        finally:
            self._stop()

    async def _cancel_calls(self) -> None:
        """Work ends before the agent shuts down; one that does not end must not take all the time there is."""
        tasks = [one.task for one in self._running.values() if one.task is not None and one.verb not in _ENDING]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_SECONDS / 2)

    def _end_tasks(self) -> None:
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            # One that wants to end the program instead is done with that; the others have their turn again.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _tell_crash(self, crash: BaseException) -> int:
        told = rendered(crash, ours=__file__)
        if self._speaker is not None:
            for number in self._running:
                self._speaker.answer(number, wire.encode({"t": "answer", "id": number, "crash": told}))
        if not isinstance(crash, SystemExit):
            complain(told["stack_trace"] or str(crash))
        return exit_code(crash)


class HostLoop(AgentLoop):
    def __init__(self) -> None:
        self.pool = _Workers()
        super().__init__(self.pool)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What it needs for itself. Of the two ends by which a signal wakes it, asyncio shows none."""
        return tuple(getattr(self, name).fileno() for name in ("_selector", "_ssock", "_csock"))


class _Workers(Executor):
    """Made when first needed: many an agent has none, and each page of memory that it need not touch counts."""

    def __init__(self) -> None:
        self.most = 1
        self._made: Workers | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._made is None:
            # The process does not wait for the last of them: they are daemons.
            self._made = Workers(self.most, "ostler-agent", Census(lambda: None))
        return self._made.submit(fn, *args, **kwargs)


def _told(message: Mapping[str, Any]) -> WaitAnswer | str:
    error = message.get("error")
    if error is not None:
        return str(error["message"]) if isinstance(error, Mapping) else str(error)
    return WaitAnswer(outcome=str(message["outcome"]), answer=message.get("answer"))
