"""Two places, two hundred callers, in threads and in processes: exactly two get in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from store_ground import Place, entries, new_workspace, places_taken, reserved, verified
from store_invariants import invariant_faults

from ostler.clock import SystemClock
from ostler.errors import LicenseError
from ostler.model.instance import AgentInstance
from ostler.model.states import Tier
from ostler.store.store import Store

pytestmark = pytest.mark.anyio

CALLS = 200
CAP = 2


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place("sqlite", str(tmp_path / "home"))
    return Place("postgres", request.getfixturevalue("postgres_address"))


async def race(store: Store, space: UUID, calls: int) -> int:
    """Ask so many times at once; how many got in."""
    answers = await asyncio.gather(*(reserved(store, workspace_id=space) for _ in range(calls)), return_exceptions=True)
    assert [one for one in answers if not isinstance(one, AgentInstance | LicenseError)] == []
    return sum(isinstance(one, AgentInstance) for one in answers)


async def require_exactly_the_cap(store: Store, space: UUID) -> None:
    assert await store.read(places_taken, space) == CAP
    refused = [entry for entry in await entries(store, space) if entry.outcome == "LicenseError"]
    assert len(refused) == CALLS - CAP
    assert (await verified(store, space)).is_sound
    assert await invariant_faults(store, SystemClock().wall()) == []


async def test_threads_that_ask_for_two_places_two_hundred_times_get_exactly_two(place: Place) -> None:
    async with place.store() as store:
        space = await new_workspace(store, Tier.CORE)
        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            racing = [loop.run_in_executor(threads, asyncio.run, race(store, space, CALLS // 8)) for _ in range(8)]
            assert sum(await asyncio.gather(*racing)) == CAP
        await require_exactly_the_cap(store, space)


_RACER = """
import asyncio, sys
from uuid import UUID
from ostler.errors import LicenseError
from ostler.store.store import Store
from store_ground import reserved

async def main(where, space, calls):
    async with Store(where) as store:
        await store.own_without_lease()
        print("ready", flush=True)
        sys.stdin.readline()  # all of them start when the test says so
        wishes = (reserved(store, workspace_id=space) for _ in range(calls))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, BaseException)]
        assert all(isinstance(one, LicenseError) for one in refused), refused
        print(calls - len(refused), flush=True)

asyncio.run(main(sys.argv[1], UUID(sys.argv[2]), int(sys.argv[3])))
"""


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_processes_that_ask_for_two_places_two_hundred_times_get_exactly_two(place: Place) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    async with place.store() as store:
        space = await new_workspace(store, Tier.CORE)
        await store.take_lease("the test", ttl=timedelta(minutes=5))
        command = [sys.executable, "-c", _RACER, place.where, str(space), str(CALLS // 4)]
        processes = [started(command, environment) for _ in range(4)]
        assert [await asyncio.to_thread(said, process) for process in processes] == ["ready"] * 4
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        got = [await asyncio.to_thread(said, process) for process in processes]
        for process in processes:
            process.communicate(timeout=60)
        assert [process.returncode for process in processes] == [0] * 4
        assert sum(map(int, got)) == CAP
        await require_exactly_the_cap(store, space)
