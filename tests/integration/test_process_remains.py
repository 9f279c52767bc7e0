"""What cannot be killed: nothing that it belongs to is called terminated before it is gone, by whichever manager.

A group that somebody else has frozen is the one place where a blow does not fall, so that is where the children go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from defect_ground import plan_for
from isolation.ground import RecordingListener
from machine_ground import PATIENCE, end_keeper, keeper_of, kill_keeper_of, lacking, lives, swept, until
from promise_ground import Fleet, opened

import ostler
from ostler import AgentGoneError, AgentInstance, AgentState, InvalidOperationError, RestartPolicy, TerminationOptions
from ostler.agents import CommandSpec
from ostler.clock import SystemClock
from ostler.isolation.base import Cell, Site, Verb
from ostler.isolation.process.level import ProcessIsolation

_FREEZER = Path("/sys/fs/cgroup/freezer")
_AT_ONCE = TerminationOptions.immediate()
_OUTLIVE = timedelta(seconds=60)
_LATER = RestartPolicy(initial_delay=timedelta(seconds=60), max_delay=timedelta(seconds=60))


class Ice:
    """Holds processes that no signal reaches until it is `broken`."""

    def __init__(self) -> None:
        self._group = _FREEZER / f"test-{uuid4().hex}"
        try:
            self._group.mkdir()
        except OSError as error:
            lacking(f"nothing here freezes a process so that it cannot be killed: {error}")

    async def take(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "freezer.state").write_text("FROZEN")
        await until(lambda: (self._group / "freezer.state").read_text() == "FROZEN\n")

    async def broken(self) -> None:
        (self._group / "freezer.state").write_text("THAWED")
        await until(lambda: (self._group / "cgroup.procs").read_text() == "")

    def close(self) -> None:
        """Whoever a test that failed has left in it goes too."""
        (self._group / "freezer.state").write_text("THAWED")
        for pid in (self._group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        end = time.monotonic() + 5
        while (self._group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        self._group.rmdir()


@contextmanager
def ice() -> Iterator[Ice]:
    found = Ice()
    try:
        yield found
    finally:
        found.close()


async def with_unkillable_child(fleet: Fleet, ice: Ice, policy: RestartPolicy | None = None) -> AgentInstance:
    one = await fleet.spawn(restart_policy=policy)
    before = fleet.tree(one)
    await fleet.do(one, "raise_one", program="deaf")
    (child,) = fleet.tree(one) - before
    await ice.take(child)
    return one


async def until_told(fleet: Fleet, one: AgentInstance) -> None:
    """That something of it lives on."""
    end = time.monotonic() + PATIENCE
    while "process" not in " ".join((why := await fleet.manager.why(one.instance_id)).evidence):
        assert time.monotonic() < end, why
        await asyncio.sleep(0.05)


@pytest.mark.anyio
async def test_nothing_is_called_terminated_while_something_of_it_lives_under_any_manager(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostler.lifecycle.open._CLOSE_SECONDS", 1)
    with swept(home), ice() as cold:
        async with opened(home, outlive=_OUTLIVE, close_grace=timedelta(0)) as fleet:
            ended = await with_unkillable_child(fleet, cold)
            died = await with_unkillable_child(fleet, cold, RestartPolicy.none())
            ending = asyncio.create_task(fleet.manager.terminate(ended.instance_id, _AT_ONCE))
            with pytest.raises(AgentGoneError):
                await fleet.do(died, "leave", code=3)
            result = await ending
            assert not result.success, result
            assert "could not be ended: process" in (result.error_message or "")
            await until_told(fleet, died)
        (left,) = fleet.tree(ended)
        async with opened(home, outlive=_OUTLIVE, close_grace=timedelta(0)) as fleet:
            assert (await fleet.record(ended)).state is AgentState.TERMINATING
            refused = await fleet.manager.terminate(died.instance_id, _AT_ONCE)
            assert not refused.success
            assert (await fleet.record(died)).state is not AgentState.TERMINATED
            assert lives(left)
            await cold.broken()
            for one in (ended, died):
                assert (await fleet.manager.terminate(one.instance_id, _AT_ONCE)).success
                assert (await fleet.record(one)).state is AgentState.TERMINATED
                assert fleet.tree(one) == set()
        await until(lambda: not keeper_of(home), "the keeper stays for those of whom nothing is left")
        end_keeper(home)


@pytest.mark.torture  # each keeper tries for seconds to end what it cannot
@pytest.mark.anyio
async def test_so_it_is_where_agents_end_with_their_manager_and_where_a_keeper_is_killed(home: Path) -> None:
    """Those keepers are gone, one in order and one not; the next knows by their records, and by what it still finds."""
    with swept(home), ice() as cold:
        async with ostler.open(home) as manager:
            fleet = Fleet(manager, home)
            ended = await with_unkillable_child(fleet, cold)
            died = await with_unkillable_child(fleet, cold, _LATER)
            ending = asyncio.create_task(fleet.manager.terminate(ended.instance_id, _AT_ONCE))
            with pytest.raises(AgentGoneError):
                await fleet.do(died, "leave", code=3)
            assert not (await ending).success
            await until_told(fleet, died)
        async with opened(home) as fleet:
            assert (await fleet.record(ended)).state is AgentState.TERMINATING
            lost = await with_unkillable_child(fleet, cold, RestartPolicy.none())
            kill_keeper_of(home)
            await until_told(fleet, lost)
            for one in (died, lost):
                assert not (await fleet.manager.terminate(one.instance_id, _AT_ONCE)).success
                assert (await fleet.record(one)).state is not AgentState.TERMINATED
            await cold.broken()
            for one in (ended, died, lost):
                assert (await fleet.manager.terminate(one.instance_id, _AT_ONCE)).success


@pytest.mark.anyio
async def test_a_dead_agent_does_not_return_while_something_of_it_lives_and_ends_when_it_can(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostler.lifecycle.leave.AGAIN_SECONDS", 0.5)
    with swept(home), ice() as cold:
        async with opened(home) as fleet:
            back, ended = [await with_unkillable_child(fleet, cold, RestartPolicy.immediate()) for _ in range(2)]
            deaths = [fleet.start(one, "die", signal=signal.SIGKILL) for one in (back, ended)]
            assert [type(one) for one in await asyncio.gather(*deaths, return_exceptions=True)] == [AgentGoneError] * 2
            for one in (back, ended):
                await until_told(fleet, one)
                with pytest.raises(InvalidOperationError, match="ending"):
                    await fleet.manager.restart(one.instance_id)
            result = await fleet.manager.terminate(ended.instance_id, _AT_ONCE)
            assert not result.success
            assert "could not be ended: process" in (result.error_message or "")
            assert [len(await fleet.attempts(one)) for one in (back, ended)] == [1, 1]
            await cold.broken()
            await fleet.comes_to(back, AgentState.READY, 2)
            await fleet.comes_to(ended, AgentState.TERMINATED)
            assert len(await fleet.attempts(ended)) == 1


@pytest.mark.torture  # as above
@pytest.mark.anyio
async def test_so_it_is_of_a_command_whose_keeper_was_killed(tmp_path: Path) -> None:
    with swept(tmp_path / "home") as home, ice() as cold:
        begun = tmp_path / "begun"
        argv = ("sh", "-c", f"sleep 1000 & echo $! > {begun}.new; mv {begun}.new {begun}; wait")
        plan = plan_for(CommandSpec(argv=argv), tmp_path)
        managers = [
            ProcessIsolation(SystemClock(), Site(directory=home, outlive=_OUTLIVE, epoch=epoch)) for epoch in (1, 2)
        ]
        cell = await managers[0].start(plan, RecordingListener())
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
        await until(begun.exists)
        await cold.take(int(begun.read_text()))
        handle = cell.handle
        await managers[0].close()
        await asyncio.gather(call, return_exceptions=True)
        kill_keeper_of(home)
        adopted = await managers[1].adopt(handle, plan, RecordingListener())
        assert isinstance(adopted, Cell)
        assert "process" in ((await adopted.stop(timedelta(0))).left_behind or "")
        await cold.broken()
        assert (await adopted.stop(timedelta(0))).left_behind is None
        await adopted.destroy()
        await managers[1].close()
