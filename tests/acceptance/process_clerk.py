"""Agents for the tests that kill managers: each writes down what it does, where no manager can lose it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

from ostler import Agent, AgentContext, CommandSpec


class Clerk(Agent):
    """Notes each execution with its time, signals it, and answers after a moment."""

    agent_name = "clerk"

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.notes = Path(context.data["notes"])

    async def process(self, request: dict[str, Any]) -> dict[str, Any]:
        note(self.notes, "did", request["id"], self.context.instance_id, self.context.attempt)
        self.context.signal("did", {"id": request["id"]})
        await asyncio.sleep(random.uniform(0, 0.05))
        return {"id": request["id"], "pid": os.getpid()}


_PROGRAM = """
import sys, time
name, notes, request, instance, attempt = sys.argv
with open(notes, "ab", buffering=0) as out:
    out.write(" ".join(("did", request, instance, attempt, str(time.monotonic()))).encode() + b"\\n")
print(request)
"""


def command(folder: Path) -> CommandSpec:
    """The same as a command."""
    program = folder / "tool.py"
    program.write_text(_PROGRAM)
    words = ("python3", "-I", "-S", str(program), str(folder / "notes"), "{prompt}", "{instance_id}", "{attempt}")
    return CommandSpec(argv=words)


def note(file: Path, *words: object) -> None:
    """One line, appended in one write; the last word is the time."""
    line = " ".join(map(str, (*words, time.monotonic()))) + "\n"
    with file.open("ab", buffering=0) as out:
        out.write(line.encode())


def lines(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []
