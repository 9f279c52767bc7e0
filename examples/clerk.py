"""An agent in Python that asks a person before it acts."""

from __future__ import annotations

from typing import Any

from ostler import Agent, AgentContext


class Clerk(Agent):
    async def initialize(self, context: AgentContext) -> None:
        self.context = context

    async def process(self, request: Any) -> str:
        self.context.logger.info("asked to %s", request["prompt"])
        answer = await self.context.wait_for("human", reason=f"May I {request['prompt']}?")
        self.context.logger.info("the answer is %s", answer.outcome)
        return "done" if answer.outcome == "yes" else "left alone"
