"""Agents that talk too much, or nonsense, or not at all. Imported in processes of their own, so it imports little."""

# ruff: noqa: SLF001 - they speak past what an agent is given

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import struct
import threading
import time
from functools import cache
from typing import Any

from ostler.isolation.inside.speaking import Speaker

from ostler.agents import Agent, AgentContext
from ostler.errors import ValidationError

_WHOLE = 3


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
                _send(request["text"].encode(), request.get("flags", _WHOLE))
        if "code" in request:
            os._exit(request["code"])
        await asyncio.Event().wait()

    async def flood(self, request: Any) -> None:
        """Until the end, as fast as it is taken, and its loop stays free."""
        body = json.dumps(request["message"], separators=(",", ":")).encode()

        def run() -> None:
            while True:
                try:
                    _send(body, _WHOLE)
                except BlockingIOError:
                    time.sleep(0.0005)
                except OSError:
                    return

        # Once this is answered: in such a crowd its own answer might not get through.
        asyncio.get_running_loop().call_later(0.05, threading.Thread(target=run, daemon=True).start)


def _send(body: bytes, flags: int) -> None:
    speaker = _speaker()
    header = struct.pack("!BBIQ", 1, flags, speaker._sender._attempt, speaker._sender.epoch)
    speaker._sock.send(header + body)


@cache
def _speaker() -> Speaker:
    return next(one for one in gc.get_objects() if isinstance(one, Speaker))


class Mayfly(Agent):
    """Initialises well, and is dead a moment later."""

    async def initialize(self, context: AgentContext) -> None:
        del context
        asyncio.get_running_loop().call_later(0.003, os._exit, 3)

    def process(self, request: Any) -> Any:
        return request
