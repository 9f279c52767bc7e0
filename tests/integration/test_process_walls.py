"""What an agent in a process of its own can reach of the others: nothing."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import ordinary
import pytest
from machine_ground import end_keeper, keeper_of, kill_keeper_of, lacking, swept
from promise_ground import Fleet, box, opened

from ostler import AgentState, AttemptOutcome
from ostler.keeper import tree

pytestmark = pytest.mark.anyio

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with swept(tmp_path / "home") as found:
        yield found


@pytest.fixture
async def fleet(home: Path) -> AsyncIterator[Fleet]:
    async with opened(home) as found:
        yield found


async def test_an_agent_cannot_reach_into_its_manager_or_its_keeper(fleet: Fleet) -> None:
    one = await fleet.spawn()
    for pid in (os.getpid(), keeper_of(fleet.home)):
        found = await fleet.do(one, "pry", pid=pid)
        assert set(found.values()) == {"PermissionError"}, found
    itself = await fleet.do(one, "pry", pid=(await fleet.do(one, "know"))["pid"])
    assert itself["environ"] == itself["fd"] == "open", "so that the look is one"


def test_nor_can_one_where_nobody_is_root() -> None:
    """The same once more as an ordinary user: what keeps root's agents out are the rights that were taken from them."""
    if os.geteuid():
        pytest.skip("the test above ran as an ordinary user")
    here = Path(__file__)
    name = test_an_agent_cannot_reach_into_its_manager_or_its_keeper.__name__
    with ordinary.somebody() as user:
        argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(here.parents[2])]
        argv += ["--basetemp", str(user.place / "pytest"), f"{here}::{name}"]
        done = ordinary.run([user.python_with_packages(), "-B", *argv])
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_secret_of_the_manager_is_none_of_the_agents_business(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-of-the-manager")
    one = await fleet.spawn()
    seen = await fleet.do(one, "surroundings")
    assert "SOME_API_KEY" not in seen["environ"]
    for pid in fleet.tree(one) | {keeper_of(fleet.home)}:
        assert b"a-secret-of-the-manager" not in environment_of(pid)


async def test_only_stdio_and_the_channel_are_open(fleet: Fleet) -> None:
    await fleet.several(3)  # whose channels it could have inherited
    one = await fleet.spawn()
    seen = await fleet.do(one, "surroundings")
    kinds = [line.partition(" ")[2] for line in seen["files"]]
    assert kinds[0] == "/dev/null"
    assert [kind.partition(":")[0] for kind in kinds[1:3]] == ["pipe", "pipe"]
    assert "SOCK_STREAM" in kinds
    beyond = [kind for kind in kinds[3:] if kind not in {"SOCK_STREAM", "anon_inode:[eventpoll]"}]
    assert beyond == [], "and what its own loop needs"
    numbers = [line.partition(" ")[0] for line in seen["child"]]
    assert numbers == ["0", "1", "2"], f"its own children see more than stdio: {seen['child']}"


# --- strangers -------------------------------------------------------------------------------------


@pytest.fixture
def strangers() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for one in found:
        one.kill()
        one.wait()


def stranger(**more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, **more})


def stranger_with(pid: int) -> subprocess.Popen[bytes]:
    """Another program that got the pid of a dead agent. On a busy machine others take it first, many times."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            break
        program = stranger()
        if program.pid == pid:
            return program
        program.kill()
        program.wait()
    return lacking("this machine does not let us choose a pid")


async def test_a_stranger_with_the_pid_of_a_dead_agent_is_left_alone(
    home: Path, strangers: list[subprocess.Popen[bytes]]
) -> None:
    async with opened(home) as fleet:
        one = await fleet.spawn()
        pid = await fleet.pid(one)
        os.kill(pid, signal.SIGKILL)
        await fleet.comes_to(one, AgentState.FAILED)
        strangers.append(stranger_with(pid))
        assert (await fleet.manager.terminate(one.instance_id)).success
        assert strangers[0].poll() is None
    assert strangers[0].poll() is None


def wait_for(*pids: int) -> None:
    for pid in pids:
        os.waitpid(pid, 0)


@pytest.fixture
def heir() -> Iterator[None]:
    """What loses its parent comes to us, so that we can free its pid; who is the first of all may be slow at that."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("heir")
