"""What could be left of a cell: by a start that cannot be undone, by a sweep, by a fork of the manager's program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from defect_agents import Nuisance
from defect_ground import plan_for
from isolation.ground import RecordingListener, until
from machine_ground import everyone, lives, swept
from process_ground import Begin, beginning, isolation, listener, site

from ostler.clock import SystemClock
from ostler.isolation import Exit, Site
from ostler.isolation.base import LeftBehindError
from ostler.isolation.process.keeper_client import KeeperHolder
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.attempt import AttemptOutcome

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
NO_GRACE = timedelta(0)


class SlowlyMade(Nuisance):
    def __init__(self) -> None:
        time.sleep(600)


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the keeper was told to stop. The first time it names a process that it could not kill."""
    stop, names = KeeperHolder.stop, list[str]()

    async def stop_second(holder: KeeperHolder, name: str, grace: float) -> list[str]:
        names.append(name)
        return ["process 7 (state D)"] if len(names) == 1 else await stop(holder, name, grace)

    monkeypatch.setattr(KeeperHolder, "stop", stop_second)
    return names


async def test_a_start_that_cannot_be_undone_hands_its_cell_over(
    isolation: ProcessIsolation, listener: RecordingListener, site: Site, stops: list[str]
) -> None:
    assert site.directory is not None
    plan = replace(plan_for(), maker=SlowlyMade)
    name = f"{plan.instance_id.hex}.{plan.attempt}"
    starting = asyncio.ensure_future(isolation.start(plan, listener))
    await until(lambda: bool(everyone(Path(str(site.directory)), name)))
    for _ in range(3):  # a caller that is impatient does not shorten it
        starting.cancel()
        await asyncio.sleep(0)
    with pytest.raises(LeftBehindError, match="process 7") as raised:
        await starting
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    assert everyone(site.directory, name)
    assert await isolation.sweep(()) == 0, "the caller has its cell"
    report = await raised.value.cell.stop(NO_GRACE)
    assert report.left_behind is None
    assert not everyone(site.directory, name)
    await raised.value.cell.destroy()
    assert stops[0] == name
    assert not listener.exits


async def test_a_sweep_leaves_the_exit_of_a_cell_that_is_not_destroyed(
    begin: Begin, isolation: ProcessIsolation, site: Site, listener: RecordingListener
) -> None:
    """The manager has not committed that end yet, and may be killed before it has."""
    plan = plan_for()
    cell = await begin(plan)
    os.kill(cell.handle["pid"], signal.SIGKILL)
    await until(lambda: bool(listener.exits))
    await isolation.sweep(())
    following = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    try:
        how = await following.adopt(cell.handle, plan, RecordingListener())
        assert isinstance(how, Exit)
        assert (how.outcome, how.signal) == (AttemptOutcome.SIGNAL, signal.SIGKILL)
    finally:
        await following.close()


async def test_a_fork_of_the_managers_program_keeps_no_connection(tmp_path: Path) -> None:
    """Agents that end with their manager end, although a child of its program lives on."""
    home = tmp_path / "home"
    paths = os.pathsep.join((str(HERE), str(HERE.parent / "contract")))
    command = [sys.executable, str(HERE / "forking_manager.py"), str(home)]
    with swept(home):
        manager = subprocess.Popen(  # noqa: ASYNC220 - it does not block
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        with manager:
            assert manager.stdout is not None
            assert manager.stdin is not None
            try:
                report = json.loads(await asyncio.to_thread(manager.stdout.readline))
            finally:
                manager.kill()
            assert report["opened"] >= 2, "one to the keeper, one to the agent"
            assert report["copied"] == 0
            await until(lambda: not lives(report["agent"]))
            assert lives(report["child"])
            manager.stdin.close()
            await until(lambda: not lives(report["child"]))
