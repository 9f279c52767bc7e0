"""What a program hands down without wanting to: to its keeper its signals, to what it forks its copies of our files."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import SOURCE, Home, is_alive, keeper_argv, wait_until

import ostler

#: A program that has made itself deaf, as one does that waits for its signals by `sigwait`, and then starts a keeper.
DEAF = (
    "import os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    "for one in (signal.SIGCHLD, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)

#: A manager that has a child from before it was killed, with a copy of all that it had open.
FORKED = (
    "import os, sys, time\n"
    "sys.path[:0] = sys.argv[2:]\n"
    "from pathlib import Path\n"
    "from keeper_client import Manager\n"
    "manager = Manager(Path(sys.argv[1]), lease=0)\n"
    "unit = manager.start('a.1', ['sleep', '1000'])['pid']\n"
    "child = os.fork()\n"
    "if child: print(unit, child, flush=True)\n"
    "time.sleep(60)\n"
)
#: The same as users have it, with a pool of workers; when it is asked to it closes, while its worker lives.
POOL = """
import asyncio, multiprocessing, os, sys, time
from datetime import timedelta
import ostler

class Mine(ostler.Agent):
    async def initialize(self, context): pass
    async def process(self, request): return os.getpid()

options = ostler.AgentSpawnOptions(isolation_level=ostler.IsolationLevel.PROCESS)

async def main():
    settings = ostler.LifecycleSettings(outlive=timedelta(0))
    async with ostler.open(sys.argv[1], settings=settings) as manager:
        mine = manager.registry.register(Mine, name="mine")
        one = await manager.spawn(ostler.SpawnRequest(agent_definition_id=mine.id, options=options))
        agent = await manager.process(one.instance_id, None)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        print(agent, worker.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    print("closed", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


class DeafHome(Home):
    def launch(self, change: str = "") -> None:
        assert not change
        argv = [sys.executable, "-I", "-S", "-c", DEAF, *keeper_argv(self.directory)]
        subprocess.run(argv, stdin=subprocess.DEVNULL, check=True, timeout=60)


@pytest.fixture
def deaf_home(tmp_path: Path) -> Iterator[Home]:
    made = DeafHome(tmp_path / "keeper")
    yield made
    made.end()


def test_a_deaf_program_starts_a_keeper_that_hears(deaf_home: Home, tmp_path: Path) -> None:
    manager = deaf_home.manager(lease=1000)
    manager.start("a.1", ["/bin/sh", "-c", "exit 3"])
    assert manager.exit_of("a.1", 5)["code"] == 3
    plain = Home(tmp_path / "plain")
    assert manager.about["title"] == plain.manager().about["title"]
    plain.end()
    os.kill(manager.about["pid"], signal.SIGTERM)
    wait_until(lambda: not is_alive(manager.about["pid"]))
    deaf_home.launch()


def test_a_copy_of_the_line_is_no_manager(tmp_path: Path) -> None:
    home = Home(tmp_path / "keeper")
    here = str(Path(__file__).parent)
    victim = subprocess.Popen(
        [sys.executable, "-c", FORKED, str(home.directory), SOURCE, here], stdout=subprocess.PIPE, text=True
    )
    with victim:
        assert victim.stdout is not None
        unit, child = map(int, victim.stdout.readline().split())
        victim.kill()
        try:
            wait_until(lambda: not is_alive(unit))
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
    wait_until(lambda: not (home.directory / "keeper.sock").exists())
    home.launch()
    home.end()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_program_has_forked_keeps_neither_its_home_nor_its_agents(tmp_path: Path, how: str) -> None:
    (tmp_path / "program.py").write_text(POOL)
    argv = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "home")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdin is not None
        agent, worker = map(int, victim.stdout.readline().split())
        try:
            if how == "killed":
                victim.kill()
                victim.wait(60)  # its files are closed one after the other, the lock of the home perhaps last
            else:
                victim.stdin.write("now\n")
                victim.stdin.flush()
                assert victim.stdout.readline() == "closed\n"
            wait_until(lambda: not is_alive(agent))
            assert is_alive(worker)
            asyncio.run(_open(tmp_path / "home"))
        finally:
            os.kill(worker, signal.SIGKILL)
            victim.kill()


async def _open(home: Path) -> None:
    async with ostler.open(home):
        pass
