"""A manager that is killed in the middle of everything, and the next one that finds it all again."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from isolation.ground import RecordingListener, until

from ostler.agents import Agent, AgentKind, AgentManifest
from ostler.clock import SystemClock
from ostler.errors import AgentGoneError
from ostler.isolation import Cell, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits

pytestmark = pytest.mark.anyio

COUNT = 12
#: A program as users write them: its agents are its own classes, and it is no module that anybody could import.
PROGRAM = """
import asyncio, os, sys
from datetime import timedelta
from pathlib import Path
from uuid import UUID
from ostler.agents import Agent, AgentKind, AgentManifest
from ostler.isolation import Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.spawn import ResourceLimits
from ostler.clock import SystemClock

HOME, COUNT = Path(sys.argv[1]), int(sys.argv[2])

class Mine(Agent):
    times = 0

    def initialize(self, context):
        self.context = context

    async def process(self, request):
        self.times += 1
        self.context.signal("began")
        while not (HOME.parent / "go").exists():
            await asyncio.sleep(0.005)
        if request == 0:
            os._exit(9)
        return [request, self.times, os.getpid()]

class Nobody:
    def on_message(self, attempt, message): pass
    async def on_question(self, attempt, wait): raise NotImplementedError
    def on_report(self, attempt, calls, questions): pass
    def on_exit(self, attempt, how): print("exited", how, flush=True)

async def main():
    level = ProcessIsolation(SystemClock(), Site(directory=HOME, outlive=timedelta(seconds=30), epoch=1))
    manifest = AgentManifest(id=UUID(int=1), name="mine", kind=AgentKind.PYTHON)
    async def life(number):
        plan = StartPlan(instance_id=UUID(int=number + 1), attempt=1, name="mine", manifest=manifest, maker=Mine,
                         limits=ResourceLimits(), context={})
        await level.prepare(plan)
        cell = await level.start(plan, Nobody())
        await cell.call(Verb.INITIALIZE)
        asyncio.ensure_future(cell.call(Verb.PROCESS, number, call_id=UUID(int=1000 + number)))
        return cell
    cells = await asyncio.gather(*(life(number) for number in range(COUNT)))
    await asyncio.gather(*(cell.ping() for cell in cells))
    print("ready", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "home"), str(COUNT)],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def plan_of(number: int) -> StartPlan:
    """What a record tells of it; the class is not known here, and not needed."""
    return StartPlan(
        instance_id=UUID(int=number + 1),
        attempt=1,
        name="mine",
        manifest=AgentManifest(id=UUID(int=1), name="mine", kind=AgentKind.PYTHON),
        maker=Agent,
        limits=ResourceLimits(),
        context={},
    )


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_all_that_lived_is_found_and_every_call_is_answered_once(
    victim: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert victim.stdout is not None
    line = await asyncio.to_thread(victim.stdout.readline)
    assert line == "ready\n"
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    level = ProcessIsolation(SystemClock(), Site(directory=tmp_path / "home", outlive=timedelta(seconds=30), epoch=2))
    listener = RecordingListener()
    found = await asyncio.gather(*(level.adopt(None, plan_of(number), listener) for number in range(COUNT)))
    cells = [cell for cell in found if isinstance(cell, Cell)]
    assert len(cells) == COUNT
    await listener.report(COUNT)
    assert {call_id for calls, _ in listener.reports for call_id in calls} == {UUID(int=1000 + n) for n in range(COUNT)}
    calls = [
        asyncio.ensure_future(cell.call(Verb.PROCESS, call_id=UUID(int=1000 + number)))
        for number, cell in enumerate(cells)
    ]
    (tmp_path / "go").touch()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    pids = [cell.handle["pid"] for cell in cells]
    assert answers[1:] == [[number, 1, pid] for number, pid in enumerate(pids)][1:]
    await until(lambda: bool(listener.exits))
    assert [(how.outcome, how.code) for how in listener.exits] == [(AttemptOutcome.EXIT_CODE, 9)]
    assert await level.sweep({(plan_of(number).instance_id, 1) for number in range(COUNT)}) == 0
    for cell in cells:
        await cell.destroy()
    await level.close()
    assert not any(lives(pid) for pid in pids)


async def test_without_time_to_live_on_nobody_does(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("seconds=30", "seconds=0"))
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "home"), "3"]
    victim = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert await victim.stdout.readline() == b"ready\n"
    victim.kill()
    await victim.communicate()

    def left() -> list[str]:
        marks = (path for path in Path("/proc").glob("[0-9]*/environ"))
        return [str(path) for path in marks if _marked(path, tmp_path / "home" / "keeper" / "token")]

    await until(lambda: not left())


def _marked(environ: Path, token: Path) -> bool:
    try:
        return f"OSTLER_MARK={token.read_text()}:".encode() in environ.read_bytes()
    except OSError:
        return False


SAYING = """
import os, time
from ostler.agents import Agent

class Talker(Agent):
    def initialize(self, context):
        self.context = context
    async def process(self, request):
        for number in range(request["before"]):
            self.context.signal("before")
        while not os.path.exists(request["go"]):
            time.sleep(0.005)
        for number in range(request["after"]):
            self.context.signal("after")
        open(request["go"] + ".said", "w").close()
        time.sleep(60)
"""


async def test_what_an_agent_said_is_heard_though_it_dies_before_it_can_say_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks its loop: it says something while there is no manager, and never answers the next one's hello."""
    (tmp_path / "saying_agent.py").write_text(SAYING)
    monkeypatch.syspath_prepend(tmp_path)
    maker = importlib.import_module("saying_agent").Talker
    first, second = (
        ProcessIsolation(SystemClock(), Site(directory=tmp_path / "home", outlive=timedelta(seconds=30), epoch=epoch))
        for epoch in (1, 2)
    )
    plan = replace(plan_of(0), maker=maker)
    early, late = RecordingListener(), RecordingListener()
    await first.prepare(plan)
    cell = await first.start(plan, early)
    await cell.call(Verb.INITIALIZE)
    request = {"before": 3, "after": 4, "go": str(tmp_path / "go")}
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, request, call_id=UUID(int=7)))
    await until(lambda: len(early.signals) == 3)
    cell.ack(message=3)
    await first.close()
    await asyncio.wait((call,))
    assert isinstance(call.exception(), AgentGoneError)
    (tmp_path / "go").touch()
    await until((tmp_path / "go.said").exists)
    found = await second.adopt(None, plan, late)
    assert isinstance(found, Cell)
    assert late.numbers == [], "it may yet say them again, in order with others"
    os.kill(found.handle["pid"], signal.SIGKILL)
    await until(lambda: bool(late.exits))
    # It never read that the first three are committed; the manager's listener drops what it has.
    assert late.numbers == [1, 2, 3, 4, 5, 6, 7]
    assert late.exits[0].signal == signal.SIGKILL
    await found.destroy()
    await second.close()
    monkeypatch.delitem(sys.modules, "saying_agent")
