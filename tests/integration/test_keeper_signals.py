"""Limits that a keeper holds: by control groups where there are any, by looking and signals where there are none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from keeper_client import TREES, Home, Manager, is_alive, marked, wait_until

from ostler.keeper import tree

PYTHON = [sys.executable, "-I", "-S", "-c"]
MEGABYTE = 1024 * 1024
EATER = "import time\nheld = []\nwhile True: held.append(bytearray(1 << 20)); time.sleep(0.001)"
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        print('up', flush=True); time.sleep(1000)\n"
    "    os._exit(0)\n"
    "time.sleep(1000)\n"
)


@pytest.fixture(scope="module", params=[None, TREES], ids=["best", "trees"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("home") / "keeper", request.param)
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
    assert (record["signal"], record["oom"], record["by"]) == (signal.SIGKILL, False, "")


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_a_daemon_goes_with_the_rest(manager: Manager, home: Home, grace: float) -> None:
    manager.start("a.1", [*PYTHON, DAEMON])
    log = manager.log_of("a.1")
    wait_until(lambda: log.exists() and "up" in log.read_text())
    assert manager.stop("a.1", grace)["left"] == []
    assert not marked(f"{home.token}:a.1")


def test_frozen_and_stopped(manager: Manager) -> None:
    manager.start("a.1", ["/bin/sh", "-c", "while :; do :; done"])
    manager.ask("freeze", cell="a.1")
    manager.ask("thaw", cell="a.1")
    manager.ask("freeze", cell="a.1")
    assert manager.stop("a.1") == {"graceful": False, "left": []}
    assert manager.exit_of("a.1")["signal"] == signal.SIGKILL


def test_many_deaths_share_one_look(manager: Manager) -> None:
    numbers = [manager.say_start(f"u{number}.1", ["sleep", "1000"]) for number in range(120)]
    pids = [manager.hear(number)["pid"] for number in numbers]
    before = _cpu_seconds(manager)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for number in range(120):
        assert manager.exit_of(f"u{number}.1")["left"] == []
    assert _cpu_seconds(manager) - before < 5


def _cpu_seconds(manager: Manager) -> float:
    status = tree.stat(manager.about["pid"])
    assert status is not None
    return status.cpu_seconds
