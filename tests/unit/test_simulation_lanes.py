from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from ostler.simulation.answers import Failed, Question
from ostler.simulation.lanes import LANE_NAME, UNASKED, Lane, Walk
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World

_BOUND = 20.0


class Desk:
    """Hears from lanes that they have left."""

    def __init__(self) -> None:
        self.told = threading.Semaphore(0)

    def walk(self, *brains: Callable[[AgentView], Any]) -> Walk:
        world = World(SimulationState(), 1, {})
        questions: list[Question] = [
            (brain, AgentView(Member(f"agent-{place}", place, brain, {}), world)) for place, brain in enumerate(brains)
        ]
        return Walk(questions, list(range(len(questions) + 5)), self.tell)

    def tell(self, _lane: Lane) -> None:
        self.told.release()

    def wait(self) -> None:
        assert self.told.acquire(timeout=_BOUND)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def lane() -> Iterator[Lane]:
    one = Lane()
    yield one
    one.leave()
    one.join(_BOUND)
    assert one.ended


def test_a_lane_asks_all_in_order_in_one_thread_that_is_not_ours(desk: Desk, lane: Lane) -> None:
    threads: set[str] = set()

    def brain(view: AgentView) -> int:
        threads.add(threading.current_thread().name)
        return view.number * 10

    walk = desk.walk(brain, brain, brain)
    assert lane.give(walk)
    desk.wait()
    assert walk.answers == [0, 10, 20]
    assert threads == {LANE_NAME}
    assert walk.finish() == {}


def test_a_lane_serves_one_walk_after_the_other_in_the_same_thread(desk: Desk, lane: Lane) -> None:
    walks = [desk.walk(lambda _: threading.get_ident()) for _ in range(3)]
    for walk in walks:
        assert lane.give(walk)
        desk.wait()
    assert len({walk.answers[0] for walk in walks}) == 1


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_a_brain_raises_stands_in_its_place_and_the_lane_goes_on(
    desk: Desk, lane: Lane, error: BaseException
) -> None:
    def brain(_: AgentView) -> None:
        raise error

    walk = desk.walk(brain, lambda _: "fine")
    lane.give(walk)
    desk.wait()
    failed = walk.answers[0]
    assert isinstance(failed, Failed)
    assert (failed.timed_out, failed.error_type) == (False, type(error).__name__)
    assert walk.answers[1] == "fine"


def test_an_error_that_cannot_say_what_it_is_harms_nobody(desk: Desk, lane: Lane) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise SystemExit

    def brain(_: AgentView) -> None:
        raise MuteError

    walk = desk.walk(brain, lambda _: "fine")
    lane.give(walk)
    desk.wait()
    assert walk.answers == [Failed(timed_out=False, error_type="MuteError", message="MuteError"), "fine"]


def test_one_that_shall_leave_finishes_its_question_and_asks_no_other(desk: Desk, lane: Lane) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(_: AgentView) -> str:
        entered.set()
        assert release.wait(_BOUND)
        return "late"

    walk = desk.walk(slow, lambda _: "never")
    lane.give(walk)
    assert entered.wait(_BOUND)
    assert lane.leave() == 0
    release.set()
    desk.wait()
    assert walk.answers == ["late", UNASKED]
    lane.join(_BOUND)
    assert not lane.give(walk)


def test_two_lanes_share_a_walk_and_ask_each_once(desk: Desk, lane: Lane) -> None:
    meet = threading.Barrier(2)
    asked: list[int] = []

    def brain(view: AgentView) -> int:
        if view.number < 2:
            meet.wait(_BOUND)
        asked.append(view.number)
        return view.number

    other = Lane()
    walk = desk.walk(*[brain] * 500)
    lane.give(walk)
    other.give(walk)
    desk.wait()
    desk.wait()
    other.leave()
    other.join(_BOUND)
    assert walk.answers == list(range(500))
    assert sorted(asked) == list(range(500))


def test_what_has_to_be_awaited_is_set_aside_and_closed_once_nobody_waits(desk: Desk, lane: Lane) -> None:
    async def later() -> str:
        return "later"

    made: list[Any] = []

    def brain(_: AgentView) -> Awaitable[str]:
        made.append(later())
        return made[-1]  # type: ignore[no-any-return]  # put there in the line above

    walk = desk.walk(brain, lambda _: 1)
    lane.give(walk)
    desk.wait()
    aside = walk.finish()
    assert list(aside) == [0]
    walk.set_aside(1, late := later())
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED  # else it would warn that it was never awaited
    made[0].close()


def test_an_idle_lane_ends_by_itself_and_says_so(desk: Desk) -> None:
    lane = Lane(linger=0.01)
    lane.join(_BOUND)
    assert lane.ended
    assert not lane.give(desk.walk(lambda _: 1))
    assert lane.cpu_seconds() == 0.0


def test_a_lane_knows_what_it_computed(desk: Desk, lane: Lane) -> None:
    def busy(_: AgentView) -> None:
        while time.thread_time() < 0.02:
            pass

    before = lane.cpu_seconds()
    lane.give(desk.walk(busy))
    desk.wait()
    assert lane.cpu_seconds() >= 0.02 > before
