"""Priorities on a busy machine: their order holds with a controller of the kernel, and without one by nice values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import ordinary
import pytest
from keeper_client import TREES, Home, Manager, wait_until

from ostler.keeper.groups import nice_for, usage_of

#: Low, normal, high and critical.
WEIGHTS = (25, 100, 400, 1600)
NICE = [10, 7, 3, 0]
BUSY = ["/bin/sh", "-c", "while :; do :; done"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "keeper", TREES)
    yield made
    made.end()


def start_all(manager: Manager) -> list[int]:
    numbers = [manager.say_start(f"w{weight}.1", ["sleep", "1000"], limits={"weight": weight}) for weight in WEIGHTS]
    return [manager.hear(number)["pid"] for number in numbers]


def session_nice(pid: int) -> int | None:
    """None where the kernel does not weigh sessions."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except OSError:
        return None


def are_weighed(pids: list[int]) -> bool:
    return [session_nice(pid) for pid in pids] in (NICE, [None] * 4)


def cpu_seconds(pid: int) -> float:
    return usage_of([pid]).cpu_seconds


def niceness(pids: list[int]) -> list[int]:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    return [os.getpriority(os.PRIO_PROCESS, pid) - own for pid in pids]


def test_a_share_becomes_a_nice_value() -> None:
    assert [nice_for(weight) for weight in WEIGHTS] == NICE
    assert (nice_for(1), nice_for(10_000)) == (10, 0)


def test_without_a_controller_the_order_of_priorities_holds(home: Home) -> None:
    manager = home.manager()
    pids = start_all(manager)
    assert niceness(pids) == NICE
    wait_until(lambda: are_weighed(pids))


def test_with_a_controller_it_is_the_controllers(tmp_path: Path) -> None:
    home = Home(tmp_path / "keeper")
    try:
        manager = home.manager()
        if manager.about["enforcement"]["cpu"] != "enforced":
            pytest.skip("this machine has no controller for us that deals out the processor")
        assert niceness(start_all(manager)) == [0, 0, 0, 0]
    finally:
        home.end()


def test_the_order_holds_for_an_ordinary_user() -> None:
    with ordinary.somebody() as user:
        home = user.home()
        try:
            manager = home.manager()
            if manager.about["enforcement"]["cpu"] == "enforced":
                pytest.skip("this ordinary user has a controller")
            pids = start_all(manager)
            assert niceness(pids) == NICE
        finally:
            home.end()


def test_of_two_that_want_one_core_the_more_important_gets_more(home: Home) -> None:
    manager = home.manager()
    core = {min(os.sched_getaffinity(0))}
    pids = [manager.start(f"w{weight}.1", BUSY, limits={"weight": weight})["pid"] for weight in (100, 1600)]
    if session_nice(pids[0]) is not None:
        wait_until(lambda: [session_nice(pid) for pid in pids] == [7, 0])
    for pid in pids:
        os.sched_setaffinity(pid, core)
    before = [cpu_seconds(pid) for pid in pids]
    wait_until(lambda: sum(map(cpu_seconds, pids)) - sum(before) > 1.0)
    normal, critical = (cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
    assert critical > 2 * normal, f"{critical:.2f} s and {normal:.2f} s; by the kernel's table it is 4.8 times as much"
