"""One life at the levels none and thread, beside a bare task and a bare thread with its own loop.

A bare task remembers nothing: what it is compared with here writes down every step before it answers, so the
commits stand beside it too. Floors and levels take turns within each round, for a shared machine is fast in one
second and slow in the next.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import ostler
from floors import Asked, BareCommits, BareTask, BareThread, Echo, TwoCommits
from ostler.model import IsolationLevel
from table import Table

ROUNDS = 3
QUICK_ROUNDS = 1
#: In a round, one after the other.
SINGLE = 40
#: In a round, so many under way at a time.
AT_ONCE = 64
TOGETHER = 2 * AT_ONCE
OVERLAPPING = 10
#: Each of them is two commits.
ACTS = ("spawn", "call", "terminate")
_REQUEST = {"name": "Ada"}

#: By subject and figure: one sample per act, or one rate per round.
Samples = dict[tuple[str, str], list[float]]
#: How a subject is brought to life: what it answers can be asked, and ended.
Spawn = Callable[[], Awaitable[Asked]]


class Managed:
    """An agent of a manager, behind the same verbs as the bare ones."""

    def __init__(self, manager: ostler.AgentLifecycleManager, instance_id: UUID) -> None:
        self._manager = manager
        self._id = instance_id

    async def process(self, request: object) -> object:
        return await self._manager.process(self._id, request)

    async def terminate(self) -> None:
        assert (await self._manager.terminate(self._id)).was_graceful


def spawning(
    manager: ostler.AgentLifecycleManager, level: IsolationLevel, check: ostler.HealthCheckConfig | None = None
) -> Spawn:
    options = ostler.AgentSpawnOptions(isolation_level=level, health_check=check)
    request = ostler.SpawnRequest(agent_definition_id=manager.registry.register(Echo).id, options=options)

    async def spawn() -> Asked:
        return Managed(manager, (await manager.spawn(request)).instance_id)

    return spawn


async def bare_task() -> Asked:
    one = BareTask()
    await one.spawn()
    return one


async def bare_thread() -> Asked:
    one = BareThread()
    await one.spawn()
    return one


async def timed(samples: list[float], work: Awaitable[object]) -> None:
    begin = time.perf_counter()
    await work
    samples.append((time.perf_counter() - begin) * 1000)


@dataclass(kw_only=True)
class Ground:
    """What is compared, and the commits that stand beside each of its acts."""

    subjects: dict[str, Spawn]
    bare: BareCommits
    commits: TwoCommits
    samples: Samples

    async def floor(self, act: str) -> None:
        """The disk of this moment: two commits by a bare driver, and two by the store without a life."""
        self.samples["bare commit", act].append(self.bare.milliseconds())
        await timed(self.samples["two commits", act], self.commits.act(act))


async def in_turns(ground: Ground) -> None:
    """One after the other, and after each act of one subject the same of the next."""
    samples, subjects = ground.samples, ground.subjects
    lives: dict[str, list[Asked]] = defaultdict(list)
    for _ in range(SINGLE):
        await ground.floor("spawn")
        for subject, spawn in subjects.items():
            begin = time.perf_counter()
            lives[subject].append(await spawn())
            samples[subject, "spawn"].append((time.perf_counter() - begin) * 1000)
    for _ in range(SINGLE):
        await ground.floor("call")
        for subject in subjects:
            await timed(samples[subject, "call"], lives[subject][0].process(_REQUEST))
    for _ in range(SINGLE // OVERLAPPING):
        for subject in subjects:
            one, each = lives[subject][0], samples[subject, "overlapping"]
            await asyncio.gather(*(timed(each, one.process(_REQUEST)) for _ in range(OVERLAPPING)))
    for _ in range(SINGLE):
        await ground.floor("terminate")
        for subject in subjects:
            await timed(samples[subject, "terminate"], lives[subject].pop().terminate())


async def at_once(spawn: Spawn) -> float:
    """Spawns per second when so many are under way all the time."""
    lives: list[Asked] = []

    async def several() -> None:
        lives.extend([await spawn() for _ in range(TOGETHER // AT_ONCE)])

    begin = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(AT_ONCE)))
    rate = TOGETHER / (time.perf_counter() - begin)
    await asyncio.gather(*(one.terminate() for one in lives))
    return rate


async def measure(folder: Path, rounds: int) -> Samples:
    samples: Samples = defaultdict(list)
    bare = await BareCommits.record(folder, [act for _ in range(rounds) for act in ACTS for _ in range(SINGLE)])
    async with ostler.open(folder / "home") as manager:
        subjects: dict[str, Spawn] = {
            "task": bare_task,
            "none": spawning(manager, IsolationLevel.NONE),
            "bare thread": bare_thread,
            "thread": spawning(manager, IsolationLevel.THREAD),
        }
        for spawn in subjects.values():
            await (await spawn()).terminate()
        ground = Ground(subjects=subjects, bare=bare, commits=TwoCommits(manager.store), samples=samples)
        for _ in range(rounds):
            await in_turns(ground)
            for subject, spawn in subjects.items():
                samples[subject, "together"].append(await at_once(spawn))
    bare.close()
    return samples


def lives_tables(*, quick: bool = False) -> tuple[Table, Table]:
    with tempfile.TemporaryDirectory(prefix="ostler-bench-") as name:
        samples = asyncio.run(measure(Path(name), QUICK_ROUNDS if quick else ROUNDS))
    return _lives(samples), _shares(samples)


def _lives(samples: Samples) -> Table:
    heads = ("one life", "bare task", "none", "x task", "bare thread", "thread", "x thread")
    table = Table("A life beside a bare task and a bare thread (SQLite home, milliseconds)", heads)
    rows: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
        ("spawn to ready, p50", "spawn", statistics.median),
        ("spawn to ready, p95", "spawn", p95),
        ("spawns per second, 1 at a time", "spawn", lambda each: 1000 / statistics.mean(each)),
        (f"spawns per second, {AT_ONCE} at a time", "together", statistics.median),
        ("call and answer, p50", "call", statistics.median),
        (f"call and answer, {OVERLAPPING} overlapping, p50", "overlapping", statistics.median),
        ("terminate, p50", "terminate", statistics.median),
    )
    for title, figure, summed in rows:
        task, none, bare, thread = (
            summed(samples[subject, figure]) for subject in ("task", "none", "bare thread", "thread")
        )
        table.add(title, _say(task), _say(none), _say(none / task), _say(bare), _say(thread), _say(thread / bare))
    return table


def _shares(samples: Samples) -> Table:
    heads = ("p50, milliseconds", "none", "thread", "two commits of the store", "two bare commits", "our own in none")
    table = Table("How much of it is its two durable commits, measured in turns with it", heads)
    for act in ACTS:
        none, thread, two, single = (
            statistics.median(samples[subject, act]) for subject in ("none", "thread", "two commits", "bare commit")
        )
        shares = (f"{cost:.2f} ({cost / none:.0%} of none)" for cost in (two, 2 * single))
        table.add(act, f"{none:.2f}", f"{thread:.2f}", *shares, f"{none - two:.2f}")
    return table


def p95(each: list[float]) -> float:
    return statistics.quantiles(each, n=20)[-1]


def _say(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}" if figure >= 0.1 else f"{figure:.2g}"


if __name__ == "__main__":
    for one in lives_tables(quick=True):
        print(one)
