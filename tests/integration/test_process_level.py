"""Level process for real: walls, limits, deaths, and keepers that are killed."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from isolation.ground import RecordingListener, until
from process_agents import Handy, make_handy
from process_ground import Begin, beginning, isolation, listener, site

from ostler.agent_process.framing import MAX_MESSAGE
from ostler.agents import AgentKind, AgentMaker, AgentManifest
from ostler.clock import SystemClock
from ostler.errors import AgentExecutionError, AgentGoneError, AgentInitializationError, ValidationError
from ostler.isolation import Cell, Exit, Isolation, Site, StartPlan, Verb
from ostler.isolation.holder import OnExit, UnitExit, UnitStatus
from ostler.isolation.process.keeper_client import KeeperHolder
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits
from ostler.model.states import AgentPriority, Enforcement

__all__ = ["isolation", "listener", "site"]

pytestmark = pytest.mark.anyio

NUMBERS = count(1)
GRACE = timedelta(seconds=10)


def plan_for(maker: AgentMaker = Handy, **more: Any) -> StartPlan:
    fields: dict[str, Any] = {
        "instance_id": UUID(int=next(NUMBERS)),
        "attempt": 1,
        "name": "handy",
        "manifest": AgentManifest(id=UUID(int=1), name="handy", kind=AgentKind.PYTHON),
        "maker": maker,
        "limits": ResourceLimits(),
        "context": {},
    }
    return StartPlan(**{**fields, **more})


@pytest.fixture
def begin(isolation: ProcessIsolation, listener: RecordingListener) -> Begin:
    return beginning(isolation, listener, plan_for)


def do(what: str, **more: Any) -> dict[str, Any]:
    return {"do": what, **more}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def keeper_of(site: Site) -> int:
    """The pid of the one who holds the lock; by the kernel's own list."""
    assert site.directory is not None
    inode = (site.directory / "keeper" / "keeper.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            return int(words[4])
    raise LookupError("no keeper")


# --- walls -------------------------------------------------------------------------------------------


async def test_an_agent_sees_only_what_it_is_given(begin: Begin, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hush")
    monkeypatch.setenv("TZ", "UTC")
    cell = await begin(plan_for(priority=AgentPriority.LOW))
    seen = await cell.call(Verb.PROCESS, do("look"))
    assert "SOME_SECRET" not in seen["environ"]
    assert seen["environ"]["TZ"] == "UTC"
    who = {"OSTLER_INSTANCE", "OSTLER_ATTEMPT", "OSTLER_WORKDIR"}
    assert set(seen["environ"]) <= {*site.environment, *who, "OSTLER_MARK", "OSTLER_MAX_WORKER_THREADS", "LC_CTYPE"}
    assert seen["environ"]["OSTLER_ATTEMPT"] == "1"
    assert seen["cwd"] == str(Path.cwd())
    assert seen["parent"] == keeper_of(site)
    assert seen["nice"] >= 10, "and more where nothing else gives it the least share"
    assert len(seen["files"]) <= 9, "stdio, its socket, the channel, what its own loop needs, and the list itself"
    assert cell.handle["pid"] == seen["pid"]
    await cell.destroy()
    assert not lives(seen["pid"])


async def test_it_cannot_look_into_its_manager_or_its_keeper(begin: Begin, site: Site) -> None:
    cell = await begin()
    for pid in (os.getpid(), keeper_of(site)):
        assert await cell.call(Verb.PROCESS, do("peek", pid=pid)) == []
    assert "environ" in await cell.call(Verb.PROCESS, do("peek", pid="self")), "so that the look is one"
    await cell.destroy()


async def test_its_limits_are_held_and_recorded(
    begin: Begin, isolation: ProcessIsolation, listener: RecordingListener
) -> None:
    assert isolation.capabilities.holds("max_memory_mb") is Enforcement.ENFORCED
    cell = await begin(plan_for(limits=ResourceLimits(max_memory_mb=64)))
    neighbour = await begin()
    assert cell.enforcement is not None
    assert cell.enforcement["max_memory_mb"] is Enforcement.ENFORCED
    assert set(cell.enforcement) == {*ResourceLimits.__dataclass_fields__, "processes"}
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, do("eat", mb=512))
    await until(lambda: bool(listener.exits))
    assert [(how.outcome, how.detail, how.signal) for how in listener.exits] == [
        (AttemptOutcome.OOM, "it used more memory than its limit of 64 MB", signal.SIGKILL)
    ]
    assert await neighbour.call(Verb.PROCESS, do("echo", value=1)) == 1
    usage = await neighbour.usage()
    assert 0 < usage.memory_bytes < 64 << 20
    assert not usage.memory_is_shared
    await cell.destroy()
    await neighbour.destroy()


async def test_what_it_prints_goes_to_its_log_and_nowhere_else(begin: Begin, site: Site) -> None:
    plan = plan_for()
    cell = await begin(plan)
    await cell.call(Verb.PROCESS, do("shout", text="hello there"))
    await cell.stop(GRACE)
    assert site.directory is not None
    log = site.directory / "logs" / str(plan.instance_id) / "1.log"
    assert log.read_text().splitlines().count("hello there") == 2
    await cell.destroy()


async def test_old_logs_are_pruned(isolation: ProcessIsolation, site: Site) -> None:
    assert site.directory is not None
    plan = plan_for()
    logs = site.directory / "logs" / str(plan.instance_id)
    logs.mkdir(parents=True)
    for attempt in range(1, 9):
        (logs / f"{attempt}.log").touch()
    (logs / "2-0123.log.1").touch()
    await isolation.prepare(replace(plan, attempt=9))
    assert sorted(log.name for log in logs.iterdir()) == [f"{attempt}.log" for attempt in range(5, 9)]


# --- calls -------------------------------------------------------------------------------------------


async def test_what_is_no_json_does_not_leave_its_process(begin: Begin) -> None:
    cell = await begin(plan_for(make_handy))
    for payload in ({"do": "echo", "value": {1, 2}}, {"do": "echo", "value": float("nan")}):
        with pytest.raises(ValidationError, match="plain JSON"):
            await cell.call(Verb.PROCESS, payload)
    with pytest.raises(ValidationError, match=r"must be shorter .* write it to a file and send the path"):
        await cell.call(Verb.PROCESS, do("echo", value="x" * MAX_MESSAGE))
    with pytest.raises(AgentExecutionError, match="cannot leave its process"):
        await cell.call(Verb.PROCESS, do("secret"))
    text = "ä" * 3_000_000
    assert await cell.call(Verb.PROCESS, do("echo", value=text)) == text
    await cell.destroy()


async def test_many_calls_wait_for_an_agent_that_does_not_read(begin: Begin) -> None:
    cell = await begin()
    await cell.freeze()
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, do("echo", value="x" * 50_000))) for _ in range(600)]
    await asyncio.sleep(0.1)
    await cell.thaw()
    assert all(len(answer) == 50_000 for answer in await asyncio.gather(*calls))
    await cell.destroy()


