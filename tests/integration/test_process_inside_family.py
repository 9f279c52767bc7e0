"""What an agent's process does with processes of its own, and how it takes its leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inside_agents import load
from inside_ground import Template, until

__all__ = ["load"]

_MODULE = """
import asyncio, atexit, multiprocessing, os, signal, subprocess, sys, tempfile, time
from ostler.agents import Agent
from ostler.errors import AgentExecutionError, AgentGoneError

early = open("early.txt", "a")
shared = tempfile.TemporaryDirectory(dir=".")
atexit.register(lambda: print("of the module"))

def nap():
    time.sleep(30)

class Mine(Agent):
    async def process(self, request):
        return await getattr(self, request["do"])(request)
    async def echo(self, request):
        return request["value"]
    async def end_a_child(self, request):
        child = multiprocessing.get_context("fork").Process(target=nap)
        child.start()
        await asyncio.sleep(0.05)
        child.terminate()
        await asyncio.to_thread(child.join, 10)
        return child.exitcode
    async def pool(self, request):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, 2, -3])
    async def come_back(self, request):
        self.child = os.fork()
        if self.child == 0 and request.get("raises"):
            raise ValueError("of the child")
        return "child" if self.child == 0 else self.child
    async def leave_a_child(self, request):
        self.child = multiprocessing.get_context("fork").Process(target=nap)
        self.child.start()
        return self.child.pid
    async def leave_a_full_pipe(self, request):
        self.program = subprocess.Popen(["sleep", "30"], stdin=subprocess.PIPE)
        self.pipe = os.fdopen(os.dup(self.program.stdin.fileno()), "wb", buffering=1_000_000)
        self.pipe.write(bytes(500_000))
        return self.program.pid
    async def stray_exit(self, request):
        async def leave():
            if os.fork() == 0:
                sys.exit(3)
        self.task = asyncio.create_task(leave())
        await asyncio.sleep(0.1)
        return os.waitstatus_to_exitcode(os.wait()[1])
    async def gone(self, request):
        raise AgentGoneError("as told")
    async def odd_error(self, request):
        raise AgentExecutionError("odd", exception_type=5, stack_trace=[1])
    async def deep(self, request):
        sys.setrecursionlimit(20_000)
        value = []
        for _ in range(request["depth"]):
            value = [value]
        return value
    async def write(self, request):
        self.file = open("late.txt", "w")
        for one in (early, self.file):
            one.write("not lost")
        atexit.register(lambda: print("at exit"))
        return None
"""


@pytest.fixture
def agent(load: Callable[..., Template], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    template = load(_MODULE)
    assert template.answer["forks"] is True, template.answer["why"]
    return template.start("Mine")


def test_a_child_can_be_ended_without_ending_the_agent(agent: Any) -> None:
    """Both have the handler of the agent and the socket by which it wakes the loop."""
    for _ in range(2):
        assert agent.ask({"do": "end_a_child"})["ok"] == -15
    assert agent.ask({"do": "pool"})["ok"] == [1, 2, 3]
    assert agent.ask({"do": "echo", "value": "here"})["ok"] == "here"


def _is_dead(state: Path) -> bool:
    return state.read_text().split()[2] == "Z"


@pytest.mark.parametrize("raises", [False, True])
def test_a_child_that_comes_back_to_the_loop_says_nothing(agent: Any, *, raises: bool) -> None:
    for _ in range(2):
        child = agent.ask({"do": "come_back", "raises": raises})["ok"]
        assert isinstance(child, int)
        state = Path(f"/proc/{child}/stat")
        until(partial(_is_dead, state))
    assert agent.ask({"do": "echo", "value": "here"})["ok"] == "here"
    agent.tell({"t": "stop"})
    assert agent.wait() == 0
    assert "came back to the agent's loop" in agent.output()


def test_an_agent_may_raise_what_it_likes(agent: Any) -> None:
    gone = agent.ask({"do": "gone"})
    assert "gone" not in gone
    assert gone["error"]["message"] == "AgentGoneError: as told"
    error = agent.ask({"do": "odd_error"})["error"]
    assert (error["message"], error["exception_type"], error["stack_trace"]) == ("odd", "5", "[1]")


def test_what_the_other_side_could_not_read_is_an_error_of_the_agent(agent: Any) -> None:
    error = agent.ask({"do": "deep", "depth": 600})["error"]
    assert "nested" in error["message"]
    assert agent.ask({"do": "echo", "value": "here"})["ok"] == "here"


def test_an_orderly_end_loses_nothing(agent: Any, tmp_path: Path) -> None:
    agent.ask({"do": "write"})
    agent.tell({"t": "stop"})
    assert agent.wait() == 0
    assert agent.output() == "at exit\n"
    assert [(tmp_path / name).read_text() for name in ("early.txt", "late.txt")] == ["not lost"] * 2


@pytest.mark.parametrize("what", ["leave_a_child", "leave_a_full_pipe"])
def test_what_would_hold_up_its_end_does_not(agent: Any, what: str) -> None:
    """Nobody waits for a child without end, nor for a pipe that nobody reads."""
    child = agent.ask({"do": what})["ok"]
    agent.tell({"t": "stop"})
    began = time.monotonic()
    assert agent.wait() == 0
    assert time.monotonic() - began < 60
    os.kill(child, signal.SIGKILL)


def test_the_end_of_one_takes_nothing_from_its_siblings(
    load: Callable[..., Template], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    template = load(_MODULE)
    one, other = template.start("Mine"), template.start("Mine")
    one.tell({"t": "stop"})
    assert one.wait() == 0
    assert one.output() == ""
    assert other.ask({"do": "echo", "value": "here"})["ok"] == "here"
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("tmp")]) == 1


def test_a_child_that_wants_to_exit_does(agent: Any) -> None:
    assert agent.ask({"do": "stray_exit"})["ok"] == 3
    agent.tell({"t": "stop"})
    assert agent.wait() == 0
    assert agent.output() == ""


def test_a_script_that_starts_a_manager_when_it_is_loaded_is_told_what_to_do(
    load: Callable[..., Template], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or its template would start a manager, which starts a template."""
    monkeypatch.setenv("OSTLER_MARK", f"token:template-{os.urandom(3).hex()}")
    home = tmp_path / "home"
    text = f"import asyncio, ostler\nasync def main():\n    async with ostler.open({str(home)!r}): pass\n"
    template = load(text + "asyncio.run(main())\n", main=True)
    assert 'if __name__ == "__main__":' in template.answer["failed"]
    assert not home.exists()
