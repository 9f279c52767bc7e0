"""Agents for the tests that kill managers: each writes down what it does, where no manager can lose it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import ostler


class Clerk(ostler.Agent):
    """Does each request once and says so in its own directory; ends with the code that a file tells it."""

    async def initialize(self, context: ostler.AgentContext) -> None:
        assert context.workdir is not None
        self._done = context.workdir / "done.log"
        self._orders = context.workdir / "exit"
        signal.signal(signal.SIGUSR1, self._exit)
        self._note(f"start {context.attempt} {os.getpid()}")

    async def process(self, request: dict[str, Any]) -> dict[str, Any]:
        self._note(f"did {request['id']}")
        await asyncio.sleep(request.get("seconds", 0))
        return {"id": request["id"], "pid": os.getpid()}

    def _exit(self, *_signal: object) -> None:
        os._exit(int(self._orders.read_text()))

    def _note(self, line: str) -> None:
        with self._done.open("a") as file:
            file.write(f"{line}\n")


def notes(home: Path, instance_id: str) -> list[str]:
    file = home / "work" / instance_id / "done.log"
    return file.read_text().splitlines() if file.exists() else []
