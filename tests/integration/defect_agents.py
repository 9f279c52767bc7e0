"""Agents that talk too much, or nonsense, or not at all. Imported in processes of their own, so it imports little."""

# ruff: noqa: SLF001 - they speak past what an agent is given

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import threading
import time
from functools import cache
from typing import Any

from ostler.agent_process.outbox import Outbox
from ostler.agents import Agent, AgentContext
from ostler.errors import AgentBusyError, ValidationError


class Nuisance(Agent):
    """Does what the request names."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context

    async def process(self, request: Any) -> Any:
        return await getattr(self, request["do"])(request)

    async def echo(self, request: Any) -> Any:
        return request.get("value")

    async def chatter(self, request: Any) -> str:
        """Says all of it at once, and has answered before anybody can have heard it."""
        for number in range(request["count"]):
            self.context.signal("chatter", {"number": number})
        return "done"

    async def block(self, request: Any) -> Any:
        """Its loop stands still."""
        with open(request["note"], "a") as file:  # noqa: ASYNC230, PTH123 - that is what it is for
            file.write("done\n")
        time.sleep(request["seconds"])  # noqa: ASYNC251 - that is what it is for
        return request.get("value")

    async def fill(self, request: Any) -> int:
        """Says it until it is told that it says too much. How often that went well."""
        for number in range(request["most"]):
            try:
                self.context.signal("filled", {"text": "v" * request["length"]})
            except AgentBusyError:
                return number
        return int(request["most"])

    async def fill_alone(self, request: Any) -> None:
        """The same once its manager is gone; then it says in a file how often that went well."""
        await _be_alone()
        _note(request["note"], await self.fill(request))
        await asyncio.Event().wait()

    async def answer_alone(self, request: Any) -> Any:
        """Answers when its manager is gone."""
        await _be_alone()
        return request["value"]

    async def crash_alone(self, request: Any) -> None:
        await _be_alone()
        raise SystemExit(request["value"])

    async def fork_and_speak(self, _request: Any) -> int:
        """A child says what only the agent may say, while another thread of the agent speaks too."""
        held = threading.Event()
        free = threading.Event()

        def hold() -> None:
            with _outbox()._lock:
                held.set()
                free.wait(30)

        threading.Thread(target=hold, daemon=True).start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            self.context.signal("child")
            self.context.report(0.5)
            os._exit(7)
        free.set()
        return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1])

    async def fork_alone(self, request: Any) -> None:
        """The same without a manager."""
        await _be_alone()
        self.context.signal("parent")
        child = os.fork()
        if child == 0:
            self.context.signal("child")
            os._exit(7)
        await asyncio.to_thread(os.waitpid, child, 0)
        _note(request["note"], os.getpid())
        await asyncio.Event().wait()

    async def tell(self, request: Any) -> str:
        """As it should: by its context. What came of it."""
        try:
            if request["how"] == "signal":
                self.context.signal("x", {"text": "v" * request["length"]})
            else:
                self.context.report(0.5, text="v" * request["length"])
        except ValidationError as error:
            return str(error)
        return "said"

    async def babble(self, request: Any) -> None:
        """The same over and over, past its context; and then it is gone."""
        for _ in range(request.get("times", 60)):
            with contextlib.suppress(BlockingIOError):
                _send(request["text"].encode() + b"\n")
        if "code" in request:
            os._exit(request["code"])
        await asyncio.Event().wait()

    async def flood(self, request: Any) -> None:
        """Until the end, as fast as it is taken, and its loop stays free."""
        body = json.dumps(request["message"], separators=(",", ":")).encode() + b"\n"

        def run() -> None:
            while True:
                try:
                    _send(body)
                except BlockingIOError:
                    time.sleep(0.0005)
                except OSError:
                    return

        # Once this is answered: in such a crowd its own answer might not get through.
        asyncio.get_running_loop().call_later(0.05, threading.Thread(target=run, daemon=True).start)


def _send(body: bytes) -> None:
    """All of it, or as far as the manager takes it; half a line would be a fault of its own."""
    sock = _outbox()._sock
    if sock is None:
        raise OSError("no manager is there")
    while body:
        try:
            body = body[sock.send(body) :]
        except BlockingIOError:
            time.sleep(0.0005)


async def _be_alone() -> None:
    while _outbox()._sock is not None:  # noqa: ASYNC110 - nothing tells an agent that its manager is gone
        await asyncio.sleep(0.001)


def _note(path: str, value: object) -> None:
    with open(f"{path}.new", "w") as file:  # noqa: PTH123 - it imports little
        file.write(str(value))
    os.rename(f"{path}.new", path)  # noqa: PTH104 - as above


@cache
def _outbox() -> Outbox:
    return next(one for one in gc.get_objects() if isinstance(one, Outbox) and not one._unsent_path.startswith("/dev"))


class Mayfly(Agent):
    """Initialises well, and is dead a moment later."""

    async def initialize(self, context: AgentContext) -> None:
        del context
        asyncio.get_running_loop().call_later(0.003, os._exit, 3)

    def process(self, request: Any) -> Any:
        return request
