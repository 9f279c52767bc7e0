"""Promises of the keeper that the contract suite does not reach."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from isolation.ground import RecordingListener, until
from machine_ground import keeper_of, kill_keeper_of

from ostler.agents import Agent, AgentContext, AgentKind, AgentManifest, CommandSpec
from ostler.agents.commandspec import PromptBy
from ostler.clock import SystemClock
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation.base import Cell, Isolation, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.keeper import tree
from ostler.keeper.protocol import connect
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits

pytestmark = pytest.mark.anyio
#: Leaves its session, its parent and its environment, and says its pid.
DAEMON = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
os.execve("/bin/sleep", ["sleep", "1000"], {})
"""


class Forker(Agent):
    """Starts a daemon that leaves its session, its parent and its environment."""

    async def initialize(self, context: AgentContext) -> None:
        self._context = context

    async def process(self, request: str) -> object:
        if request == "daemon":
            program = await asyncio.create_subprocess_exec(sys.executable, "-c", DAEMON, stdout=asyncio.subprocess.PIPE)
            assert program.stdout is not None
            return int(await program.stdout.readline())
        if request == "memory":
            hoard = []
            while True:
                hoard.append(bytearray(8 << 20))
        if request == "exit":
            os._exit(7)
        if request == "reach keeper":
            sock = connect(self._context.env["KEEPER"])
            sock.setblocking(True)
            return sock.recv(4096).decode()
        return os.getpid()


def alive(pid: int) -> bool:
    return tree.living(pid) is not None


def plan_of(tmp_path: Path, **more: object) -> StartPlan:
    fields = {
        "instance_id": uuid4(), "attempt": 1, "name": "x", "maker": Forker, "limits": ResourceLimits(), "context": {},
        "manifest": AgentManifest(id=UUID(int=1), name="F", kind=AgentKind.PYTHON, source=f"{__name__}:Forker"),
        "workdir": tmp_path / "w",
    }  # fmt: skip
    return StartPlan(**{**fields, **more})  # type: ignore[arg-type]


def command_plan(tmp_path: Path, *argv: str, **more: object) -> StartPlan:
    manifest = AgentManifest(
        id=UUID(int=2),
        name="C",
        kind=AgentKind.COMMAND,
        command=CommandSpec(argv=argv, **more),  # type: ignore[arg-type]
    )
    return plan_of(tmp_path, manifest=manifest)


@pytest.fixture(params=["cgroup2", "cgroup1", "trees"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OSTLER_KEEPER_GROUPS", request.param)
    return str(request.param)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Isolation]]:
    made: list[Isolation] = []

    def make(epoch: int = 1, outlive: float = 30) -> Isolation:
        site = Site(directory=tmp_path / "home", outlive=timedelta(seconds=outlive), epoch=epoch)
        made.append(ProcessIsolation(SystemClock(), site))
        return made[-1]

    yield make
    last = make(epoch=1000)
    await last.sweep(keep=())
    for isolation in made:
        await isolation.close()


async def start(isolation: Isolation, plan: StartPlan, listener: RecordingListener) -> Cell:
    await isolation.prepare(plan)
    cell = await isolation.start(plan, listener)
    await cell.call(Verb.INITIALIZE)
    return cell


@pytest.mark.usefixtures("groups")
async def test_stop_ends_a_daemon_with_an_empty_environment(make: Callable[..., Isolation], tmp_path: Path) -> None:
    cell = await start(make(), plan_of(tmp_path), RecordingListener())
    pid = await cell.call(Verb.PROCESS, "daemon")
    assert alive(pid)
    report = await cell.stop(timedelta(seconds=5))
    assert report.left_behind is None
    assert not alive(pid)
    await cell.destroy()


@pytest.mark.usefixtures("groups")
async def test_what_a_dead_agent_left_is_gone_before_its_end_is_told(
    make: Callable[..., Isolation], tmp_path: Path
) -> None:
    listener = RecordingListener()
    cell = await start(make(), plan_of(tmp_path), listener)
    pid = await cell.call(Verb.PROCESS, "daemon")
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, "exit")
    await until(lambda: bool(listener.exits))
    assert not alive(pid)
    assert listener.exits[0].code == 7
    await cell.destroy()


