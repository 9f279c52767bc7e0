"""Agents for the tests of managed brains. Also imported in processes of their own, so it imports little."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from ostler.agents.base import Agent
from ostler.agents.context import AgentContext


class Thinker(Agent):
    """Does what stands in the state of its agent under `do` for this turn, else decides by saying who it is."""

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.asked = 0
        if os.path.exists(str(context.data.get("rain", "/nowhere"))):  # noqa: PTH110 - a test may look
            raise RuntimeError("it rains")

    async def process(self, request: Any) -> Any:
        self.asked += 1
        act = request["state"].get("do", {}).get(str(request["turn"]), "decide")
        return await getattr(self, act)(request)

    async def decide(self, request: Any) -> Any:
        data = self.context.data
        return {
            "name": request["name"],
            "turn": request["turn"],
            "asked": self.asked,
            "pid": os.getpid(),
            "known_as": [data["simulation_run"], data["simulation_number"]],
            "mood": data.get("mood"),
        }

    async def err(self, _: Any) -> None:
        raise ValueError("not my day")

    async def hang(self, _: Any) -> None:
        await asyncio.Event().wait()

    async def block(self, _: Any) -> None:
        """Neither asyncio nor TERM gets through to it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)  # noqa: ASYNC251 - that is the point

    async def drop(self, _: Any) -> None:
        os._exit(3)

    async def mumble(self, _: Any) -> Any:
        return {1, 2, 3}

    async def spoil(self, request: Any) -> Any:
        request["state"]["wealth"] = 1_000_000
        request["global_state"]["prices"].append(0)
        return [1, 2]

    async def ask_for(self, request: Any) -> Any:
        pause = {"operation": "pause_agent", "auto_resume_turns": 2}
        return {"decision": request["turn"], "requests": [pause, {"operation": "remove_agent", "agent_name": "bo"}]}


class Steady(Thinker):
    """Decides by the turn alone, whatever it was asked before."""

    async def decide(self, request: Any) -> Any:
        return {"n": request["turn"] * request["number"]}