async def test_nor_is_one_whom_forged_files_and_an_old_record_name(
    home: Path, strangers: list[subprocess.Popen[bytes]]
) -> None:
    """Its keeper is gone too, so that all the next manager has is what was written down."""
    hour = timedelta(hours=1)
    async with opened(home, outlive=hour) as fleet:
        one = await fleet.spawn()
        pid, keeper = await fleet.pid(one), keeper_of(home)
        fleet.manager.keep_agents = True
    family = tree.children(keeper)
    os.kill(keeper, signal.SIGKILL)
    wait_for(keeper, *family)
    assert pid in family
    strangers.append(stranger_with(pid))
    forged = {"unit": box(one), "box": box(one), "pid": pid, "boot_id": tree.boot_id(), "exit": None}
    with (home / "keeper" / "exits.jsonl").open("a") as file:
        file.write(f"{json.dumps(forged)}\nno line of ours\n")
    for name in ("pid", "keeper.pid", f"{box(one)}.pid"):
        (home / "keeper" / name).write_text(f"{pid}\n")
    async with opened(home, outlive=hour) as fleet:
        await fleet.comes_to(one, AgentState.FAILED)
        assert (await fleet.outcome(one))[0] in {AttemptOutcome.LOST, AttemptOutcome.UNKNOWN}
        assert (await fleet.manager.terminate(one.instance_id)).success
        assert strangers[0].poll() is None
        keeper = keeper_of(home)
    end_keeper(home)
    wait_for(keeper)
    assert strangers[0].poll() is None


async def test_nor_one_that_carries_the_mark_of_another_home(
    home: Path, tmp_path: Path, strangers: list[subprocess.Popen[bytes]]
) -> None:
    async with opened(tmp_path / "other") as other, opened(home) as fleet:
        theirs, one = await other.spawn(), await fleet.spawn()
        strangers += [stranger(OSTLER_MARK=mark) for mark in ("0123456789abcdef:", f"{'f' * 16}:{box(one)}")]
        kill_keeper_of(home)
        await fleet.comes_to(one, AgentState.FAILED)
        again = await fleet.spawn()
        assert await fleet.do(again, "echo", value=1) == 1, "under a new keeper, which has swept"
        assert await other.do(theirs, "echo", value=1) == 1
        assert [found.poll() for found in strangers] == [None, None]


_LOOKED_AT = """
import asyncio, ctypes, sys
import ostler
from ostler.isolation.process import launch
from ostler.keeper import protocol
from ostler.lifecycle import open as opening

def shown():
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE

def told(module, name, kind):
    real = getattr(module, name)
    def noted(*args):
        before, found = shown(), real(*args)  # raises where no keeper is
        print(kind, before, flush=True)
        return found
    setattr(module, name, noted)

told(opening.HomeLock, "take", "lock")
told(protocol, "connect", "keeper")
told(launch, "start", "start")

async def main():
    async with ostler.open(sys.argv[1]) as manager:
        print("opened", shown(), flush=True)
        if len(sys.argv) > 2:
            spec = ostler.CommandSpec(argv=("true",))
            run = manager.registry.register(spec, name="run")
            options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)
            await manager.spawn(ostler.SpawnRequest(agent_definition_id=run.id, options=options))

asyncio.run(main())
"""


def _looked_at(home: Path, *more: str) -> list[str]:
    command = [sys.executable, "-c", _LOOKED_AT, str(home), *more]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")


def test_a_program_is_closed_before_anybody_could_look_into_it(home: Path) -> None:
    assert _looked_at(home)[:2] == ["lock 1", "opened 1"], "who has no such agents is left alone"
    said = _looked_at(home, "spawn")
    assert said[:2] == ["lock 1", "opened 1"]
    assert {line.split()[1] for line in said[2:] if line} == {"0"}, "before a keeper is there"
    (home / "keeper" / "keeper.sock").touch()  # agents of an earlier manager may be there
    assert {line.split()[1] for line in _looked_at(home) if line} == {"0"}, "from the lock on"