# --- deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "how"),
    [
        (do("leave", code=7), Exit(outcome=AttemptOutcome.EXIT_CODE, detail="exit code 7", code=7)),
        (do("leave", code=0), Exit(outcome=AttemptOutcome.CLEAN, detail="its process ended by itself", code=0)),
        (do("die", signal=signal.SIGSEGV), Exit(outcome=AttemptOutcome.SIGNAL, detail="killed by SIGSEGV", signal=11)),
        (do("die", signal=signal.SIGKILL), Exit(outcome=AttemptOutcome.SIGNAL, detail="killed by SIGKILL", signal=9)),
    ],
)
async def test_a_death_is_told_for_what_it_was(
    begin: Begin, listener: RecordingListener, request_: Any, how: Exit
) -> None:
    cell = await begin()
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, request_)
    await until(lambda: [replace(exit_, ended_at=None) for exit_ in listener.exits] == [how])
    assert listener.exits[0].ended_at is not None
    assert abs(datetime.now(UTC) - listener.exits[0].ended_at) < timedelta(seconds=30)
    assert cell.ended == listener.exits[0]
    assert (await cell.stop(GRACE)).graceful
    await cell.destroy()
    assert len(listener.exits) == 1


@pytest.mark.parametrize("hex_", ["00", "ff" * 40, b"[]".hex(), b"{}".hex()])
async def test_one_that_sends_garbage_is_ended_and_not_believed(
    begin: Begin, listener: RecordingListener, hex_: str
) -> None:
    cell = await begin()
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, do("babble", hex=hex_))
    await until(lambda: bool(listener.exits))
    assert listener.exits[0].outcome is AttemptOutcome.ERROR
    assert "it sent what is no message" in (listener.exits[0].detail or "")
    await until(lambda: not lives(cell.handle["pid"]))
    await cell.destroy()


async def test_one_that_hangs_up_and_lives_on_is_ended(begin: Begin, listener: RecordingListener) -> None:
    cell = await begin()
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, do("hang_up"))
    await until(lambda: bool(listener.exits))
    assert not lives(cell.handle["pid"])
    await cell.destroy()


async def test_what_it_started_ends_with_it(begin: Begin) -> None:
    cell = await begin()
    child = await cell.call(Verb.PROCESS, do("raise_child"))
    assert lives(child)
    report = await cell.stop(GRACE)
    assert (report.graceful, report.left_behind) == (True, None)
    assert not lives(child)
    await cell.destroy()


# --- starts that fail --------------------------------------------------------------------------------