@pytest.mark.usefixtures("groups")
async def test_a_killed_keeper_takes_its_agents_along_and_the_next_one_sweeps(
    make: Callable[..., Isolation], tmp_path: Path
) -> None:
    isolation, listener = make(), RecordingListener()
    cell = await start(isolation, plan_of(tmp_path), listener)
    daemon = await cell.call(Verb.PROCESS, "daemon")
    agent = await cell.call(Verb.PROCESS, "pid")
    kill_keeper_of(tmp_path / "home")
    await until(lambda: bool(listener.exits))
    assert listener.exits[0].outcome is AttemptOutcome.LOST
    assert not alive(agent)
    assert not alive(daemon)
    again = await start(isolation, plan_of(tmp_path), listener)
    assert await again.call(Verb.PROCESS, "pid") != agent
    await again.destroy()


@pytest.mark.usefixtures("groups")
async def test_memory_is_told_apart(make: Callable[..., Isolation], tmp_path: Path) -> None:
    listener = RecordingListener()
    cell = await start(make(), plan_of(tmp_path, limits=ResourceLimits(max_memory_mb=128)), listener)
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, "memory")
    await until(lambda: bool(listener.exits))
    assert listener.exits[0].outcome is AttemptOutcome.OOM
    await cell.destroy()


async def test_no_agent_speaks_to_the_keeper(make: Callable[..., Isolation], tmp_path: Path) -> None:
    env = {"KEEPER": str(tmp_path / "home" / "keeper")}
    cell = await start(make(), plan_of(tmp_path, env=env), RecordingListener())
    assert "no agent may speak to its keeper" in await cell.call(Verb.PROCESS, "reach keeper")
    await cell.destroy()


async def test_a_manager_that_hangs_loses_its_lease_with_the_connection_open(
    make: Callable[..., Isolation], tmp_path: Path
) -> None:
    listener = RecordingListener()
    cell = await start(make(outlive=4), plan_of(tmp_path), listener)
    agent = await cell.call(Verb.PROCESS, "pid")
    await asyncio.sleep(5)  # longer than the lease, which is renewed
    assert alive(agent)
    end = time.monotonic() + 60
    while alive(agent):
        assert time.monotonic() < end
        time.sleep(0.05)  # noqa: ASYNC251 - this manager hangs
    await until(lambda: bool(listener.exits))
    assert listener.exits[0].detail == "it was stopped because no manager came back for it in time"


async def test_a_removed_home_ends_the_agents(make: Callable[..., Isolation], tmp_path: Path) -> None:
    cell = await start(make(), plan_of(tmp_path), RecordingListener())
    agent = await cell.call(Verb.PROCESS, "pid")
    shutil.rmtree(tmp_path / "home")
    await until(lambda: not alive(agent))


@pytest.mark.usefixtures("groups")
async def test_a_command_runs_and_answers(make: Callable[..., Isolation], tmp_path: Path) -> None:
    cell = await start(
        make(),
        command_plan(tmp_path, "sh", "-c", "cat; echo done; exit 0", prompt_by=PromptBy.STDIN),
        RecordingListener(),
    )
    answer = await cell.call(Verb.PROCESS, "hello")
    assert answer["exit_code"] == 0
    assert answer["output"] == "hellodone\n"
    with pytest.raises(AgentExecutionError):
        await (await start(make(2), command_plan(tmp_path, "/bin/false"), RecordingListener())).call(Verb.PROCESS, "x")


@pytest.mark.usefixtures("groups")
async def test_a_command_is_adopted_and_its_answer_is_kept(make: Callable[..., Isolation], tmp_path: Path) -> None:
    first, call_id, listener = make(), uuid4(), RecordingListener()
    began, go = tmp_path / "began", tmp_path / "go"
    plan = command_plan(tmp_path, "sh", "-c", f"touch {began}; until [ -e {go} ]; do sleep 0.01; done; echo late")
    cell = await start(first, plan, RecordingListener())
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x", call_id=call_id))
    await until(began.exists)
    await first.close()
    with pytest.raises(AgentGoneError):
        await call
    second = make(2)
    found = await second.adopt(None, plan, listener)
    assert isinstance(found, Cell)
    assert (await listener.report())[0] == {call_id: Verb.PROCESS}
    go.touch()
    answer = await found.call(Verb.PROCESS, call_id=call_id)
    assert answer["output"] == "late\n"
    await found.destroy()


