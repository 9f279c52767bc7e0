"""What agents notice when the code of their keeper is exchanged: that they stood still for a moment, and no more."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import ordinary
import pytest
from keeper_client import SOURCE, Home, Manager, Refused, keeper_argv, wait_until

from ostler.isolation.process import launch
from ostler.keeper.tree import cpu_seconds, stat

BUSY = ["/bin/sh", "-c", "while :; do :; done"]


@pytest.fixture(params=[None, "signals"], ids=["best", "signals"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper", request.param)
    yield made
    made.end()


@pytest.fixture
def manager(home: Home) -> Manager:
    return home.manager()


plain_boxes = pytest.mark.parametrize("home", ["signals"], indirect=True, ids=["signals"])


def is_stopped(pid: int) -> bool:
    seen = stat(pid)
    assert seen is not None
    return seen.is_stopped


def goes_on(pid: int) -> bool:
    """Within a while: a busy process that is let run uses the processor."""
    before, end = cpu_seconds(pid), time.monotonic() + 10
    while time.monotonic() < end:
        if cpu_seconds(pid) > before + 0.02:
            return True
        time.sleep(0.01)
    return False


def exchange(home: Home, manager: Manager) -> None:
    """The same code once more, with the same kind of boxes."""
    argv = keeper_argv(home.directory, "signals" if manager.about["boxes"] == "signals" else None)
    assert manager.ask("upgrade", argv=argv) == {}


def test_what_was_frozen_stays_so_and_can_be_thawed_after_an_exchange(home: Home, manager: Manager) -> None:
    cold = manager.start("cold.1", BUSY)["pid"]
    warm = manager.start("warm.1", BUSY)["pid"]
    manager.ask("freeze", box="cold.1")
    for _ in range(2):
        exchange(home, manager)
        used = cpu_seconds(cold)
        assert goes_on(warm)
        assert cpu_seconds(cold) == used
    assert manager.statuses()["cold.1"]["frozen"] is True
    manager.ask("thaw", box="cold.1")
    assert goes_on(cold)


@plain_boxes
def test_one_that_rests_for_its_limit_goes_on_after_an_exchange(home: Home, manager: Manager) -> None:
    pid = manager.start("a.1", BUSY, limits={"cpu_percent": 5})["pid"]
    wait_until(lambda: is_stopped(pid))
    exchange(home, manager)
    assert goes_on(pid)
    wait_until(lambda: is_stopped(pid))


@plain_boxes
def test_one_that_stopped_by_itself_is_not_woken_by_an_exchange(home: Home, manager: Manager) -> None:
    pid = manager.start("a.1", ["/bin/sh", "-c", "kill -STOP $$; exit 3"])["pid"]
    wait_until(lambda: is_stopped(pid))
    exchange(home, manager)
    assert is_stopped(pid)
    assert manager.stop("a.1")["left"] == []


def test_an_exchange_that_fails_in_the_last_moment_lets_all_go_on(manager: Manager, tmp_path: Path) -> None:
    pid = manager.start("a.1", BUSY)["pid"]
    gone = tmp_path / "gone"
    gone.write_text('#!/bin/sh\nrm "$0"\necho ok\n')
    gone.chmod(0o700)
    with pytest.raises(Refused, match="cannot be executed"):
        manager.ask("upgrade", argv=[str(gone)])
    assert goes_on(pid)
    assert manager.statuses()["a.1"]["exit"] is None


def test_an_end_that_the_disk_has_lost_is_written_by_the_next(home: Home, manager: Manager) -> None:
    manager.start("done.1", ["/bin/sh", "-c", "exit 4"])
    manager.exit_of("done.1")
    journal = home.directory / "exits.jsonl"
    journal.write_text("")
    exchange(home, manager)
    wait_until(lambda: '"unit":"done.1"' in journal.read_text())


# --- out of sight --------------------------------------------------------------------------------------

#: Looks as often as it can, says when it has begun, and at the end how often it looked and what it got.
_SPY = """
import os, sys, time
keeper, flag = sys.argv[1], sys.argv[2]
looks, seen = 0, set()
assert os.listdir("/proc/self/fd")
while not os.path.exists(flag):
    for name in ("fd", "mem", "environ"):
        path = f"/proc/{keeper}/{name}"
        try:
            os.listdir(path) if name == "fd" else os.close(os.open(path, os.O_RDONLY))
        except PermissionError:
            continue
        seen.add(name)
    looks += 1
    if looks == 100:
        print("begun", flush=True)
print(looks, *sorted(seen), flush=True)
"""


def test_no_agent_sees_into_a_keeper_whose_code_is_exchanged() -> None:
    with ordinary.somebody() as user:
        home = user.home()
        try:
            manager = home.manager()
            log, flag = user.place / "log", user.place / "flag"
            spy = [user.python, "-I", "-S", "-c", _SPY, str(manager.about["pid"]), str(flag)]
            manager.start("spy.1", spy, log=str(log))
            wait_until(lambda: "begun" in log.read_text())
            for _ in range(3):
                manager.ask("upgrade", argv=user.keeper_argv(home.directory))
            flag.touch()
            assert manager.exit_of("spy.1")["code"] == 0
            looks, *seen = log.read_text().splitlines()[-1].split()
            assert (int(looks) > 100, seen) == (True, [])
        finally:
            home.end()


def test_it_hides_before_it_reads_a_line_of_ours(tmp_path: Path) -> None:
    """Between the two is time enough to look: the moment is as long as an interpreter takes to begin."""
    fake = tmp_path / "ostler"
    (fake / "keeper").mkdir(parents=True)
    (fake / "__init__.py").write_text(
        "import ctypes\nprint(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\nraise SystemExit\n"
    )
    argv = [str(tmp_path) if one == SOURCE else one for one in launch.keeper_argv(tmp_path)]
    said = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=30, env={"PATH": os.environ["PATH"]}
    )
    assert said.stdout == "0\n"
