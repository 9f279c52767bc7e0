"""Freezing at a real keeper: what stands still can always be ended, also what was frozen on its way to its program."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_box_ground import KINDS
from keeper_client import Home, Manager, Refused, is_alive, launch, marked, wait_until

from ostler.keeper import cgroup_files

SLEEP = ["sleep", "1000"]
#: What a keeper is told to stop: a cell, or one unit of it.
NAMES = ["a.1", "a.1.two"]


@pytest.fixture(params=KINDS)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper", request.param)
    yield made
    made.end()


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Home]:
    """With groups of cgroup v1, where a signal reaches what is frozen only after the thaw."""
    if "cgroup1" not in KINDS:
        pytest.skip("this machine has no freezer of cgroup v1")
    made = Home(tmp_path / "keeper", "cgroup1")
    yield made
    made.end()


def freezer_of(home: Home, cell: str) -> Path:
    return Path(cgroup_files.own_groups()["freezer"]) / f"ostler-{home.token}" / cell


def stuck_start(home: Home, manager: Manager) -> tuple[int, int]:
    """A run whose newborn process is frozen before its program begins: its pid, and the number of the question."""
    manager.start("a.1.one", SLEEP)
    group = freezer_of(home, "a.1")
    (group / "freezer.state").write_text("FROZEN")
    number = manager.say_start("a.1.two", SLEEP)
    wait_until(lambda: cgroup_files.members(str(group / "unit-two")))
    (pid,) = cgroup_files.members(str(group / "unit-two"))
    assert number not in manager.answers
    return pid, number


def test_a_freeze_in_the_midst_of_a_start_is_refused_or_waits(home: Home) -> None:
    """Every freeze hits somewhere between the fork and the program; nothing may hang, and nothing may be left."""
    for number in range(40):
        manager = home.manager(epoch=number + 1)
        cell = f"u{number}.1"
        start = manager.say_start(f"{cell}.run", SLEEP)
        time.sleep((number % 8) * 0.0005)
        freeze = manager.say("freeze", cell=cell)
        pid = manager.hear(start)["pid"]
        with contextlib.suppress(Refused):
            manager.hear(freeze)
        assert manager.stop(f"{cell}.run" if number % 2 else cell, (number % 3) * 1.0)["left"] == []
        assert not is_alive(pid)
        manager.ask("forget", name=cell)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grace", [0.0, 0.5])
def test_one_that_was_frozen_before_its_program_can_be_stopped(cold: Home, name: str, grace: float) -> None:
    manager = cold.manager()
    pid, number = stuck_start(cold, manager)
    assert manager.stop(name, grace)["left"] == []
    assert not is_alive(pid)
    manager.hear(number)
    assert manager.exit_of("a.1.two")["signal"] in {signal.SIGTERM, signal.SIGKILL}
    assert manager.stop("a.1")["left"] == []
    assert not marked(f"{cold.token}:")


def test_the_end_of_the_lease_ends_it_too(cold: Home) -> None:
    manager = cold.manager(lease=0.1)
    pid, _ = stuck_start(cold, manager)
    manager.close()
    wait_until(lambda: not (cold.directory / "keeper.sock").exists())
    assert not is_alive(pid)
    assert not marked(f"{cold.token}:")
    assert not freezer_of(cold, "a.1").exists()
    cold.launch()


def test_a_keeper_that_is_killed_with_it_is_followed_by_another(cold: Home) -> None:
    """The newborn must hold neither the lock nor the socket of its keeper when it stands still."""
    manager = cold.manager()
    pid, _ = stuck_start(cold, manager)
    os.kill(manager.about["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(manager.about["pid"]))
    done = launch(cold.directory, "cgroup1")
    assert done.returncode == 0, done.stderr
    assert not is_alive(pid)
    assert not marked(f"{cold.token}:")
    assert not freezer_of(cold, "a.1").exists()
    assert cold.manager(epoch=2).ask("list") == {"units": []}


def test_a_run_that_is_stopped_in_a_frozen_box_leaves_the_others_frozen(home: Home) -> None:
    manager = home.manager()
    one = manager.start("a.1.one", SLEEP)["pid"]
    two = manager.start("a.1.two", SLEEP)["pid"]
    manager.ask("freeze", cell="a.1")
    began = time.monotonic()
    assert manager.stop("a.1.two", 90.0) == {"graceful": False, "left": []}
    assert time.monotonic() - began < 60, "what is frozen cannot heed a signal, so its grace is not waited for"
    assert is_alive(one)
    assert not is_alive(two)
    assert manager.statuses()["a.1.one"]["frozen"] is True
    with pytest.raises(Refused, match="frozen"):
        manager.start("a.1.three", SLEEP)
    assert manager.stop("a.1", 5.0) == {"graceful": True, "left": []}
