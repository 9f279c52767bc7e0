"""What once went wrong when somebody does not answer: a keeper that hangs, an agent that blocks, a crowd of runs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from datetime import timedelta
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
from ostler.home import KEEPER
from ostler.isolation import Cell, Site, Verb
from ostler.isolation.process import keeper_client, launch
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import protocol

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


# --- silence -----------------------------------------------------------------------------------------


async def test_a_keeper_that_hangs_holds_nothing_up(
    begin: Begin, isolation: ProcessIsolation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, silent = await begin(), keeper(site)  # with all the time it needs: its template has to be loaded first
    monkeypatch.setattr(keeper_client, "_TURN_SECONDS", 0.1)
    monkeypatch.setattr(keeper_client, "_END_SECONDS", 1.0)
    os.kill(silent, signal.SIGSTOP)
    try:
        with pytest.raises(InvalidOperationError, match="does not answer"):
            await cell.usage()
        with pytest.raises(AgentInitializationError, match="does not answer"):
            await begin()
        report = await asyncio.wait_for(cell.stop(timedelta(seconds=0.1)), 60)
        assert "does not answer" in (report.left_behind or ""), "only the keeper can prove that nothing is left"
        site.outlive = timedelta(0)
        await asyncio.wait_for(isolation.close(), 60)
        with pytest.raises(InvalidOperationError, match="does not answer; if it stays so, kill it"):
            await ProcessIsolation(SystemClock(), site).prepare(plan_for())
    finally:
        os.kill(silent, signal.SIGCONT)
    await until(lambda: not lives(silent))
    assert not lives(cell.handle["pid"])


async def test_nothing_is_swept_while_a_keeper_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.directory is not None
    directory = site.directory / KEEPER
    directory.mkdir(parents=True)
    (directory / protocol.TOKEN).write_text("0123456789abcdef")
    (directory / protocol.SOCKET).touch()
    swept: list[str] = []

    async def run(argv: list[str], _seconds: float) -> tuple[int, str]:
        swept.append(argv[-1])
        return 0, ""

    monkeypatch.setattr(launch, "_run", run)
    with (directory / protocol.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not await launch.sweep_dead(directory)
        assert swept == []
    assert await launch.sweep_dead(directory)
    assert swept == ["0123456789abcdef"]


# --- an agent that blocks -----------------------------------------------------------------------------


async def test_a_call_of_a_blocked_agent_is_joined_before_and_after_its_report(
    begin: Begin, isolation: ProcessIsolation, site: Site, tmp_path: Path
) -> None:
    plans, ids, note = [plan_for(), plan_for()], [uuid4(), uuid4()], tmp_path / "note"
    request = do("block", seconds=3, value="once", note=str(note))
    cells = [await begin(plan) for plan in plans]
    calls = [
        asyncio.ensure_future(cell.call(Verb.PROCESS, request, call_id=call_id))
        for cell, call_id in zip(cells, ids, strict=True)
    ]
    await until(lambda: note.exists() and note.read_text() == "done\n" * 2)
    await isolation.close()
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), AgentGoneError) for call in calls)
    following = ProcessIsolation(SystemClock(), Site(directory=site.directory, outlive=timedelta(seconds=20), epoch=2))
    listeners = [RecordingListener(), RecordingListener()]
    before, after = [
        await following.adopt(None, plan, listener) for plan, listener in zip(plans, listeners, strict=True)
    ]
    assert isinstance(before, Cell)
    assert isinstance(after, Cell)
    assert not listeners[0].reports
    early = asyncio.ensure_future(before.call(Verb.PROCESS, request, call_id=ids[0]))
    assert (await listeners[1].report())[0] == {ids[1]: Verb.PROCESS}
    assert await early == "once"
    assert await after.call(Verb.PROCESS, request, call_id=ids[1]) == "once"
    assert note.read_text() == "done\n" * 2, "nothing was done twice"
    assert [len(listener.reports) for listener in listeners] == [1, 1]
    for cell in (before, after):
        await cell.destroy()
    await following.close()


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
    units = await isolation._holder.units()  # noqa: SLF001 - only the keeper knows
    assert len(units) <= 2
    assert site.directory is not None
    assert len(list((site.directory / "logs").rglob("*.log"))) <= 22
    (tmp_path / "go").touch()
    assert (await long)["output"] == "long\n"
    await cell.destroy()
