"""Agents that end themselves, in their work or before they have any. Imported in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from ostler.agents import Agent, AgentContext


class Strange(BaseException):
    pass


class Quitter(Agent):
    """Ends in the way that the context names, or that a request names."""

    async def initialize(self, context: AgentContext) -> None:
        if "how" in context.data:
            await end(context.data["how"])

    async def process(self, request: Any) -> Any:
        return await end(request)


RAISED = {"system": SystemExit(3), "interrupt": KeyboardInterrupt(), "strange": Strange("unheard of")}


async def end(how: str) -> Any:
    if how in RAISED:
        raise RAISED[how]
    match how:
        case "umask":
            before = os.umask(0)
            os.umask(before)
            return before
        case "loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
        case "task":
            await asyncio.gather(asyncio.ensure_future(end("system")))
        case "code":
            os._exit(3)
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            held = bytearray(500 << 20)
            held[::4096] = b"x" * len(held[::4096])
        case "error":
            raise ValueError("no")
    await asyncio.Event().wait()
    return None
