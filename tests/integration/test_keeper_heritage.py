"""What a program hands down without wanting to: to its keeper its signals, to what it forks its copies of our files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import Home, is_alive, keeper_argv, wait_until

#: A program that has made itself deaf, as one does that waits for its signals by `sigwait`, and then starts a keeper.
DEAF = (
    "import os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    "for one in (signal.SIGCHLD, signal.SIGTERM): signal.signal(one, signal.SIG_IGN)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


class DeafHome(Home):
    def launch(self) -> None:
        argv = [sys.executable, "-I", "-S", "-c", DEAF, *keeper_argv(self.directory)]
        subprocess.run(argv, stdin=subprocess.DEVNULL, check=True, timeout=30)


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
    assert manager.about["boxes"] == plain.manager().about["boxes"]
    plain.end()
    os.kill(manager.about["pid"], signal.SIGTERM)
    wait_until(lambda: not is_alive(manager.about["pid"]))
    deaf_home.launch()
