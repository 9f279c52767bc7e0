"""A keeper of an ordinary user, who may make no control groups: everything works by process trees."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import ordinary
import pytest
from keeper_client import Home, is_alive, marked, wait_until

#: A daemon that leaves its session, its parents and its environment.
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        print(os.getpid(), flush=True)\n"
    "        os.execve('/bin/sleep', ['sleep', '1000'], {})\n"
    "    os._exit(0)\n"
    "time.sleep(1000)\n"
)


@pytest.fixture
def home() -> Iterator[Home]:
    with ordinary.somebody() as user:
        home = user.home()
        yield home
        home.end()


@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_a_stop_ends_the_whole_tree(home: Home, grace: float) -> None:
    manager = home.manager()
    if manager.about["title"] != "process trees":
        pytest.skip("this ordinary user may make control groups")
    python = f"/usr/bin/python{sys.version_info.major}"
    manager.start("a.1", [python, "-I", "-S", "-c", DAEMON])
    log = manager.log_of("a.1")
    wait_until(lambda: log.exists() and log.read_text().strip())
    daemon = int(log.read_text().split()[-1])
    manager.ask("freeze", cell="a.1")
    manager.ask("thaw", cell="a.1")
    assert manager.ask("usage", cell="a.1")["threads"] == 2
    assert manager.stop("a.1", grace)["left"] == []
    assert not is_alive(daemon)
    assert not marked(f"{home.token}:a.1")
