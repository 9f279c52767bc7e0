"""A command from the shell, a run of a command, a task and its accept, a call: each beside what it costs bare.

Ours and the floor take turns, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ostler
from lifecycle_tables import Echo
from ostler.tasks.orchestrator import TaskOrchestrator
from rivals import rival_python
from table import Table, middle, percentile

_RAY = "ray==2.48.0"
_FILES = 50


def _timed(took: list[float], work: Callable[[], Any]) -> None:
    began = time.perf_counter()
    work()
    took.append((time.perf_counter() - began) * 1000)


def _table(title: str) -> Table:
    return Table(f"{title}, milliseconds", "what", "p10", "p50", "p95", "x floor", "by p10", "goal")


def _add_pair(table: Table, floor: tuple[str, list[float]], ours: tuple[str, list[float]], goal: float) -> None:
    """The ratio of the middles, and that of the quickest tenth, which other work on the machine hardly disturbs."""
    for what, took in (floor, ours):
        figures = [percentile(took, 0.1), middle(took), percentile(took, 0.95)]
        ratios = [middle(took) / middle(floor[1]), figures[0] / percentile(floor[1], 0.1)]
        last = ("1", "1", "") if took is floor[1] else (*(f"{ratio:.2f}" for ratio in ratios), f"{goal:.1f}")
        table.add(what, *(f"{figure:.2f}" for figure in figures), *last)


# --- a command from the shell ------------------------------------------------------------------------


def runs(*, quick: bool) -> Table:
    table = _table("A command from the shell, with a daemon that runs")
    program = str(Path(sys.executable).with_name("ostler"))
    with tempfile.TemporaryDirectory() as home:
        # With compiled modules, as they are when a program was used once.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["OSTLER_HOME"] = home

        def run(*words: str) -> None:
            subprocess.run(words, env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True)

        floor: list[float] = []
        ours: list[float] = []
        try:
            run(program, "run", "--", "true")
            for _ in range(10 if quick else 40):
                _timed(floor, lambda: run(sys.executable, "-c", "import click, http.client"))
                _timed(ours, lambda: run(program, "run", "--", "true"))
        finally:
            run(program, "down")
    _add_pair(table, ("python -c 'import click, http.client'", floor), ("ostler run -- true", ours), 1.6)
    return table


# --- a run of a command ------------------------------------------------------------------------------


def commands(*, quick: bool) -> Table:
    table = _table("One run of a command at level process, with its record")
    with tempfile.TemporaryDirectory() as home:
        floor, ours = asyncio.run(_command_times(home, 100 if quick else 400))
    _add_pair(table, ("posix_spawn and wait", floor), ("a request to a command", ours), 10)
    return table


async def _command_times(home: str, count: int) -> tuple[list[float], list[float]]:
    floor: list[float] = []
    ours: list[float] = []
    async with ostler.open(home) as manager:
        agent = await manager.start(ostler.CommandSpec(argv=("/bin/true",)), isolation="process")
        await agent.ask("")
        for _ in range(count):
            _timed(floor, lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0))
            began = time.perf_counter()
            await agent.ask("")
            ours.append((time.perf_counter() - began) * 1000)
        await agent.stop()
    return floor, ours


# --- a task and its accept ---------------------------------------------------------------------------


def tasks(*, quick: bool) -> Table:
    table = _table(f"A task in a repository of {_FILES} files")
    with tempfile.TemporaryDirectory() as folder:
        took = asyncio.run(_task_times(Path(folder), 8 if quick else 30))
    _add_pair(table, ("git worktree add, sh, git add, git commit", took["work bare"]), ("task", took["task"]), 3)
    bare = "git merge-tree, commit-tree, update-ref; no checkout follows"
    _add_pair(table, (bare, took["accept bare"]), ("accept, and the checkout follows", took["accept"]), 4)
    return table


async def _task_times(folder: Path, count: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in ("work bare", "task", "accept bare", "accept")}
    bare, ours = _repository(folder / "bare"), _repository(folder / "ours")
    async with ostler.open(folder / "home") as manager:
        command = ostler.CommandSpec(argv=("sh", "-c", "echo x > new-$OSTLER_TASK"))
        manager.registry.register(command, name="writer")
        async with TaskOrchestrator(manager) as orchestrator:
            for number in range(count + 2):
                _timed(took["work bare"], lambda number=number: _work_bare(bare, number))  # type: ignore[misc]
                began = time.perf_counter()
                task = await orchestrator.submit("Write a file", agent="writer", near=ours)
                done = await orchestrator.run(task.key)
                took["task"].append((time.perf_counter() - began) * 1000)
                assert done.state == ostler.TaskState.COMPLETED, done.error
                _timed(took["accept bare"], lambda number=number: _accept_bare(bare, number))  # type: ignore[misc]
                began = time.perf_counter()
                await orchestrator.accept(task.key)
                took["accept"].append((time.perf_counter() - began) * 1000)
    return {name: times[2:] for name, times in took.items()}  # the first ones load what they need


def _git(place: Path, *words: str) -> str:
    person = ("-c", "user.name=u", "-c", "user.email=u@u")
    done = subprocess.run(["git", *person, *words], cwd=place, check=True, capture_output=True, text=True)  # noqa: S607
    return done.stdout.strip()


def _repository(place: Path) -> Path:
    place.mkdir()
    _git(place, "init", "-q", "-b", "main")
    for number in range(_FILES):
        (place / f"file{number}").write_text(f"{number}\n" * 20)
    _git(place, "add", "-A")
    _git(place, "commit", "-q", "-m", "first")
    return place


def _work_bare(repository: Path, number: int) -> None:
    place = repository.parent / f"worktree{number}"
    _git(repository, "worktree", "add", "-q", "-b", f"work{number}", str(place))
    subprocess.run(["sh", "-c", f"echo x > new-{number}"], cwd=place, check=True)  # noqa: S607 - the system's own
    _git(place, "add", "-A")
    _git(place, "commit", "-q", "-m", "work")


def _accept_bare(repository: Path, number: int) -> None:
    tree = _git(repository, "merge-tree", "--write-tree", "main", f"work{number}")
    commit = _git(repository, "commit-tree", tree, "-p", "main", "-m", "accepted")
    _git(repository, "update-ref", "refs/heads/main", commit)


# --- a call ------------------------------------------------------------------------------------------


def ray(*, quick: bool) -> Table | str:
    python = rival_python("ray", _RAY)
    if python is None:
        return ""
    table = _table("A call to an agent in a process of its own, one at a time")
    # Below /tmp, for the sockets of Ray have long names already.
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        words = [python, str(Path(__file__).with_name("rival_ray.py")), folder]
        theirs, ours = asyncio.run(_call_times(words, home, 4 if quick else 12, 50))
    if not theirs:
        return "Ray is left out: it did not start\n"
    _add_pair(table, ("Ray, an actor", theirs), ("Ostler, level process, answers recorded", ours), 1.0)
    return table


async def _call_times(words: list[str], home: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rival = subprocess.Popen(  # noqa: ASYNC220 - it is waited for while nothing else runs
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    assert rival.stdin is not None
    assert rival.stdout is not None
    theirs: list[float] = []
    ours: list[float] = []
    with rival:
        if rival.stdout.readline() != "ready\n":
            return [], []
        async with ostler.open(home) as manager:
            agent = await manager.start(Echo, isolation="process")
            await agent.ask(0)
            for _ in range(rounds):
                rival.stdin.write(f"{count}\n")
                theirs += json.loads(rival.stdout.readline())
                for number in range(count):
                    began = time.perf_counter()
                    await agent.ask(number)
                    ours.append((time.perf_counter() - began) * 1000)
            await agent.stop()
        rival.stdin.close()
    return theirs, ours
