"""A manager that asks a coding agent something and waits to be killed: HOME PLACE DRIVER; its variables by stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path

from coding_ground import Coder

import ostler
from ostler import LifecycleSettings


async def main(home: str, place: str, name: str) -> None:
    env = json.load(sys.stdin)
    coder = Coder(name, Path(place))
    async with ostler.open(home, settings=LifecycleSettings(outlive=timedelta(minutes=1))) as manager:
        coder.register(manager)
        agent = await manager.start(coder.definition, workdir=place, env=env, name="worker")
        await agent.ask("Do it.", id="work")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
