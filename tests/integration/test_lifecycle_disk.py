"""A full disk and a keeper that hangs: new work is refused, what lives is supervised, and ending needs neither."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_agents import Stage
from lifecycle_ground import PROCESS, THREAD, Crew, S, at, do, logged, opened, until
from machine_ground import everyone, keeper_of, lives, swept

from ostler import (
    AgentGoneError,
    AgentInitializationError,
    AgentTerminatedEvent,
    InitializationTimeoutError,
    IsolationLevel,
    OstlerError,
    RestartPolicy,
    StoreFullError,
    SystemClock,
    TerminationOptions,
)
from ostler.testing.clock import ManualClock
from ostler.workdirs import Workdirs

pytestmark = pytest.mark.anyio


class Disk:
    """A file system of a few megabytes."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._ballast = where / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(where)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a small disk here: {mounted.stderr.strip()}")
    yield Disk(where)
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
async def crew(disk: Disk, clock: ManualClock, stage: Stage, level: IsolationLevel) -> AsyncIterator[Crew]:
    crew = Crew(disk.where / "home", clock, stage, level)
    with swept(crew.home):
        async with opened(crew):
            yield crew


@at(THREAD, PROCESS)
async def test_new_work_is_refused_and_what_lives_goes_on(crew: Crew, disk: Disk) -> None:
    agent = await crew.start()
    disk.fill()
    with pytest.raises(StoreFullError, match="free some space"):
        await start_many(crew, 50)  # what is in the log already has room
    assert await agent.ask(do("echo", value=1)) == 1, "an answer is given, though its moves are written later"
    disk.free()
    await crew.passes(crew.reaches(agent, S.WAITING), 10)
    assert await agent.ask(do("echo", value=2)) == 2
    await crew.start()


async def start_many(crew: Crew, count: int, context: dict[str, Any] | None = None) -> None:
    for _ in range(count):
        await crew.start(context)


async def fill_up(crew: Crew, disk: Disk) -> None:
    """Nothing can be written any more, not even into space that the database holds already."""
    disk.fill()
    with pytest.raises(StoreFullError):
        await start_many(crew, 500, {"pad": "x" * 3000})


@at(THREAD, PROCESS)
async def test_an_agent_is_ended_on_a_full_disk_and_recorded_when_it_can_be(
    crew: Crew, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    await fill_up(crew, disk)
    result = await crew.passes(agent.stop(reason="full"), 30)
    assert result.success
    assert result.was_graceful
    assert "could not be recorded yet" in (result.error_message or "")
    assert "shutdown" in crew.stage.said
    assert crew.level is not PROCESS or not lives(pid)
    assert logged(caplog, "death_unwritten")
    assert "full" in " ".join((await agent.why()).evidence)
    disk.free()
    await crew.passes(crew.reaches(agent, S.TERMINATED), 30)
    (event,) = await crew.events(agent, AgentTerminatedEvent)
    assert (event.was_graceful, event.reason) == (True, "full")


@at(THREAD, PROCESS)
async def test_a_death_on_a_full_disk_is_recorded_and_restarted_when_it_can_be(crew: Crew, disk: Disk) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    await fill_up(crew, disk)
    call = crew.begin(agent.ask(do("exit")))
    await until(lambda: crew.runtime.instances[agent.instance_id].phase.__class__.__name__ == "Leaving")
    assert "full" in " ".join((await agent.why()).evidence) or not call.done()
    disk.free()
    await crew.comes_back(agent, 2, 10)
    with pytest.raises(OstlerError):
        await call


@at(THREAD, PROCESS)
async def test_requests_to_an_agent_that_died_on_a_full_disk_fail_and_why_says_so(crew: Crew, disk: Disk) -> None:
    agent = await crew.start(restart_policy=RestartPolicy.immediate())
    await fill_up(crew, disk)
    with pytest.raises(AgentGoneError, match="could not be recorded yet"):
        await crew.passes(agent.ask(do("exit")), 5)
    with pytest.raises(AgentGoneError, match="could not be recorded yet"):
        await agent.ask(do("echo", value=1))
    why = await agent.why()
    assert why.verdict == "it has ended, but that could not be recorded yet"
    assert "full" in " ".join(why.evidence)
    disk.free()
    await crew.comes_back(agent, 2, 10)
    assert await agent.ask(do("echo", value=1)) == 1


@at(PROCESS)
async def test_a_manager_on_a_full_disk_closes_within_seconds(crew: Crew, disk: Disk) -> None:
    agents = [await crew.start() for _ in range(3)]
    pids = [(await agent.ask(do("know")))["pid"] for agent in agents]
    await fill_up(crew, disk)
    began = crew.clock.mono()
    await crew.close()
    assert crew.clock.mono() - began < 10
    assert not any(lives(pid) for pid in pids)
    disk.free()
    await crew.open()
    record = await crew.reaches(crew.again(agents[0]), S.FAILED)
    assert record.error_message == "its process ended by itself", "as the keeper saw it"


@at(PROCESS)
async def test_a_home_on_a_full_disk_is_opened_to_end_what_lives_there(crew: Crew, disk: Disk) -> None:
    agent = await crew.start()
    pid = (await agent.ask(do("know")))["pid"]
    await fill_up(crew, disk)
    await crew.close(keep=True)
    assert lives(pid)
    disk.fill()
    await crew.open()
    agent = crew.again(agent)
    assert await agent.ask(do("echo", value=1)) == 1
    with pytest.raises(StoreFullError):
        await crew.start()
    result = await crew.passes(crew.manager.terminate(agent.instance_id, TerminationOptions.immediate()), 30)
    assert result.success
    assert "could not be recorded yet" in (result.error_message or "")
    assert not lives(pid)
    disk.free()
    await crew.passes(crew.reaches(agent, S.TERMINATED), 60)
    await crew.start()


async def test_a_workdir_is_not_retired_on_a_full_disk_and_stays_in_its_place(disk: Disk, tmp_path: Path) -> None:
    near = tmp_path / "project"
    near.mkdir()
    async with Workdirs(disk.where / "home") as workdirs:
        workdir = await workdirs.plan("T1", near=near)
        await workdirs.prepare(workdir)
        data = os.urandom(1_000_000)
        (Path(workdir.path) / "data").write_bytes(data)
        disk.fill()
        with pytest.raises(StoreFullError, match="free some space"):
            await workdirs.retire(workdir, record={})
        assert (Path(workdir.path) / "data").read_bytes() == data
        disk.free()
        await workdirs.retire(workdir, record={})
    assert not Path(workdir.path).exists()


# --- a keeper that hangs ------------------------------------------------------------------------------


@at(PROCESS)
async def test_with_a_keeper_that_hangs_a_spawn_fails_within_its_time(
    home: Path, stage: Stage, level: IsolationLevel
) -> None:
    """Its initialisation timeout and five seconds."""
    crew = Crew(home, SystemClock(), stage, level)
    with swept(home):
        async with opened(crew):
            first = await crew.start()
            keeper = keeper_of(home)
            os.kill(keeper, signal.SIGSTOP)
            began = time.monotonic()
            try:
                with pytest.raises((InitializationTimeoutError, AgentInitializationError)):
                    await crew.start(initialization_timeout=timedelta(seconds=1))
                assert time.monotonic() - began < 30
                assert await first.ask(do("echo", value=1)) == 1, "the others go on"
            finally:
                os.kill(keeper, signal.SIGCONT)
            assert [one for one in await crew.manager.get_active_instances() if one.state is S.INITIALIZING] == []
            again = await crew.start()
            assert await again.ask(do("echo", value=2)) == 2
        await until(lambda: not everyone(home))
