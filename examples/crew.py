"""The agents of the demo. Each is a plain class, and each really does what it says."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from ostler import Agent, AgentContext


class Writer(Agent):
    """Writes a chapter into its own directory; stumbles when it is told to."""

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        context.add_cleanup(self.close_the_book)

    async def process(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("stumble"):
            raise SystemExit(3)  # as a library deep below does, when it thinks that it owns the program
        folder = self.context.workdir
        if folder is None:
            return {}
        (folder / f"{request['chapter']}.md").write_text(f"# {request['chapter']}\n")
        self.context.report(message=f"wrote {request['chapter']}.md")
        return {"files": sorted(path.name for path in folder.iterdir()), "start": self.context.attempt}

    def close_the_book(self) -> None:
        if self.context.workdir is not None:
            (self.context.workdir / "THE-END.md").touch()


class Editor(Agent):
    """Cannot go on without a word from somebody."""

    async def initialize(self, context: AgentContext) -> None:
        self.context = context

    async def process(self, request: dict[str, Any]) -> str:
        limit = timedelta(hours=1)
        answer = await self.context.wait_for("approval", reason=f"may I print {request['book']}?", timeout=limit)
        return f"{request['book']}: {answer.outcome}"


class Unlucky(Agent):
    """Every request ends it."""

    def process(self, request: Any) -> None:
        raise RuntimeError(f"no luck with {request}")


class Mule(Agent):
    """A plain method that never returns, never looks whether it should, and would block any loop it ran on."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context

    def process(self, request: Any) -> None:
        self.context.signal("began")
        while request:
            pass


class Counter(Agent):
    """Counts aloud, in a plain method that nothing but force could stop."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context

    def process(self, request: str) -> Any:
        if request == "who":
            return {"pid": os.getpid(), "start": self.context.attempt}
        if self.context.workdir is None:
            return 0
        with (self.context.workdir / "count").open("wb", buffering=0) as file:
            for number in range(1, 1001):
                time.sleep(0.001)
                os.pwrite(file.fileno(), b"%06d" % number, 0)
        return number


class Glutton(Agent):
    """Takes as many megabytes as it is told to."""

    def process(self, request: int) -> int:
        return len(bytearray(b"x" * (request * 1024 * 1024)))
