"""Level process beside its floors and beside what else people use: one table, one run.

The floors keep nothing: no record, no limit, no exit code. The rivals are installed by this benchmark into an
environment of their own; one that cannot be installed is left out, and the table says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import ostler
from bareparent import Bare, BareParent
from floors import Echo
from living import p95, timed
from measured import pss_kb
from ostler.isolation.base import Verb
from table import Table

COUNT, QUICK_COUNT = 200, 60
#: So many live when memory is measured: what they share is divided by their number.
_FAMILY = 300
AT_ONCE = 16
_BLOCKS = 5
RIVALS = Path(__file__).parent
ROOM = Path(__file__).parent.parent / ".venv-bench"
PACKAGES = ("supervisor==4.3.0", "circus==0.19.0", "ray>=2.40", "mesa==3.3.1", "setuptools<81")
_PROCESS = ostler.IsolationLevel.PROCESS

#: By figure: samples in milliseconds; "memory" in KB and "rate" per second are single.
Figures = dict[str, Any]


def _clocked(samples: list[float], act: Callable[[], object]) -> None:
    begin = time.perf_counter()
    act()
    samples.append((time.perf_counter() - begin) * 1000)


def _posix_spawn() -> None:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


class Floors:
    """A program until it is reaped; a fork and a handshake from a preloaded parent; an echo over its socket."""

    def __init__(self) -> None:
        self.parent = BareParent()
        self.parent.spawn().end()
        self.lives: list[Bare] = []
        self.figures: dict[str, Figures] = {
            "posix_spawn": {"spawn": []},
            "bare fork": {"spawn": [], "call": [], "channel": [], "terminate": []},
        }

    def spawn(self) -> None:
        """One of each, in turns with what they are compared with: a shared machine is fast now and slow then."""
        _clocked(self.figures["posix_spawn"]["spawn"], _posix_spawn)
        _clocked(self.figures["bare fork"]["spawn"], lambda: self.lives.append(self.parent.spawn()))

    def call(self) -> None:
        _clocked(self.figures["bare fork"]["call"], self.lives[0].call)

    async def ask(self) -> None:
        await timed(self.figures["bare fork"]["channel"], self.lives[0].ask())

    def finish(self, count: int) -> None:
        bare = self.figures["bare fork"]
        family = self.lives + [self.parent.spawn() for _ in range(_FAMILY - len(self.lives))]
        bare["memory"] = pss_kb([one.pid for one in family])
        for one in family[len(self.lives) :]:
            one.end()
        for one in self.lives:
            _clocked(bare["terminate"], one.end)
        begin = time.perf_counter()
        for _ in range(count):
            self.parent.spawn().end()
        bare["rate"] = count / (time.perf_counter() - begin)
        program = self.figures["posix_spawn"]
        program["rate"] = 1000 / statistics.mean(program["spawn"])
        self.parent.close()


class Ours:
    """A manager and one kind of agent at level process."""

    def __init__(self, manager: ostler.AgentLifecycleManager, definition: UUID, request: object) -> None:
        self._manager = manager
        self._request = request
        options = ostler.AgentSpawnOptions(
            isolation_level=_PROCESS, restart_policy=ostler.RestartPolicy.immediate(), name=None
        )
        self._spawn = ostler.SpawnRequest(agent_definition_id=definition, options=options)

    async def spawn(self) -> UUID:
        return (await self._manager.spawn(self._spawn)).instance_id

    async def end(self, one: UUID) -> None:
        await self._manager.terminate(one)

    async def pid(self, one: UUID) -> int:
        identity = (await self._manager.store.list_attempts(one))[-1].identity or {}
        return int(identity["pid"])

    async def killed(self, one: UUID) -> float:
        """From `kill -9` to ready again, in milliseconds."""
        pid = await self.pid(one)
        async with self._manager.observe(one) as seen:
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            async for event in seen:
                if isinstance(event, ostler.AgentStateChangedEvent) and event.new_state is ostler.AgentState.READY:
                    break
            return (time.perf_counter() - begin) * 1000

    async def call(self, one: UUID) -> None:
        await self._manager.process(one, self._request)

    async def ask_cell(self, one: UUID) -> None:
        """Over the channel alone: nothing is written down before and after."""
        cell = self._manager._house.lives[one].cell  # noqa: SLF001 - there is no public way without its commits
        assert cell is not None
        await cell.call(Verb.PROCESS, self._request)

    async def rate(self, count: int) -> float:
        lives: list[UUID] = []

        async def several() -> None:
            for _ in range(count // AT_ONCE):
                lives.append(await self.spawn())  # noqa: PERF401 - several fill one list

        begin = time.perf_counter()
        await asyncio.gather(*(several() for _ in range(AT_ONCE)))
        rate = len(lives) / (time.perf_counter() - begin)
        await asyncio.gather(*map(self.end, lives))
        return rate


async def _python_figures(ours: Ours, floors: Floors, count: int) -> Figures:
    figures: Figures = {name: [] for name in ("first", "spawn", "call", "channel", "terminate", "restart")}
    begin = time.perf_counter()
    first = await ours.spawn()
    figures["first"].append((time.perf_counter() - begin) * 1000)
    await ours.end(first)
    lives = []
    for _ in range(count):
        floors.spawn()
        begin = time.perf_counter()
        lives.append(await ours.spawn())
        figures["spawn"].append((time.perf_counter() - begin) * 1000)
    for _ in range(count):
        await timed(figures["call"], ours.call(lives[0]))
    for _ in range(_BLOCKS):  # in blocks: one that was idle for a while is slow to wake up
        for _ in range(count):
            floors.call()
        for _ in range(count):
            await floors.ask()
        for _ in range(count):
            await timed(figures["channel"], ours.ask_cell(lives[0]))
    floors.finish(count)
    family = lives + [await ours.spawn() for _ in range(_FAMILY - len(lives))]
    figures["memory"] = pss_kb([await ours.pid(one) for one in family])
    for one in family[len(lives) :]:
        await ours.end(one)
    for one in lives[: count // 3]:
        figures["restart"].append(await ours.killed(one))
    for one in lives:
        await timed(figures["terminate"], ours.end(one))
    figures["rate"] = await ours.rate(2 * count)
    return figures


async def _command_figures(ours: Ours, count: int) -> Figures:
    figures: Figures = {name: [] for name in ("spawn", "call", "terminate")}
    for _ in range(count):
        begin = time.perf_counter()
        one = await ours.spawn()
        figures["spawn"].append((time.perf_counter() - begin) * 1000)
        await timed(figures["call"], ours.call(one))
        await timed(figures["terminate"], ours.end(one))
    figures["rate"] = await ours.rate(2 * count)
    return figures


async def our_figures(home: Path, count: int) -> dict[str, Figures]:
    """Ours and the floors, measured in turns."""
    floors = Floors()
    settings = ostler.LifecycleSettings(close_grace=timedelta(seconds=2))
    async with ostler.open(home, settings=settings) as manager:
        echo = manager.registry.register(Echo)
        true = manager.registry.register(ostler.CommandSpec(argv=("/bin/true",)), name="true")
        python = await _python_figures(Ours(manager, echo.id, {"name": "Ada"}), floors, count)
        command = await _command_figures(Ours(manager, true.id, "go"), count)
    return {**floors.figures, "Ostler, Python": python, "Ostler, command": command}


def rival_figures(count: int) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    python = rivals_python()
    half = count // 2
    counts = {"forkserver": half, "supervisord": half, "circus": half, "ray": max(count // 20, 3)}
    for name, number in counts.items():
        chosen = sys.executable if name == "forkserver" else python
        if chosen is None:
            continue
        program = [chosen, str(RIVALS / f"rival_{name}.py"), str(number)]
        told = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
        lines = [line for line in told.stdout.splitlines() if line.startswith("{")]
        if told.returncode or not lines:
            print(f"{name} is left out: {(told.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
            continue
        found[name] = json.loads(lines[-1])
    return found


def rivals_python() -> str | None:
    """The environment of the rivals, made once, and again when there are others to compare with."""
    python, ready, wanted = ROOM / "bin" / "python", ROOM / ".ready", "\n".join(PACKAGES)
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {', '.join(PACKAGES)} into {ROOM.name}; once, and only for these tables")
        venv.create(ROOM, with_pip=True)
        told = subprocess.run(
            [python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True, check=False
        )
        if told.returncode:
            print(f"the rivals are left out: {told.stderr.strip().splitlines()[-1]}")
            return None
        ready.write_text(wanted)
    return str(python)


def process_table(*, quick: bool = False) -> Table:
    count = QUICK_COUNT if quick else COUNT
    figures = _ours_around(lambda: rival_figures(count), count)
    table = Table("Level process, its floors and its rivals (milliseconds; x is times the bare fork)", _heads(figures))
    floor = statistics.median(figures["bare fork"]["spawn"])
    rows: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        ("spawn to ready, p50", "spawn", statistics.median),
        ("spawn to ready, p95", "spawn", p95),
        ("the first in a home, with keeper and template", "first", statistics.median),
        ("x bare fork, p50", "spawn", lambda each: statistics.median(each) / floor),
        ("spawns per second", "rate", float),
        ("kill -9 to restarted, p50", "restart", statistics.median),
        ("terminate, p50", "terminate", statistics.median),
        ("call and answer, p50", "call", statistics.median),
        ("call over the channel alone, from a loop, p50", "channel", statistics.median),
        ("memory of an idle one of 300, KB (PSS)", "memory", float),
    )
    for title, figure, summed in rows:
        table.add(title, *(_say(summed(one[figure])) if one.get(figure) else "-" for one in figures.values()))
    return table


def _ours_around(rivals: Callable[[], dict[str, Figures]], count: int) -> dict[str, Figures]:
    """Half before the rivals and half after them: the machine of one minute is not that of the next."""
    halves: list[dict[str, Figures]] = []
    theirs: dict[str, Figures] = {}
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="ostler-bench-") as home:
            halves.append(asyncio.run(our_figures(Path(home), count // 2)))
        theirs = theirs or rivals()
    first, second = halves
    ours = {name: {figure: _both(one[figure], second[name][figure]) for figure in one} for name, one in first.items()}
    return ours | theirs


def _both(one: Any, other: Any) -> Any:
    return one + other if isinstance(one, list) else (one + other) / 2


def _heads(figures: dict[str, Figures]) -> tuple[str, ...]:
    return ("", *figures)


def _say(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
