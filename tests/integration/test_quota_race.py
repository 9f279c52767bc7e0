from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

from ostler.errors import LicenseError
from ostler.model import AgentInstance, AgentSpawnedEvent, Tier
from ostler.store import Store, open_store
from ostler.testing.folding import quota_faults, sequence_faults
from ostler.testing.store_suite.ground import new_workspace, reservation, whole_log

pytestmark = pytest.mark.anyio

CALLS = 200
CAP = 2


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "home")
    make: Callable[[], str] = request.getfixturevalue("make_database")
    return make()


async def race(store: Store, space: UUID, calls: int) -> tuple[int, int]:
    """Ask so many times at once; how many got in and how many were turned away."""
    wishes = (store.commit(reservation(workspace_id=space)) for _ in range(calls))
    answers = await asyncio.gather(*wishes, return_exceptions=True)
    strange = [one for one in answers if not isinstance(one, AgentInstance | LicenseError)]
    assert strange == []
    got = sum(isinstance(one, AgentInstance) for one in answers)
    return got, calls - got


async def require_exactly_the_cap(store: Store, space: UUID) -> None:
    log = await whole_log(store)
    assert sequence_faults(log) == []
    assert quota_faults(log, space, CAP) == []
    assert sum(isinstance(event, AgentSpawnedEvent) for event in log) == CAP
    assert (await store.statistics(space)).active_instances == CAP
    refused = [entry for entry in await store.read_audit(space) if entry.outcome == "LicenseError"]
    assert len(refused) == CALLS - CAP
    assert (await store.verify_audit(space)).is_sound


async def test_threads_that_ask_for_two_places_two_hundred_times_get_exactly_two(address: str) -> None:
    async with open_store(address) as store:
        space = await new_workspace(store, Tier.CORE)
        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            racing = [loop.run_in_executor(threads, asyncio.run, race(store, space, CALLS // 8)) for _ in range(8)]
            results = await asyncio.gather(*racing)
        assert sum(got for got, _ in results) == CAP
        await require_exactly_the_cap(store, space)


_RACER = """
import asyncio, sys
from uuid import UUID
from ostler.errors import LicenseError
from ostler.model import AgentInstance
from ostler.store import open_store
from ostler.testing.store_suite.ground import reservation

async def main(address, space, epoch, calls):
    async with open_store(address) as store:
        store.adopt_epoch(epoch)
        print("ready", flush=True)
        sys.stdin.readline()  # all of them start when the test says so
        wishes = (store.commit(reservation(workspace_id=space)) for _ in range(calls))
        answers = await asyncio.gather(*wishes, return_exceptions=True)
        assert all(isinstance(one, (AgentInstance, LicenseError)) for one in answers), answers
        print(sum(isinstance(one, AgentInstance) for one in answers), flush=True)

asyncio.run(main(sys.argv[1], UUID(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
"""


def racer(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RACER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_processes_that_ask_for_two_places_two_hundred_times_get_exactly_two(address: str) -> None:
    async with open_store(address) as store:
        space = await new_workspace(store, Tier.CORE)
        lease = await store.take_lease("the test", ttl=timedelta(minutes=5))
        words = [address, str(space), str(lease.epoch), str(CALLS // 4)]
        processes = [racer(words) for _ in range(4)]
        assert [await asyncio.to_thread(said, process) for process in processes] == ["ready"] * 4
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        got = [await asyncio.to_thread(said, process) for process in processes]
        for process in processes:
            process.communicate(timeout=30)
        assert [process.returncode for process in processes] == [0] * 4
        assert sum(map(int, got)) == CAP
        await require_exactly_the_cap(store, space)