async def test_a_module_that_cannot_be_imported_is_said(
    isolation: ProcessIsolation, listener: RecordingListener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frail_agent.py").write_text(
        "import os\nfrom ostler.agents import Agent\nclass Frail(Agent): pass\n"
        "if os.environ.get('OSTLER_MARK'): raise RuntimeError('not in here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_for(importlib.import_module("frail_agent").Frail)
    with pytest.raises(AgentInitializationError, match="not in here"):
        await isolation.start(plan, listener)
    assert not listener.exits
    monkeypatch.delitem(sys.modules, "frail_agent")


async def test_a_start_that_is_given_up_leaves_nothing(
    isolation: ProcessIsolation, listener: RecordingListener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_agent.py").write_text(
        "import os, time\nfrom ostler.agents import Agent\nclass Slow(Agent): pass\n"
        "if os.environ.get('OSTLER_MARK'): time.sleep(30)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_for(importlib.import_module("slow_agent").Slow)
    await isolation.prepare(plan)
    start = asyncio.ensure_future(isolation.start(plan, listener))
    await asyncio.wait((start,), timeout=0.3)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    again = plan_for()
    cell = await isolation.start(again, listener)
    await cell.destroy()
    assert not listener.exits
    monkeypatch.delitem(sys.modules, "slow_agent")


async def test_the_same_attempt_lives_only_once(
    isolation: ProcessIsolation, listener: RecordingListener, begin: Begin
) -> None:
    plan = plan_for()
    cell = await begin(plan)
    with pytest.raises(AgentInitializationError, match="lives already"):
        await isolation.start(plan, listener)
    assert await cell.call(Verb.PROCESS, do("echo", value=1)) == 1
    await cell.destroy()


# --- the keeper --------------------------------------------------------------------------------------


async def test_nobody_survives_a_keeper_that_is_killed(begin: Begin, listener: RecordingListener, site: Site) -> None:
    cells = [await begin() for _ in range(3)]
    child = await cells[0].call(Verb.PROCESS, do("raise_child"))
    calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang"))) for cell in cells]
    await until(lambda: listener.signals.count("began") == 3)
    os.kill(keeper_of(site), signal.SIGKILL)
    for call in calls:
        with pytest.raises(AgentGoneError):
            await call
    await until(lambda: len(listener.exits) == 3)
    assert {how.outcome for how in listener.exits} == {AttemptOutcome.LOST}
    assert not any(lives(pid) for pid in (child, *(cell.handle["pid"] for cell in cells)))
    for cell in cells:
        assert (await cell.stop(GRACE)).left_behind is None
        await cell.destroy()
    again = await begin()
    assert await again.call(Verb.PROCESS, do("echo", value=1)) == 1
    await again.destroy()


async def test_a_stop_under_way_survives_the_keeper(begin: Begin, listener: RecordingListener, site: Site) -> None:
    cell = await begin()
    await cell.freeze()
    keeper = keeper_of(site)
    os.kill(keeper, signal.SIGSTOP)
    stopping = asyncio.ensure_future(cell.stop(timedelta(0)))
    await asyncio.wait((stopping,), timeout=0.1)
    os.kill(keeper, signal.SIGKILL)
    assert (await stopping).left_behind is None
    assert not lives(cell.handle["pid"])
    await cell.destroy()
    assert not listener.exits


async def test_a_newer_manager_takes_over_and_nothing_is_killed(begin: Begin, site: Site) -> None:
    plan = plan_for()
    cell = await begin(plan)
    following = ProcessIsolation(SystemClock(), replace(site, epoch=2))
    adopted = await following.adopt(cell.handle, plan, RecordingListener())
    assert isinstance(adopted, Cell)
    with pytest.raises(AgentGoneError):
        await cell.ping()
    assert await adopted.call(Verb.PROCESS, do("echo", value=1)) == 1
    assert (await cell.stop(timedelta(0))).graceful, "it is none of ours any more"
    await cell.destroy()
    assert await adopted.call(Verb.PROCESS, do("echo", value=2)) == 2
    await adopted.destroy()
    await following.close()


async def test_an_agent_that_dies_while_it_is_adopted_is_reported_as_it_ended(
    begin: Begin, isolation: ProcessIsolation, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for()
    cell = await begin(plan)
    await isolation.close()
    following = ProcessIsolation(SystemClock(), replace(site, epoch=2))
    attach = KeeperHolder.attach

    async def attach_and_kill(holder: KeeperHolder, unit: str, on_exit: OnExit) -> UnitStatus:
        exits: list[UnitExit] = []

        def note(how: UnitExit) -> None:
            on_exit(how)
            exits.append(how)

        status = await attach(holder, unit, note)
        assert status.exit is None
        os.kill(cell.handle["pid"], signal.SIGKILL)
        await until(lambda: bool(exits))
        return status

    monkeypatch.setattr(KeeperHolder, "attach", attach_and_kill)
    how = await following.adopt(cell.handle, plan, RecordingListener())
    assert isinstance(how, Exit)
    assert (how.outcome, how.signal) == (AttemptOutcome.SIGNAL, signal.SIGKILL)
    await following.close()


async def test_no_keeper_is_started_to_sweep_nothing(site: Site) -> None:
    level: Isolation = ProcessIsolation(SystemClock(), site)
    assert await level.sweep(keep=()) == 0
    assert site.directory is not None
    assert not (site.directory / "keeper").exists()
    await level.close()


async def test_without_a_home_nothing_outlives_the_manager(listener: RecordingListener) -> None:
    level = ProcessIsolation(SystemClock())
    assert not level.capabilities.outlives_manager
    plan = plan_for()
    cell = await level.start(plan, listener)
    pid = cell.handle["pid"]
    await level.close()
    assert not lives(pid)
    assert not listener.exits
