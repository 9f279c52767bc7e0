"""A manager that is killed: `process_victim.py WHERE FOLDER FAULT`.

It keeps two Python agents, two commands and what it spawns and ends meanwhile; asks them under request ids, and notes
in FOLDER/ledger what it asked for and what was acknowledged, so that the next one can go on. FAULT is a fault point at
which it kills itself, such as `store.ack.before:7:kill`; without one it is killed from outside.
"""

from __future__ import annotations

import asyncio
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from process_clerk import Clerk, command, lines, note

import ostler
from ostler import AgentInitializationError, AgentLifecycleManager, LeaseHeldError, OstlerError, Seams, SystemClock
from ostler.failpoints import FaultPlan
from ostler.isolation.base import Site
from ostler.isolation.registry import IsolationLevels
from ostler.lifecycle.settings import LifecycleSettings

SETTINGS = LifecycleSettings(outlive=timedelta(minutes=5), lease_ttl=timedelta(seconds=1))
LASTING = ("clerk-1", "clerk-2", "tool-1", "tool-2")
AT_ONCE = 6


def levels_in(folder: Path) -> IsolationLevels:
    """Processes are kept in a directory, wherever the record is."""
    return IsolationLevels(SystemClock(), site=Site(directory=folder / "home"))


class Victim:
    def __init__(self, manager: AgentLifecycleManager, folder: Path) -> None:
        self._manager = manager
        self._folder = folder
        self._ledger = folder / "ledger"

    async def run(self) -> None:
        for name in LASTING:
            await self.spawn(name, key=name)
        note(self._ledger, "ready")
        outstanding = self._outstanding()
        await asyncio.gather(*(self.ask(request, name) for request, name in outstanding.items()))
        await asyncio.gather(self.churn(), *(self.work() for _ in range(AT_ONCE)))

    async def spawn(self, name: str, *, key: str) -> UUID:
        agent: Any = Clerk if name.startswith("clerk") else command(self._folder)
        manager = self._manager
        definition = manager.registry.register(agent, name=name.partition("-")[0], replace=True)
        try:
            handle = await manager.start(
                definition,
                name=name,
                isolation="process",
                restart="immediate",
                context={"notes": str(self._folder / "notes")},
                tasks=20,
                key=key,
            )
        except AgentInitializationError:  # the manager before was killed while it started it
            handle = manager.handle((await manager.restart(name)).instance_id)
        instance_id = (await handle.record()).instance_id
        note(self._ledger, "spawned", name, instance_id)
        return instance_id

    async def work(self) -> None:
        while True:
            request, name = uuid4().hex, random.choice(LASTING)
            note(self._ledger, "asked", request, name)
            await self.ask(request, name)

    async def ask(self, request: str, name: str) -> None:
        body: Any = {"id": request} if name.startswith("clerk") else request
        try:
            answer = await self._manager.process(name, body, request_id=request, retries=3)
        except OstlerError:
            await asyncio.sleep(0.01)  # an agent that was killed comes back; the next manager asks again
            return
        value = answer["id"] if name.startswith("clerk") else answer["output"].strip()
        note(self._ledger, "answered", request, value)

    async def churn(self) -> None:
        while True:
            name = f"clerk-{uuid4().hex}"
            instance_id = await self.spawn(name, key=name)
            await self._manager.terminate(instance_id)
            note(self._ledger, "terminated", name, instance_id)

    def _outstanding(self) -> dict[str, str]:
        found = lines(self._ledger)
        answered = {line[1] for line in found if line[0] == "answered"}
        return {line[1]: line[2] for line in found if line[0] == "asked" and line[1] not in answered}


async def main(where: str, folder: Path, fault: str) -> None:
    plan = FaultPlan.parse(fault) if fault else FaultPlan()
    while True:
        try:
            async with ostler.open(
                where, settings=SETTINGS, levels=levels_in(folder), seams=Seams(fault=plan)
            ) as manager:
                await Victim(manager, folder).run()
        except LeaseHeldError:  # the one before was killed, and its lease has not run out
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
