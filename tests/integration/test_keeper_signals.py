"""Limits that a keeper holds: by control groups where there are any, by looking and signals where there are none."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import Home, Manager, is_alive, wait_until

from ostler.keeper.tree import marked

PYTHON = [sys.executable, "-I", "-S", "-c"]
MEGABYTE = 1024 * 1024
EATER = "import time\nheld = []\nwhile True: held.append(bytearray(1 << 20)); time.sleep(0.001)"
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        print('up', flush=True); time.sleep(1000)\n"
    "    os._exit(0)\n"
    "time.sleep(1000)\n"
)


@pytest.fixture(scope="module", params=[None, "signals"], ids=["found", "signals"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("home") / "keeper", boxes=request.param)
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Iterator[Manager]:
    yield home.manager()
    home.clear()


def test_one_that_takes_too_much_memory_ends_alone(manager: Manager) -> None:
    beside = manager.start("beside.1", ["sleep", "1000"], limits={"memory_bytes": 64 * MEGABYTE})
    manager.start("eater.1", [*PYTHON, EATER], limits={"memory_bytes": 64 * MEGABYTE})
    record = manager.exit_of("eater.1")
    assert (record["signal"], record["oom"]) == (signal.SIGKILL, True)
    assert is_alive(beside["pid"])


def test_a_kill_of_another_kind_is_not_taken_for_it(manager: Manager) -> None:
    manager.start("a.1", ["/bin/sh", "-c", "kill -KILL $$"], limits={"memory_bytes": 64 * MEGABYTE})
    record = manager.exit_of("a.1")
    assert (record["signal"], record["oom"], record["by"]) == (signal.SIGKILL, False, None)


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_a_daemon_goes_with_the_rest(manager: Manager, home: Home, tmp_path: Path, grace: float) -> None:
    log = tmp_path / "log"
    manager.start("a.1", [*PYTHON, DAEMON], log=str(log))
    wait_until(lambda: log.exists() and "up" in log.read_text())
    assert manager.stop("a.1", grace)["left"] == []
    assert not marked(f"{home.token}:a.1")


def test_frozen_and_stopped(manager: Manager) -> None:
    manager.start("a.1", ["/bin/sh", "-c", "while :; do :; done"])
    manager.ask("freeze", box="a.1")
    manager.ask("thaw", box="a.1")
    manager.ask("freeze", box="a.1")
    assert manager.stop("a.1") == {"graceful": False, "left": []}
    assert manager.exit_of("a.1")["signal"] == signal.SIGKILL
