"""Agents that do as they are told, also when they are told to misbehave."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostler.agents import Agent, AgentContext

RELEASE = "release"
#: Nothing misbehaves for longer, even when a test forgets about it.
_LAST_RESORT_SECONDS = 30


class ScriptedAgent(Agent):
    """A request is a mapping: `do` names a method below, the rest is for that method."""

    def __init__(self) -> None:
        self._met = asyncio.Event()
        self._asked = 0
        self._background: asyncio.Task[None] | None = None

    async def initialize(self, context: AgentContext) -> None:
        self._context = context
        if context.data.get("refuses"):
            raise ValueError("not today")
        if "hook" in context.data:
            context.add_cleanup(lambda: context.signal("hook ran"), name="hook")
            context.add_cleanup(_fail, name="broken hook")

    async def process(self, request: Mapping[str, Any]) -> Any:
        self._asked += 1
        return await getattr(self, request["do"])(request)

    async def health(self) -> str:
        return "a bit pale"

    async def final_state(self) -> dict[str, Any]:
        return {"asked": self._asked}

    async def shutdown(self) -> None:
        self._context.signal("shut down")

    async def echo(self, request: Mapping[str, Any]) -> Any:
        return request.get("value")

    async def log(self, request: Mapping[str, Any]) -> None:
        self._context.logger.info(request["text"])

    async def tell(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """What it knows of itself."""
        mine = self._context
        return {
            "instance_id": str(mine.instance_id),
            "attempt": mine.attempt,
            "name": mine.name,
            "data": dict(mine.data),
            "thread": threading.get_ident(),
            "process": os.getpid(),
        }

    async def where(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Where it works, and which variables it has."""
        names = request.get("names", ())
        workdir = self._context.workdir
        return {
            "workdir": None if workdir is None else str(workdir),
            "cwd": str(Path.cwd()),
            "env": dict(self._context.env),
            "environ": {name: os.environ[name] for name in names if name in os.environ},
        }

    async def say(self, request: Mapping[str, Any]) -> int:
        """Signals and token counts by turns; the signals are named by their place."""
        for number in range(1, request["count"] + 1):
            if number % 2:
                self._context.signal(f"say {number}")
            else:
                self._context.report_tokens(number)
        return self._asked

    async def fail(self, _request: Mapping[str, Any]) -> None:
        _fail()

    async def exit(self, _request: Mapping[str, Any]) -> None:
        self._context.signal("last words")
        raise SystemExit(3)

    async def cancel_itself(self, _request: Mapping[str, Any]) -> None:
        raise asyncio.CancelledError

    async def meet(self, request: Mapping[str, Any]) -> str:
        """The first call waits for the second."""
        if request["first"]:
            self._context.signal("began")
            await self._met.wait()
            return "met"
        self._met.set()
        return "came"

    async def hang(self, _request: Mapping[str, Any]) -> None:
        """For ever, but it obeys; and it takes a few steps to tidy up."""
        self._context.signal("began")
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            self._context.signal("stopped")

    async def stubborn(self, _request: Mapping[str, Any]) -> str:
        self._context.signal("began")
        while not self._released():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue
        self._context.signal("ended")
        return "ended"

    async def tick(self, _request: Mapping[str, Any]) -> str:
        """Says something now and then, so that it shows whether it goes on."""
        self._context.signal("began")
        while not self._released():
            await asyncio.sleep(0.005)
            self._context.signal("tick")
        return "ended"

    async def exit_when_released(self, _request: Mapping[str, Any]) -> None:
        self._context.signal("began")
        while not self._released():  # noqa: ASYNC110 - what it waits for is a file
            await asyncio.sleep(0.005)
        raise SystemExit(3)

    async def say_when_released(self, _request: Mapping[str, Any]) -> None:
        self._context.signal("began")
        while not self._released():  # noqa: ASYNC110 - what it waits for is a file
            await asyncio.sleep(0.005)
        self._context.signal("unheard")
        await asyncio.sleep(_LAST_RESORT_SECONDS)

    async def block(self, _request: Mapping[str, Any]) -> None:
        """Async only by name: nothing else happens on its loop."""
        self._context.signal("began")
        while not self._released():
            time.sleep(0.005)  # noqa: ASYNC251 - to block is the point
        self._context.signal("ended")

    async def spin(self, _request: Mapping[str, Any]) -> None:
        self._context.signal("began")
        while not self._released():
            pass

    async def ask(self, request: Mapping[str, Any]) -> Any:
        self._context.signal("began")
        answer = await self._context.wait_for("human", reason="which colour?", detail=request.get("detail"))
        return answer.outcome, answer.answer

    async def chat(self, request: Mapping[str, Any]) -> None:
        """A lot of news, and now and then something that counts."""
        for number in range(request["count"]):
            self._context.report(number / request["count"])
            if number % 100 == 0:
                self._context.signal("hundred", {"number": number})
                self._context.report_tokens(number)

    async def exit_later(self, _request: Mapping[str, Any]) -> str:
        """A task of its own ends the loop, when nobody is asking anything."""

        async def leave() -> None:
            raise SystemExit(4)

        self._background = asyncio.create_task(leave())
        return "soon"

    def _released(self) -> bool:
        return _released(self._context)


class PlainAgent(Agent):
    """The same without async."""

    def initialize(self, context: AgentContext) -> None:
        self._context = context

    def process(self, request: Mapping[str, Any]) -> Any:
        return getattr(self, request["do"])()

    def thread(self) -> int:
        return threading.get_ident()

    def fail(self) -> None:
        _fail()

    def exit(self) -> None:
        raise SystemExit(5)

    def block(self) -> str:
        """Hears of no cancelling."""
        self._context.signal("began")
        while not _released(self._context):
            time.sleep(0.005)
        self._context.signal("ended")
        return "ended"

    def obey(self) -> None:
        self._context.signal("began")
        try:
            while not _released(self._context):
                self._context.raise_if_cancelled()
                time.sleep(0.005)
        finally:
            self._context.signal("stopped")


async def greet(request: Any, context: AgentContext) -> str:
    """An agent that is one function."""
    return f"{context.name} greets {request}"


def double(request: int) -> int:
    """The same, plain and without the context."""
    return 2 * request


class UnmadeAgent(Agent):
    def __init__(self) -> None:
        raise ValueError("cannot be made")


class LeavingAgent(Agent):
    def __init__(self) -> None:
        raise SystemExit(6)


def _fail() -> None:
    raise ValueError("as told")


def _released(context: AgentContext) -> bool:
    workdir = context.workdir
    if workdir is None:
        return True
    if not (workdir / "since").exists():
        (workdir / "since").touch()
    age = time.time() - (workdir / "since").stat().st_mtime
    return age > _LAST_RESORT_SECONDS or (workdir / RELEASE).exists()
