"""The stop ladder of a real keeper, against processes that do not want to end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_box_ground import KINDS
from keeper_client import Home, Manager, Refused, is_alive, marked, wait_until

PYTHON = [sys.executable, "-I", "-S", "-c"]
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
)
#: A daemon as daemons are made: out of its session, its parents dead.
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        print('up', flush=True); time.sleep(1000)\n"
    "    os._exit(0)\n"
    "time.sleep(1000)\n"
)
#: Never the same process for long.
FLEEING = (
    "import os, time\n"
    "print('up', flush=True)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    end = time.monotonic() + 60\n"
    "    while time.monotonic() < end:\n"
    "        if os.fork():\n            os._exit(0)\n"
    "time.sleep(1000)\n"
)


@pytest.fixture(scope="module", params=KINDS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home") / "keeper", request.param)
    yield home
    home.end()


@pytest.fixture
def manager(home: Home) -> Iterator[Manager]:
    yield home.manager()
    home.clear()


def start_up(manager: Manager, tmp_path: Path, code: str, unit: str = "a.1") -> int:
    """Started, and so far that it says so."""
    log = tmp_path / f"{unit}.log"
    pid: int = manager.start(unit, [*PYTHON, code], log=str(log))["pid"]
    wait_until(lambda: log.exists() and "up" in log.read_text())
    return pid


def nobody_is_left(home: Home, unit: str = "a.1") -> bool:
    return not marked(f"{home.token}:{unit}")


def test_one_that_hears_ends_by_itself(manager: Manager, tmp_path: Path) -> None:
    code = "import signal, time, os; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); print('up', flush=True)\n"
    start_up(manager, tmp_path, code + "time.sleep(1000)")
    assert manager.stop("a.1", 10.0) == {"graceful": True, "left": []}
    record = manager.exit_of("a.1")
    assert (record["code"], record["by"]) == (7, "stop")
    assert manager.stop("a.1", 10.0) == {"graceful": True, "left": []}
    assert manager.stop("nobody.1") == {"graceful": True, "left": []}


def test_one_that_ignores_it_is_killed_when_its_time_is_up(manager: Manager, tmp_path: Path) -> None:
    pid = start_up(manager, tmp_path, STUBBORN)
    began = time.monotonic()
    assert manager.stop("a.1", 0.2) == {"graceful": False, "left": []}
    assert 0.2 <= time.monotonic() - began < 60
    assert manager.exit_of("a.1")["signal"] == signal.SIGKILL
    assert not is_alive(pid)


def test_a_second_stop_can_only_hasten_the_first(manager: Manager, tmp_path: Path) -> None:
    start_up(manager, tmp_path, STUBBORN)
    first = manager.say("stop", name="a.1", grace=90)
    longer = manager.say("stop", name="a.1", grace=600)
    now = manager.say("stop", name="a.1", grace=0)
    began = time.monotonic()
    assert [manager.hear(number)["graceful"] for number in (first, longer, now)] == [False] * 3
    assert time.monotonic() - began < 60


def test_nothing_begins_in_a_box_that_is_being_stopped(manager: Manager, tmp_path: Path) -> None:
    start_up(manager, tmp_path, STUBBORN)
    stop = manager.say("stop", name="a.1", grace=60)
    with pytest.raises(Refused, match="being stopped"):
        manager.start("a.1.2", ["true"])
    manager.stop("a.1")
    manager.hear(stop)


def test_one_that_stands_still_hears_it_too(manager: Manager, tmp_path: Path) -> None:
    start_up(manager, tmp_path, "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)")
    assert manager.stop("a.1", 10.0) == {"graceful": True, "left": []}


def test_a_frozen_one_is_thawed_to_be_asked(manager: Manager, tmp_path: Path) -> None:
    start_up(manager, tmp_path, "import time; print('up', flush=True); time.sleep(1000)")
    manager.ask("freeze", cell="a.1")
    assert manager.stop("a.1", 10.0) == {"graceful": True, "left": []}
    assert manager.exit_of("a.1")["signal"] == signal.SIGTERM


@pytest.mark.parametrize("code", [DAEMON, FLEEING], ids=["daemon", "fleeing"])
@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_the_whole_tree_goes(manager: Manager, home: Home, tmp_path: Path, code: str, grace: float) -> None:
    start_up(manager, tmp_path, code)
    assert manager.stop("a.1", grace)["left"] == []
    assert nobody_is_left(home)


@pytest.mark.parametrize("code", [DAEMON, FLEEING], ids=["daemon", "fleeing"])
def test_what_a_dead_one_leaves_goes_before_its_end_is_told(
    manager: Manager, home: Home, tmp_path: Path, code: str
) -> None:
    main, _, _ = code.rpartition("time.sleep(1000)")
    log = tmp_path / "a.1.log"
    wait = f"while not os.path.exists({str(log)!r}) or not os.path.getsize({str(log)!r}): time.sleep(0.001)"
    code = f"{main}\n{wait}\nos._exit(4)\n"
    pid = manager.start("a.1", [*PYTHON, code], log=str(log))["pid"]
    record = manager.exit_of("a.1")
    assert (record["pid"], record["code"], record["left"]) == (pid, 4, [])
    assert nobody_is_left(home)


def test_a_stop_right_after_the_start_never_hangs_and_nothing_survives(manager: Manager, home: Home) -> None:
    """Every one of them is hit somewhere between its fork and its program."""
    for number in range(200):
        unit = f"u{number}.1"
        start = manager.say_start(unit, ["sleep", "1000"])
        stop = manager.say("stop", name=unit, grace=0 if number % 2 else 5)
        assert manager.hear(stop)["left"] == []
        manager.hear(start)
        assert manager.exit_of(unit)["signal"] in {signal.SIGTERM, signal.SIGKILL}
        manager.ask("forget", name=unit)
        manager.events.clear()
    assert manager.ask("list") == {"units": []}
    assert not marked(f"{home.token}:")


def test_many_stops_run_side_by_side(manager: Manager, tmp_path: Path) -> None:
    for number in range(10):
        start_up(manager, tmp_path, STUBBORN, f"u{number}.1")
    began = time.monotonic()
    stops = [manager.say("stop", name=f"u{number}.1", grace=2.0) for number in range(10)]
    assert [manager.hear(number) for number in stops] == [{"graceful": False, "left": []}] * 10
    assert time.monotonic() - began < 15  # one after the other: 20 s


def test_one_run_is_stopped_by_its_name(manager: Manager) -> None:
    first = manager.start("a.1.1", ["sleep", "1000"])
    second = manager.start("a.1.2", ["sleep", "1000"])
    assert manager.stop("a.1.1", 5.0) == {"graceful": True, "left": []}
    assert not is_alive(first["pid"])
    assert is_alive(second["pid"])
