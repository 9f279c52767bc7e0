"""Events per second from a commit to those who look, and what those who never read cost the one who does."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID

import ostler
from floors import Echo
from ostler.lifecycle.observe import Seen
from table import Table

MANY = 100
EVENTS = 3000
QUICK_EVENTS = 1500
ROUNDS = 3
QUICK_ROUNDS = 1
#: So many speak at a time, so that commits are shared as they are in a busy house.
_SPEAKERS = 64
#: Room enough that a reader on the same loop never misses any.
_ROOM = ostler.ObservationOptions(buffer_capacity=10_000)


async def speak(manager: ostler.AgentLifecycleManager, instance_id: UUID, count: int) -> None:
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await manager.store.commit(ostler.ReportSignal(instance_id=instance_id, name="tick"))

    await asyncio.gather(*(one() for _ in range(_SPEAKERS)))


async def read(observation: AsyncIterator[Seen], count: int) -> None:
    seen = 0
    async for event in observation:
        assert not isinstance(event, ostler.EventsMissed), event
        seen += 1
        if seen == count:
            return


async def rate(manager: ostler.AgentLifecycleManager, instance_id: UUID, readers: int, count: int) -> float:
    """Events per second until the last reader has the last; without readers, until it is committed."""
    looking = [manager.observe(instance_id, _ROOM) for _ in range(readers)]
    begin = time.perf_counter()
    await asyncio.gather(speak(manager, instance_id, count), *(read(one, count) for one in looking))
    seconds = time.perf_counter() - begin
    for one in looking:
        await one.aclose()
    return count / seconds


async def through_queues(readers: int, count: int) -> float:
    """The floor: the same from hand to hand, with no log behind it."""
    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(readers)]

    async def take(queue: asyncio.Queue[int]) -> None:
        for _ in range(count):
            await queue.get()

    async def give() -> None:
        for number in range(count):
            for queue in queues:
                queue.put_nowait(number)
            if number % _SPEAKERS == 0:
                await asyncio.sleep(0)

    begin = time.perf_counter()
    await asyncio.gather(give(), *(take(queue) for queue in queues))
    return count / (time.perf_counter() - begin)


@asynccontextmanager
async def deaf(manager: ostler.AgentLifecycleManager, instance_id: UUID, count: int) -> AsyncIterator[None]:
    """Observers that never read. At the end each is told how much it missed, and holds no more than its room."""
    looking = [manager.observe(instance_id) for _ in range(MANY)]
    yield
    room = ostler.ObservationOptions().buffer_capacity
    for one in looking:
        missed = await anext(one)
        assert isinstance(missed, ostler.EventsMissed), missed
        assert missed.count == count - room, missed
        await one.aclose()


def quiet_request(manager: ostler.AgentLifecycleManager) -> ostler.SpawnRequest:
    """For one that has nothing to tell of its own while the others speak for it."""
    check = ostler.HealthCheckConfig(interval=timedelta(minutes=10))
    options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.NONE, health_check=check)
    return ostler.SpawnRequest(agent_definition_id=manager.registry.register(Echo).id, options=options)


async def measure(where: str, count: int, rounds: int) -> dict[str, list[float]]:
    names = ("committed", "one", "many", "deaf", "queue", "queues")
    rates: dict[str, list[float]] = {name: [] for name in names}
    async with ostler.open(where) as manager:
        request = quiet_request(manager)
        for _ in range(rounds):
            instance_id = (await manager.spawn(request)).instance_id
            await rate(manager, instance_id, 1, 10)  # the ready of its own is out of the way then
            rates["queue"].append(await through_queues(1, count))
            rates["queues"].append(await through_queues(MANY, count))
            rates["committed"].append(await rate(manager, instance_id, 0, count))
            await rate(manager, instance_id, 1, 10)
            rates["one"].append(await rate(manager, instance_id, 1, count))
            rates["many"].append(await rate(manager, instance_id, MANY, count))
            async with deaf(manager, instance_id, count):
                rates["deaf"].append(await rate(manager, instance_id, 1, count))
            await manager.terminate(instance_id)
    return rates


def watching_table(*, quick: bool = False) -> Table:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        rates = asyncio.run(measure(name, *((QUICK_EVENTS, QUICK_ROUNDS) if quick else (EVENTS, ROUNDS))))
    heads = ("who looks", "events per second", "deliveries per second", "x committed", "x bare asyncio.Queue")
    table = Table("Events from the commit to observers (SQLite home)", heads)
    rows = (
        ("nobody; committed only", "committed", 0, None),
        ("1 observer", "one", 1, "queue"),
        (f"{MANY} observers", "many", MANY, "queues"),
        (f"1 observer, beside {MANY} that never read", "deaf", 1, "queue"),
    )
    for title, name, readers, floor in rows:
        mine = rates[name]
        table.add(
            title,
            f"{statistics.median(mine):,.0f}",
            f"{statistics.median(mine) * readers:,.0f}" if readers else "",
            _ratio(mine, rates["committed"]),
            _ratio(mine, rates[floor]) if floor else "",
        )
    return table


def _ratio(mine: list[float], other: list[float]) -> str:
    return f"{statistics.median(one / two for one, two in zip(mine, other, strict=True)):.2g}"


if __name__ == "__main__":
    print(watching_table(quick=True))
