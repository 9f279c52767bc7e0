"""A manager that is killed: `process_victim.py HOME COUNT LEDGER [churn]`. It finds its agents, asks them things, and
writes down what it asked and what was answered, so that the next one can go on. It prints a line when it has found
them. With `churn` it also ends agents and starts others all the time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

from process_clerk import Clerk

import ostler

PROCESS = ostler.IsolationLevel.PROCESS
AT_ONCE = 8


class Ledger:
    """Lines of "asked REQUEST INSTANCE" and "answered REQUEST how"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.touch()

    def write(self, *words: object) -> None:
        with self._path.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def outstanding(self) -> dict[UUID, UUID]:
        lines = [line.split() for line in self._path.read_text().splitlines()]
        answered = {line[1] for line in lines if line[0] == "answered"}
        return {UUID(line[1]): UUID(line[2]) for line in lines if line[0] == "asked" and line[1] not in answered}


class Victim:
    def __init__(self, manager: ostler.AgentLifecycleManager, ledger: Ledger) -> None:
        self._manager = manager
        self._ledger = ledger

    async def ask(self, request_id: UUID, instance_id: UUID) -> None:
        request = {"id": str(request_id), "seconds": random.uniform(0, 0.2)}
        try:
            answer = await self._manager.process(instance_id, request, request_id=request_id)
            how = "right" if answer["id"] == str(request_id) else "wrong"
        except ostler.OstlerError as error:
            how = type(error).__name__
        self._ledger.write("answered", request_id, how)

    async def populate(self, count: int) -> None:
        known = self._manager.registry.find("clerk")
        policy = ostler.RestartPolicy.immediate()
        options = ostler.AgentSpawnOptions(isolation_level=PROCESS, restart_policy=policy)
        request = ostler.SpawnRequest(agent_definition_id=known.id, options=options)
        missing = count - len(await self._manager.get_active_instances(ostler.GetInstancesFilter(limit=1000)))
        for _ in range(0, missing, 50):
            await asyncio.gather(*(self._manager.spawn(request) for _ in range(min(50, missing))))

    async def report(self, seconds: float) -> None:
        found = {}
        for one in await self._manager.get_active_instances(ostler.GetInstancesFilter(limit=1000)):
            attempts = await self._manager.store.list_attempts(one.instance_id)
            found[str(one.instance_id)] = [one.state.value, one.attempt, (attempts[-1].identity or {}).get("pid")]
        sys.stdout.write(json.dumps({"seconds": seconds, "agents": found}) + "\n")
        sys.stdout.flush()

    async def work(self) -> None:
        ids = [
            one.instance_id for one in await self._manager.get_active_instances(ostler.GetInstancesFilter(limit=1000))
        ]
        while True:
            chosen = random.sample(ids, min(AT_ONCE, len(ids)))
            asked = []
            for instance_id in chosen:
                request_id = uuid4()
                self._ledger.write("asked", request_id, instance_id)
                asked.append(self.ask(request_id, instance_id))
            await asyncio.gather(*asked)

    async def churn(self, count: int) -> None:
        while True:
            living = await self._manager.get_active_instances(ostler.GetInstancesFilter(limit=1000))
            ends = (self._manager.terminate(one.instance_id) for one in random.sample(living, min(3, len(living))))
            await asyncio.gather(*ends, self.populate(count), return_exceptions=True)


async def main(home: str, count: int, ledger: Ledger, deed: str = "") -> None:
    settings = ostler.LifecycleSettings(outlive=timedelta(hours=1))
    registry = ostler.AgentRegistry()
    registry.register(Clerk, name="clerk")
    began = time.perf_counter()
    async with ostler.open(home, settings=settings, registry=registry) as manager:
        seconds = time.perf_counter() - began
        victim = Victim(manager, ledger)
        await victim.populate(count)
        await victim.report(seconds)
        if deed == "churn":
            await victim.churn(count)
        again = [victim.ask(*one) for one in ledger.outstanding().items()]
        await asyncio.gather(victim.work(), *again)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Ledger(Path(sys.argv[3])), *sys.argv[4:]))
