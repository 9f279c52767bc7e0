"""A keeper that does not answer (SIGSTOP): everything that is asked of it is bounded, and made good when it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from command_ground import CALL, begun, waiting
from defect_ground import do, keeper, plan_for
from isolation.ground import RecordingListener, until
from machine_ground import everyone, lives
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agents import CommandSpec
from ostler.clock import SystemClock
from ostler.errors import InvalidOperationError
from ostler.isolation import Site, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


@contextlib.contextmanager
def hung(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def known(isolation: ProcessIsolation) -> set[str]:
    return {status.unit for status in await isolation._holder.units()}  # noqa: SLF001 - only the keeper knows


async def ended(isolation: ProcessIsolation, site: Site, kept: set[str]) -> None:
    """Until the keeper has done what it was told while it hung."""
    assert site.directory is not None
    end = time.monotonic() + 60
    while await known(isolation) != kept:
        assert time.monotonic() < end, "what was begun is not undone"
        await asyncio.sleep(0.02)


async def test_a_start_fails_within_its_deadline_and_five_seconds(
    begin: Begin, isolation: ProcessIsolation, site: Site, listener: RecordingListener, caplog: pytest.LogCaptureFixture
) -> None:
    cell = await begin()
    kept, plan, since = await known(isolation), plan_for(), time.monotonic()
    with hung(keeper(site)):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(isolation.start(plan, listener), 1.0)
        assert time.monotonic() - since < 30
        assert "the keeper does not answer" in caplog.text
        assert await cell.call(Verb.PROCESS, do("echo", value=1)) == 1, "agents need no keeper to work"
    await ended(isolation, site, kept)
    assert site.directory is not None
    assert not everyone(site.directory, f"{plan.instance_id.hex}.1")
    fresh = await begin()
    await fresh.destroy()
    await cell.destroy()


async def test_a_destroyed_cell_is_ended_when_the_keeper_answers_again(
    begin: Begin, isolation: ProcessIsolation, site: Site
) -> None:
    cell = await begin()
    since = time.monotonic()
    with hung(keeper(site)):
        await cell.destroy()
        await cell.destroy()
        assert time.monotonic() - since < 60
        assert lives(cell.handle["pid"])
    await until(lambda: not lives(cell.handle["pid"]))
    await ended(isolation, site, set())


async def test_preparing_is_given_up_at_once(begin: Begin, site: Site, tmp_path: Path) -> None:
    cell = await begin()
    following = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    with hung(keeper(site)):
        preparing = [asyncio.ensure_future(following.prepare(plan_for())) for _ in range(3)]
        await asyncio.sleep(0.3)
        since = time.monotonic()
        for one in preparing:
            one.cancel()
        await asyncio.wait(preparing)
        assert time.monotonic() - since < 3
        assert all(one.cancelled() for one in preparing)
        await following.close()
        assert time.monotonic() - since < 4
    elsewhere = ProcessIsolation(SystemClock(), Site(directory=tmp_path / "other", epoch=1))
    starting = asyncio.ensure_future(elsewhere.prepare(plan_for()))  # no keeper is there yet
    await asyncio.sleep(0.02)
    since = time.monotonic()
    starting.cancel()
    await asyncio.wait((starting,))
    assert time.monotonic() - since < 3
    await elsewhere.close()
    await cell.destroy()


async def test_recovery_and_sweep_do_not_wait_for_ever(begin: Begin, site: Site) -> None:
    """However many are recovered at once, they wait for one attempt."""
    plan = plan_for()
    cell = await begin(plan)
    following = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    with hung(keeper(site)):
        since = time.monotonic()
        asking = [following.adopt(None, plan, RecordingListener()) for _ in range(8)]
        for error in await asyncio.gather(*asking, following.sweep(()), return_exceptions=True):
            assert isinstance(error, InvalidOperationError)
        assert time.monotonic() - since < 60
        await following.close()
    await cell.destroy()


async def test_one_that_lets_nobody_in_does_not_hold_up_the_loop(begin: Begin, site: Site) -> None:
    """A connection that is not accepted waits in the socket; there is room for some."""
    cell = await begin()
    following = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    assert site.directory is not None
    with hung(keeper(site)), contextlib.ExitStack() as held:
        with contextlib.suppress(BlockingIOError):
            while True:
                held.enter_context(protocol.connect(str(site.directory / "keeper")))
        since = time.monotonic()
        with pytest.raises(InvalidOperationError, match="so it hangs; kill it"):
            await following.prepare(plan_for())
        assert time.monotonic() - since < 3
        await following.close()
    await cell.destroy()


async def test_a_cancelled_run_is_given_up_and_ended_later(
    begin: Begin, isolation: ProcessIsolation, site: Site, tmp_path: Path
) -> None:
    cell = await begin(plan_for(CommandSpec(argv=waiting(tmp_path)), tmp_path))
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=CALL))
    await until(lambda: bool(begun(tmp_path)))
    starting = await begin(plan_for(CommandSpec(argv=(sys.executable, "-c", "pass")), tmp_path))
    with hung(keeper(site)):
        late = asyncio.ensure_future(starting.call(Verb.PROCESS, "x", call_id=CALL))
        await asyncio.sleep(0.1)
        since = time.monotonic()
        for one in (call, late):
            one.cancel()
        await asyncio.wait((call, late))
        assert time.monotonic() - since < 30
        assert call.cancelled()
        assert late.cancelled()
        assert cell.is_stuck
    await until(lambda: not cell.is_stuck)
    await ended(isolation, site, set())
    assert not any(lives(pid) for pid in begun(tmp_path))
    (tmp_path / "go").touch()
    assert (await cell.call(Verb.PROCESS, "x", call_id=CALL))["output"].endswith("done\n")
    await cell.destroy()
    await starting.destroy()


async def test_a_freeze_that_comes_too_late_is_undone(begin: Begin, isolation: ProcessIsolation, site: Site) -> None:
    cell = await begin()
    with hung(keeper(site)):
        with pytest.raises(InvalidOperationError, match="does not answer"):
            await cell.freeze()
        await asyncio.sleep(0)  # the request that undoes it is sent
    await known(isolation)  # the keeper has done both
    assert await asyncio.wait_for(cell.call(Verb.PROCESS, do("echo", value=1)), 60) == 1
    await cell.destroy()
