from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ostler.agent_process import agent_loop as module
from ostler.agent_process.agent_loop import Census, Cutoff, Workers


@pytest.fixture
def emptied() -> threading.Event:
    return threading.Event()


@pytest.fixture
def census(emptied: threading.Event) -> Census:
    return Census(emptied.set)


@pytest.fixture
def workers(census: Census) -> Workers:
    return Workers(3, "some", census)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def test_work_is_done_and_errors_are_carried(workers: Workers, census: Census) -> None:
    assert workers.submit(pow, 2, 5).result(20) == 32
    assert isinstance(workers.submit(int, "x").exception(20), ValueError)
    assert isinstance(workers.submit(exit).exception(20), SystemExit)
    assert len(census) == 1, "one is enough for one after the other"
    workers.shutdown()
    with pytest.raises(RuntimeError, match="ending"):
        workers.submit(int)


def test_there_are_as_many_as_needed_and_no_more_than_allowed(
    workers: Workers, census: Census, emptied: threading.Event
) -> None:
    gate = threading.Event()
    futures = [workers.submit(gate.wait, 20) for _ in range(10)]
    until(lambda: sum(future.running() for future in futures) == 3)
    assert len(census) == 3
    gate.set()
    assert all(future.result(20) for future in futures)
    workers.shutdown()
    assert emptied.wait(60)
    assert len(census) == 0


def test_what_waits_does_not_begin_after_the_end(workers: Workers, emptied: threading.Event) -> None:
    gate = threading.Event()
    futures = [workers.submit(gate.wait, 20) for _ in range(5)]
    until(lambda: sum(future.running() for future in futures) == 3)
    workers.shutdown()
    assert [future.cancelled() for future in futures] == [False] * 3 + [True] * 2
    assert not emptied.is_set()
    gate.set()
    assert emptied.wait(60)


def test_an_idle_worker_goes_and_another_comes(
    workers: Workers, census: Census, emptied: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.01)
    for _ in range(5):
        emptied.clear()
        assert workers.submit(pow, 2, 5).result(20) == 32
        assert emptied.wait(60)
        assert len(census) == 0


def test_time_that_was_spent_is_kept_after_the_end(workers: Workers, census: Census, emptied: threading.Event) -> None:
    def toil() -> None:
        while time.thread_time() < 0.05:
            pass

    workers.submit(toil).result(20)
    assert census.cpu_seconds() >= 0.05
    workers.shutdown()
    assert emptied.wait(60)
    assert census.cpu_seconds() >= 0.05


def test_only_foreign_code_is_cut_off(workers: Workers, census: Census, emptied: threading.Event) -> None:
    begun = threading.Event()

    def spin() -> None:
        begun.set()
        while True:
            pass

    assert workers.submit(pow, 2, 5).result(20) == 32
    census.interrupt()  # the worker waits for work, which is our own code
    future = workers.submit(spin)
    assert begun.wait(60)
    census.interrupt()
    assert isinstance(future.exception(20), Cutoff)
    assert workers.submit(pow, 2, 5).result(20) == 32, "the thread itself goes on"
    workers.shutdown()
    assert emptied.wait(60)


def test_cutting_off_at_any_moment_breaks_nothing(workers: Workers, census: Census, emptied: threading.Event) -> None:
    """Each piece of work ends with its answer or cut off, and each thread leaves."""
    stop = threading.Event()

    def work() -> int:
        return sum(range(200))

    def push() -> None:
        while not stop.is_set():
            census.interrupt()
            time.sleep(0.0003)

    pushing = threading.Thread(target=push)
    pushing.start()
    try:
        futures = [workers.submit(work) for _ in range(5000)]
        for future in futures:
            error = future.exception(20)
            assert error is None or isinstance(error, Cutoff)
        workers.shutdown()
        assert emptied.wait(60)
    finally:
        stop.set()
        pushing.join()
    assert len(census) == 0
