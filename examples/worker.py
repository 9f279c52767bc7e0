"""An agent that the demo starts: it counts, asks a person, and dies when it is told to."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import ostler


class Worker(ostler.Agent):
    def initialize(self, context: ostler.AgentContext) -> None:
        self.context = context

    async def process(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("do"):
            case "count":
                for step in range(1, 4):
                    self.context.report(step / 3, f"step {step} of 3")
                    await asyncio.sleep(0.2)
            case "ask":
                answer = await self.context.wait_for("human", reason="May I delete the old migration?")
                return {"allowed": answer.outcome}
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                await asyncio.sleep(2.0)
        return {"pid": os.getpid(), "attempt": self.context.attempt}
