"""Freezing a command: its runs stand still, a run that would begin waits, and a cell without a run is alive."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
from command_ground import (
    CALL,
    PYTHON,
    Begin,
    began,
    begin,
    begun,
    isolation,
    listener,
    lives,
    names_in,
    place,
    plan_for,
    site,
    units,
    waiting,
)
from isolation.ground import RecordingListener
from machine_ground import everyone

from ostler.clock import SystemClock
from ostler.errors import AgentGoneError
from ostler.isolation import Cell, Site, Verb
from ostler.isolation.process.level import ProcessIsolation

__all__ = ["begin", "isolation", "listener", "place", "site"]

pytestmark = pytest.mark.anyio

QUICK = (PYTHON, "-S", "-c", "print('done')")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_freeze_waits_for_starts_under_way(
    begin: Begin, isolation: ProcessIsolation, site: Site, place: Path
) -> None:
    """It hits every moment of a start; the run goes on after the thaw as if nothing had been."""
    assert site.directory is not None
    chance = random.Random(7)
    for number in range(40):
        plan = plan_for(place, *waiting(place))
        cell = await begin(plan)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
        await asyncio.sleep(0 if number < 5 else chance.random() * 0.006)
        await cell.freeze()
        if everyone(site.directory, f"{plan.instance_id.hex}.1"):
            assert await units(isolation), "it was frozen before its program began, where no next manager sees it"
        (place / "go").touch()
        await asyncio.sleep(0.02)
        assert not call.done(), f"run {number} went on while it was frozen"
        await cell.thaw()
        assert (await call)["output"].endswith("done\n")
        (place / "go").unlink()
        await cell.destroy()


async def test_a_call_that_meets_a_frozen_cell_begins_after_the_thaw(begin: Begin, place: Path) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    await cell.freeze()
    await cell.freeze()
    assert cell.is_idle, "without a run there is nothing to look after"
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    await asyncio.sleep(0.2)
    assert not begun(place)
    await cell.thaw()
    await cell.thaw()
    await began(place)
    await cell.freeze()
    second = asyncio.ensure_future(cell.call(Verb.PROCESS, "y"))
    (place / "go").touch()
    await asyncio.wait((call, second), timeout=0.2)
    assert not call.done()
    assert len(begun(place)) == 1
    await cell.thaw()
    answers = await asyncio.gather(call, second)
    assert all(one["output"].endswith("done\n") for one in answers)
    await cell.destroy()


async def test_one_that_waits_for_the_thaw_can_be_cancelled_and_stopped(begin: Begin, place: Path) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    await cell.freeze()
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, "x")) for _ in range(2)]
    await asyncio.sleep(0.05)
    calls[0].cancel()
    await asyncio.wait(calls[:1], timeout=2)
    assert calls[0].cancelled()
    report = await cell.stop(timedelta(seconds=5))
    assert (report.graceful, report.left_behind) == (True, None)
    with pytest.raises(AgentGoneError):
        await calls[1]
    assert not names_in(place), "neither a run nor a prompt"
    await cell.destroy()


async def test_a_cancelled_run_of_a_frozen_cell_is_killed_and_the_other_stays_frozen(
    begin: Begin, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostler.isolation.held.command_cell.STOP_GRACE_S", 90.0)
    cell = await begin(plan_for(place, *waiting(place)))
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, "x")) for _ in range(2)]
    pids = await began(place, 2)
    await cell.freeze()
    calls[0].cancel()
    since = time.monotonic()
    await asyncio.wait(calls[:1], timeout=60)
    assert calls[0].cancelled()
    assert time.monotonic() - since < 60, "its grace is not waited for"
    assert sum(lives(pid) for pid in pids) == 1
    assert not cell.is_stuck
    (place / "go").touch()  # only now: with cgroup v1 the cell is thawed for the moment of the kill
    await asyncio.wait(calls[1:], timeout=0.2)
    assert not calls[1].done()
    await cell.thaw()
    assert (await calls[1])["output"].endswith("done\n")
    await cell.destroy()


async def test_freezes_race_the_end_of_the_last_run(begin: Begin, place: Path) -> None:
    """A command without a run is alive, so that neither a freeze nor a thaw nor a look finds it gone."""
    cell = await begin(plan_for(place, *QUICK))
    done = asyncio.Event()

    async def shake() -> None:
        while not done.is_set():
            await cell.freeze()
            await cell.usage()
            await asyncio.sleep(0)
            await cell.thaw()
            await asyncio.sleep(random.Random().random() * 0.01)

    shaking = asyncio.ensure_future(shake())
    for number in range(40):
        named = CALL if number % 2 else None
        assert (await cell.call(Verb.PROCESS, "x", call_id=named))["output"] == "done\n"
        if number % 4 == 1:
            cell.ack([CALL])
        elif named:
            await asyncio.sleep(0.002)
            cell.ack([CALL])
    done.set()
    await shaking
    await cell.destroy()


async def test_a_box_that_went_with_its_last_run_needs_no_thaw(
    begin: Begin, isolation: ProcessIsolation, place: Path
) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
    await began(place)
    await cell.freeze()
    call.cancel()
    await asyncio.wait((call,))
    end = time.monotonic() + 10
    while await units(isolation):
        assert time.monotonic() < end, "the run is not forgotten"
        await asyncio.sleep(0.01)
    await cell.freeze()
    await cell.thaw()
    (place / "go").touch()
    assert (await cell.call(Verb.PROCESS, "x"))["output"].endswith("done\n")
    await cell.destroy()


async def test_two_who_freeze_and_thaw_at_once_leave_it_as_the_last_wants(begin: Begin, place: Path) -> None:
    cell = await begin(plan_for(place, *waiting(place)))
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
    await began(place)
    await asyncio.gather(cell.freeze(), cell.thaw(), cell.freeze(), cell.thaw())
    (place / "go").touch()
    assert (await asyncio.wait_for(call, 60))["output"].endswith("done\n")
    await cell.destroy()


async def test_what_is_frozen_is_found_frozen_by_the_next_manager(
    begin: Begin, isolation: ProcessIsolation, place: Path, site: Site
) -> None:
    plan = plan_for(place, *waiting(place))
    cell = await begin(plan)
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    await began(place)
    await cell.freeze()
    await isolation.close()
    with pytest.raises(AgentGoneError):
        await call
    (place / "go").touch()
    heir = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    listener = RecordingListener()
    found = await heir.adopt(None, plan, listener)
    assert isinstance(found, Cell)
    assert await listener.report() == ({CALL: Verb.PROCESS}, frozenset()), "a command cell reports at once"
    second = asyncio.ensure_future(found.call(Verb.PROCESS, "y"))
    again = asyncio.ensure_future(found.call(Verb.PROCESS, "x", call_id=CALL))
    await asyncio.wait((again, second), timeout=0.2)
    assert not again.done()
    assert len(begun(place)) == 1
    await found.thaw()
    answers = await asyncio.gather(again, second)
    assert all(one["output"].endswith("done\n") for one in answers)
    await found.destroy()
    await heir.close()