@pytest.mark.usefixtures("groups")
async def test_a_frozen_command_is_stopped_with_its_tree(make: Callable[..., Isolation], tmp_path: Path) -> None:
    isolation = make()
    began = tmp_path / "began"
    plan = command_plan(tmp_path, "sh", "-c", f"sleep 600 & setsid sleep 600 & touch {began}; wait")
    cell = await start(isolation, plan, RecordingListener())
    call = asyncio.ensure_future(cell.call(Verb.PROCESS, "x"))
    await until(began.exists)
    await cell.freeze()
    report = await cell.stop(timedelta(0))
    assert not report.graceful
    assert report.left_behind is None
    with pytest.raises(AgentGoneError):
        await call
    await cell.destroy()


async def test_a_program_that_is_missing_is_a_sentence(make: Callable[..., Isolation], tmp_path: Path) -> None:
    plan = command_plan(tmp_path, "./nothing-here")
    cell = await start(make(), plan, RecordingListener())
    with pytest.raises(AgentExecutionError, match="was not found"):
        await cell.call(Verb.PROCESS, "x")


async def test_an_older_manager_cannot_act(make: Callable[..., Isolation], tmp_path: Path) -> None:
    first = make(5)
    plan = plan_of(tmp_path)
    cell = await start(first, plan, RecordingListener())
    second = make(6)
    found = await second.adopt(None, plan, RecordingListener())
    assert isinstance(found, Cell)
    await until(lambda: cell._detached)  # type: ignore[attr-defined]  # noqa: SLF001
    with pytest.raises(AgentGoneError):
        await cell.call(Verb.PROCESS, "pid")
    assert await found.call(Verb.PROCESS, "pid") == found.handle["pid"]
    await found.destroy()


async def test_a_module_with_threads_gets_a_fresh_interpreter(make: Callable[..., Isolation], tmp_path: Path) -> None:
    import threaded_agent  # noqa: PLC0415 - at the top it would start its thread in the template of this module too

    isolation = make()
    plans = [plan_of(tmp_path, maker=threaded_agent.Threaded) for _ in range(2)]
    cells = [await start(isolation, plan, RecordingListener()) for plan in plans]
    answers = [await cell.call(Verb.PROCESS, 1) for cell in cells]
    assert answers[0] != answers[1]
    assert [cell.handle["pid"] for cell in cells] == [pid for _, pid in answers]
    for cell in cells:
        assert (await cell.stop(timedelta(seconds=5))).graceful
        await cell.destroy()


class Waiting:
    """Templates and the children that they forked ahead: the children of the keeper that are no agents."""

    def __init__(self, home: Path) -> None:
        self.keeper = keeper_of(home)
        self.cells: list[Cell] = []

    @property
    def agents(self) -> set[int]:
        return {cell.handle["pid"] for cell in self.cells}

    @property
    def others(self) -> list[int]:
        return sorted(pid for pid in set(tree.children(self.keeper)) - self.agents if alive(pid))

    async def both(self) -> tuple[int, int]:
        """The template and its child."""
        await until(lambda: len(self.others) == 2)
        template, child = self.others
        return template, child


@pytest.mark.usefixtures("groups")
async def test_children_that_wait_for_their_order(make: Callable[..., Isolation], tmp_path: Path) -> None:
    """A dead spare or template costs no start; starts without a spare wait for their forks; nothing is left."""
    isolation = make()
    first = await start(isolation, plan_of(tmp_path), RecordingListener())
    waiting = Waiting(tmp_path / "home")
    cells = waiting.cells
    cells.append(first)
    template, dead = await waiting.both()
    os.kill(dead, signal.SIGKILL)
    await until(lambda: not alive(dead))
    cells.append(await start(isolation, plan_of(tmp_path), RecordingListener()))
    _, spare = await waiting.both()
    cells.append(await start(isolation, plan_of(tmp_path), RecordingListener()))
    assert cells[-1].handle["pid"] == spare
    cells += await asyncio.gather(*(start(isolation, plan_of(tmp_path), RecordingListener()) for _ in range(12)))
    assert len(waiting.agents) == 15
    os.kill(template, signal.SIGKILL)
    await until(lambda: not alive(template))
    cells.append(await start(isolation, plan_of(tmp_path), RecordingListener()))
    assert {await cell.call(Verb.PROCESS, "pid") for cell in cells} == waiting.agents
    await asyncio.gather(*(cell.destroy() for cell in cells))
    cells.clear()
    await until(lambda: len(waiting.others) <= 2)
