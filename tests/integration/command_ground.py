"""What the tests of commands at level process stand on: a plan for a program, and looks at what it does."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from isolation.ground import RecordingListener, until

from ostler.agents import Agent, AgentKind, AgentManifest, CommandSpec
from ostler.clock import SystemClock
from ostler.isolation import Cell, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.spawn import ResourceLimits

PYTHON = sys.executable
CALL = UUID("01890000-0000-7000-8000-0000000ca11d")
Begin = Callable[..., Awaitable[Cell]]


def plan_for(place: Path | None, *argv: str, prompt: str | None = None, **spec: Any) -> StartPlan:
    command = CommandSpec(argv=argv, **spec)
    manifest = AgentManifest(id=UUID(int=2), name="tool", kind=AgentKind.COMMAND, command=command, prompt=prompt)
    return StartPlan(
        instance_id=uuid4(),
        attempt=1,
        name="tool",
        manifest=manifest,
        maker=Agent,
        limits=ResourceLimits(max_memory_mb=128),
        context={},
        workdir=place,
    )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(directory=tmp_path / "home", outlive=timedelta(seconds=20), epoch=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


@pytest.fixture
async def isolation(site: Site) -> AsyncIterator[ProcessIsolation]:
    level = ProcessIsolation(SystemClock(), site)
    yield level
    site.outlive = timedelta(0)
    await level.close()


@pytest.fixture
async def listener() -> RecordingListener:
    return RecordingListener()


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    async def begin(plan: StartPlan) -> Cell:
        await isolation.prepare(plan)
        cell = await isolation.start(plan, listener)
        await cell.call(Verb.INITIALIZE)
        return cell

    return begin


def waiting(place: Path, code: str = "pass") -> tuple[str, ...]:
    """Says that it began, waits for a file, says that it is done."""
    text = f"""import time, os, sys; print('began', os.getpid(), flush=True)
{code}
open({str(place / "began")!r}, 'a').write(str(os.getpid()) + ' ')
while not os.path.exists({str(place / "go")!r}): time.sleep(0.005)
print('done')"""
    return (PYTHON, "-c", text)


def begun(place: Path) -> list[int]:
    file = place / "began"
    return [int(one) for one in file.read_text().split()] if file.exists() else []


async def began(place: Path, count: int = 1) -> list[int]:
    await until(lambda: len(begun(place)) == count)
    return begun(place)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def names_in(place: Path) -> list[str]:
    return sorted(one.name for one in place.iterdir())


async def units(isolation: ProcessIsolation) -> list[str]:
    """What the keeper knows."""
    statuses = await isolation._holder.units()  # noqa: SLF001 - only the keeper knows
    return [status.unit for status in statuses]
