"""Agents for the tests of managed brains. Also imported in processes of their own, so it imports little."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, ClassVar

from ostler.agents import Agent, AgentContext


class Thinker(Agent):
    """Does what stands in the state of its agent under `do`, and decides by saying who it is."""

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.asked = 0

    async def process(self, request: Any) -> Any:
        self.asked += 1
        return await getattr(self, request["state"].get("do", "decide"))(request)

    async def decide(self, request: Any) -> Any:
        return {
            "name": request["name"],
            "turn": request["turn"],
            "asked": self.asked,
            "pid": os.getpid(),
            "known_as": [self.context.data["simulation_agent"], self.context.data["simulation_number"]],
            "run": self.context.data["simulation_run"],
            "mood": self.context.data.get("mood"),
        }

    async def err(self, _: Any) -> None:
        raise ValueError("not my day")

    async def hang(self, _: Any) -> None:
        await asyncio.Event().wait()

    async def fall(self, _: Any) -> None:
        raise SystemExit(3)

    async def drop(self, _: Any) -> None:
        os._exit(3)

    async def mumble(self, _: Any) -> Any:
        return {1, 2, 3}

    async def spoil(self, request: Any) -> Any:
        request["state"]["wealth"] = 1_000_000
        request["global_state"]["prices"].append(0)
        return (1, 2)


class Stubborn(Thinker):
    """Once it thinks, it does not let itself be called off."""

    released: ClassVar[threading.Event] = threading.Event()

    async def hang(self, _: Any) -> None:
        while not self.released.is_set():
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                continue


class Sleepyhead(Thinker):
    """Does not get up while it rains."""

    raining: ClassVar[threading.Event] = threading.Event()

    async def initialize(self, context: AgentContext) -> None:
        if self.raining.is_set():
            raise RuntimeError("it rains")
        await super().initialize(context)
