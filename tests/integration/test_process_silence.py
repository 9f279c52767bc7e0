"""What once went wrong when somebody does not answer: a keeper that hangs, an agent that blocks, a crowd of runs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from defect_ground import do, keeper, plan_for
from isolation.ground import RecordingListener, until
from machine_ground import lives
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agents import CommandSpec
from ostler.clock import SystemClock
from ostler.errors import AgentGoneError, AgentInitializationError, InvalidOperationError
from ostler.isolation import Cell, Site, Verb
from ostler.isolation.process import home, launch, link
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


# --- silence -----------------------------------------------------------------------------------------


async def test_a_keeper_that_hangs_holds_nobody_up(
    begin: Begin, isolation: ProcessIsolation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, silent = await begin(), keeper(site)  # with all the time it needs: its template has to be loaded first
    monkeypatch.setattr(link, "_SECONDS", 0.5)
    monkeypatch.setattr(link, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(link, "_SECONDS_OF", {"hello": 0.5, "bye": 0.5})
    monkeypatch.setattr(home, "_CONNECT_SECONDS", 1.0)
    os.kill(silent, signal.SIGSTOP)
    try:
        with pytest.raises(InvalidOperationError, match="left usage unanswered"):
            await cell.usage()
        with pytest.raises(AgentInitializationError, match="left start unanswered"):
            await begin()
        report = await asyncio.wait_for(cell.stop(timedelta(seconds=0.1)), 60)
        assert "left stop unanswered" in (report.left_behind or "")
        site.outlive = timedelta(0)
        await asyncio.wait_for(isolation.close(), 60)
        with pytest.raises(InvalidOperationError, match="neither answers nor"):
            await ProcessIsolation(SystemClock(), site).prepare(plan_for())
    finally:
        os.kill(silent, signal.SIGCONT)
    await until(lambda: not lives(silent))
    assert not lives(cell.handle["pid"])


async def test_nothing_is_swept_while_a_keeper_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.directory is not None
    place = site.directory / launch.KEEPER
    place.mkdir(parents=True)
    (place / protocol.TOKEN).write_text("0123456789abcdef")
    (place / protocol.SOCKET).touch()
    swept: list[str] = []

    async def sweep(token: str) -> None:
        swept.append(token)

    monkeypatch.setattr(launch, "sweep", sweep)
    monkeypatch.setattr(launch, "connect", lambda _: None)
    with (place / protocol.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await ProcessIsolation(SystemClock(), site).sweep(keep=()) == 0
        assert swept == []
    assert await ProcessIsolation(SystemClock(), site).sweep(keep=()) == 0
    assert swept == ["0123456789abcdef"]


# --- one that blocks ---------------------------------------------------------------------------------


async def test_one_that_blocks_is_found_at_once_and_tells_later(begin: Begin, site: Site, tmp_path: Path) -> None:
    plan, call_id, note = plan_for(), uuid4(), tmp_path / "note"
    cell = await begin(plan)
    request = do("block", seconds=6, value="once", note=str(note))
    first = asyncio.ensure_future(cell.call(Verb.PROCESS, request, call_id=call_id))
    await until(note.exists)
    heir = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    began, told = time.monotonic(), []
    found = await heir.recover(None, plan, RecordingListener())
    assert isinstance(found, Cell)
    found.on_reported(lambda: told.append(dict(found.in_flight)))
    await found.thaw()
    assert time.monotonic() - began < 5, "it was waited for"
    with pytest.raises(AgentGoneError):
        await first
    assert dict(found.in_flight) == {}
    await until(lambda: bool(told))
    assert told == [{call_id: Verb.PROCESS}]
    assert await found.call(Verb.PROCESS, request, call_id=call_id) == "once"
    assert note.read_text() == "done\n"
    await found.destroy()
    await heir.close()


async def test_a_call_of_one_that_blocks_is_joined_before_and_after_it_tells(
    begin: Begin, isolation: ProcessIsolation, site: Site, tmp_path: Path
) -> None:
    plans, ids, note = [plan_for(), plan_for()], [uuid4(), uuid4()], tmp_path / "note"
    request = do("block", seconds=3, value="once", note=str(note))
    cells = [await begin(plan) for plan in plans]
    calls = [
        asyncio.ensure_future(cell.call(Verb.PROCESS, request, call_id=one))
        for cell, one in zip(cells, ids, strict=True)
    ]
    await until(lambda: note.exists() and note.read_text() == "done\n" * 2)
    await isolation.close()
    await asyncio.wait(calls)
    assert all(isinstance(one.exception(), AgentGoneError) for one in calls)
    heir = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    before, after = [await heir.recover(None, plan, RecordingListener()) for plan in plans]
    assert isinstance(before, Cell)
    assert isinstance(after, Cell)
    told: list[str] = []
    for name, cell in (("before", before), ("after", after)):
        cell.on_reported(partial(told.append, name))
    assert not told
    early = asyncio.ensure_future(before.call(Verb.PROCESS, request, call_id=ids[0]))
    await until(lambda: len(told) == 2)
    assert not before.in_flight, "it was joined before it was known"
    assert await early == "once"
    assert after.in_flight == {ids[1]: Verb.PROCESS}
    assert await after.call(Verb.PROCESS, request, call_id=ids[1]) == "once"
    assert note.read_text() == "done\n" * 2, "nothing was done twice"
    assert sorted(told) == ["after", "before"]
    for cell in (before, after):
        await cell.destroy()
    await heir.close()


# --- much of it --------------------------------------------------------------------------------------


async def test_a_command_that_never_pauses_gathers_nothing(
    begin: Begin, isolation: ProcessIsolation, site: Site, tmp_path: Path
) -> None:
    code = "import sys, time, os; print(sys.argv[1], flush=True)\nwhile sys.argv[1] == 'long' and "
    code += f"not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    cell = await begin(plan_for(CommandSpec(argv=(sys.executable, "-S", "-c", code, "{prompt}")), tmp_path))
    long = asyncio.ensure_future(cell.call(Verb.PROCESS, "long"))
    for _ in range(30):
        await cell.call(Verb.PROCESS, "short")
    units = (await isolation._home.request("list"))["units"]  # noqa: SLF001 - only the keeper knows
    assert len(units) <= 2
    assert site.directory is not None
    assert len(list((site.directory / "logs").rglob("*.log"))) <= 22
    (tmp_path / "go").touch()
    assert (await long)["output"] == "long\n"
    await until(lambda: not cell.in_flight)
    await cell.destroy()
