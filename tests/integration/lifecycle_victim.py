"""Plays a scene on a home, tells on one line what it made, and waits to be killed."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

from lifecycle_agents import Stage
from lifecycle_ground import PROCESS, Crew

from ostler import SystemClock

_HERE = Path(__file__).parent


async def main(scene: str, home: str, stage: str, given: str) -> None:
    module, _, name = scene.partition(":")
    play = getattr(importlib.import_module(module), name)
    crew = Crew(Path(home), SystemClock(), Stage(Path(stage)), PROCESS)
    await crew.open()
    made = await play(crew, **json.loads(given))
    sys.stdout.write(json.dumps(made, default=str) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
