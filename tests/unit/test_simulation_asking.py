from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from ostler.errors import InvalidOperationError
from ostler.seams import SystemClock
from ostler.simulation.asking import Asking, Failed, Question
from ostler.simulation.lanes import LANE_NAME
from ostler.simulation.members import Member
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

_BOUND = 20.0
_TIMEOUT = 30.0
Brain = Callable[[AgentView], Any]


def questions(*brains: Brain) -> list[Question]:
    world = World(SimulationState(), 1, {})
    return [(brain, AgentView(Member(f"agent-{place}", place, brain, {}), world)) for place, brain in enumerate(brains)]


def make(clock: ManualClock | SystemClock, concurrency: int = 8, timeout: float = _TIMEOUT) -> Asking:
    return Asking(clock=clock, timeout=timedelta(seconds=timeout), concurrency=concurrency)


async def until(sign: Callable[[], bool]) -> None:
    end = time.monotonic() + _BOUND
    while not sign():
        assert time.monotonic() < end, "the sign never came"
        await asyncio.sleep(0.001)


async def pass_time(clock: ManualClock, asked: asyncio.Task[Any], step: float = 1.0) -> None:
    """Let time go by in steps until the answers are there."""
    end = time.monotonic() + _BOUND
    while not asked.done():
        assert time.monotonic() < end, "no answers, however late it gets"
        clock.advance(step)
        await asyncio.wait({asked}, timeout=0.002)


class Gate:
    """A plain brain that stays until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.returned = threading.Event()
        self.error: Exception | None = None

    def __call__(self, view: AgentView) -> str:
        self.entered.set()
        assert self.release.wait(_BOUND)
        try:
            view.remove_agent("agent-1")
        except InvalidOperationError as error:
            self.error = error
        self.returned.set()
        return "late"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    made = [Gate() for _ in range(4)]
    yield made
    for gate in made:
        gate.release.set()


@pytest.fixture(autouse=True)
async def _no_thread_stays() -> AsyncIterator[None]:
    yield
    await until(lambda: not any(thread.name == LANE_NAME for thread in threading.enumerate()))


# --- plain brains -----------------------------------------------------------------------------------


async def test_ten_thousand_plain_brains_answer_in_order_in_one_thread_beside_the_loop(clock: ManualClock) -> None:
    asking = make(clock)
    many = questions(*[lambda view: (view.number, threading.get_ident())] * 10_000)
    for _ in range(3):
        answers: list[Any] = await asking.ask_plain(many)
        assert [number for number, _ in answers] == list(range(10_000))
        threads = {thread for _, thread in answers}
        assert len(threads) == 1
        assert threading.get_ident() not in threads
    await asking.close()


async def test_nobody_to_ask_is_no_work(clock: ManualClock) -> None:
    asking = make(clock)
    assert await asking.ask_plain([]) == await asking.ask_async([]) == []
    await asking.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_a_brain_that_raises_fails_alone(clock: ManualClock, error: BaseException) -> None:
    def plain(_: AgentView) -> None:
        raise error

    async def waiting(_: AgentView) -> None:
        await asyncio.sleep(0)
        raise error

    async def fine(_: AgentView) -> int:
        return 1

    asking = make(clock)
    for answers in (
        await asking.ask_plain(questions(plain, lambda _: 1)),
        await asking.ask_async(questions(waiting, fine)),
    ):
        assert isinstance(answers[0], Failed)
        assert (answers[0].timed_out, answers[0].error_type) == (False, type(error).__name__)
        assert answers[1] == 1
    await asking.close()


async def test_the_words_of_an_error_are_clean_and_short(clock: ManualClock) -> None:
    def brain(_: AgentView) -> None:
        raise ValueError("a\0b" + "x" * 10_000)

    asking = make(clock)
    [failed] = await asking.ask_plain(questions(brain))
    assert failed.message.startswith("ValueError: a\ufffdb")
    assert len(failed.message) < 3_000
    await asking.close()


async def test_brains_that_block_think_at_the_same_time() -> None:
    asking = make(SystemClock())
    meet = threading.Barrier(8)

    def brain(view: AgentView) -> int:
        meet.wait(_BOUND)
        return view.number

    assert await asking.ask_plain(questions(*[brain] * 8)) == list(range(8))
    await asking.close()


async def test_no_more_think_at_a_time_than_may() -> None:
    asking = make(SystemClock(), concurrency=3)
    lock = threading.Lock()
    now, most = 0, 0

    def brain(_: AgentView) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)  # stands for a call that blocks
        with lock:
            now -= 1

    await asking.ask_plain(questions(*[brain] * 12))
    assert most == 3
    await asking.close()


async def test_one_that_hangs_is_given_up_on_in_its_time_and_the_others_are_asked(
    clock: ManualClock, gates: list[Gate]
) -> None:
    asking = make(clock)
    asked_for = questions(lambda _: "first", gates[0], *[lambda _: "other"] * 100)
    asked = asyncio.create_task(asking.ask_plain(asked_for))
    await until(gates[0].entered.is_set)
    began = clock.mono()
    await pass_time(clock, asked)
    assert _TIMEOUT <= clock.mono() - began <= _TIMEOUT + 5
    answers = await asked
    assert answers[:3] == ["first", answers[1], "other"]
    assert set(answers[2:]) == {"other"}
    assert isinstance(answers[1], Failed)
    assert (answers[1].timed_out, answers[1].error_type) == (True, "TimeoutError")
    assert "30 s" in answers[1].message
    assert [view.closed for _, view in asked_for] == [False, True, *[False] * 100]
    assert asking.hung == 1
    await asking.close()
    assert asking.hung == 1


async def test_what_one_says_after_it_was_given_up_on_is_not_heard(clock: ManualClock, gates: list[Gate]) -> None:
    asking = make(clock)
    asked = asyncio.create_task(asking.ask_plain(questions(gates[0], lambda _: "one")))
    await until(gates[0].entered.is_set)
    await pass_time(clock, asked)
    answers = await asked
    gates[0].release.set()
    again = await asking.ask_plain(questions(*[lambda _: "two"] * 50))
    await until(lambda: asking.hung == 0)
    assert gates[0].returned.is_set()
    assert gates[0].error is not None
    assert answers == [Failed(timed_out=True, error_type="TimeoutError", message=answers[0].message), "one"]
    assert again == ["two"] * 50
    assert await asking.ask_plain(questions(lambda _: "three")) == ["three"]
    await asking.close()


async def test_one_that_comes_back_within_the_turn_disturbs_nobody(clock: ManualClock, gates: list[Gate]) -> None:
    """Its lane has been given up on while others are still asked; it may take none of their questions."""
    asking = make(clock)
    numbers: list[int] = []

    def note(view: AgentView) -> int:
        numbers.append(view.number)
        return view.number

    asked = asyncio.create_task(asking.ask_plain(questions(gates[0], gates[1], *[note] * 20)))
    await until(gates[0].entered.is_set)
    while not asking.hung:
        clock.advance(1.0)
        await asyncio.sleep(0.001)
    gates[0].release.set()
    await until(gates[0].returned.is_set)
    gates[1].release.set()
    await pass_time(clock, asked, step=0.01)
    answers = await asked
    assert answers[0].timed_out
    assert answers[2:] == list(range(2, 22))
    assert sorted(numbers) == list(range(2, 22))
    await asking.close()


async def test_when_all_places_hang_the_rest_is_told_so_and_later_asked_again(
    clock: ManualClock, gates: list[Gate]
) -> None:
    asking = make(clock, concurrency=2)
    asked = asyncio.create_task(asking.ask_plain(questions(gates[0], gates[1], lambda _: 1, lambda _: 2)))
    await pass_time(clock, asked)
    answers = await asked
    assert asking.hung == 2
    assert [answer.timed_out for answer in answers] == [True, True, False, False]
    assert answers[3].error_type == "TooManyHungError"
    assert "2 brains" in answers[3].message
    [refused] = await asking.ask_plain(questions(lambda _: 1))
    assert refused.error_type == "TooManyHungError"
    gates[0].release.set()
    await until(lambda: asking.hung == 1)
    assert await asking.ask_plain(questions(lambda _: 1)) == [1]
    await asking.close()


async def test_an_awaitable_that_a_plain_brain_returns_is_awaited(clock: ManualClock) -> None:
    home = threading.get_ident()

    async def later(view: AgentView) -> tuple[int, bool]:
        await asyncio.sleep(0)
        return view.number, threading.get_ident() == home

    def brain(view: AgentView) -> Awaitable[Any]:
        return later(view)

    asking = make(clock)
    assert await asking.ask_plain(questions(brain, lambda _: 1, brain)) == [(0, True), 1, (2, True)]
    await asking.close()


async def test_cancelling_ends_plain_asking_and_the_next_call_works(clock: ManualClock, gates: list[Gate]) -> None:
    async def later() -> None: ...

    asking = make(clock, concurrency=1)
    reached: list[int] = []
    asked_for = questions(lambda _: later(), gates[0], lambda view: reached.append(view.number))
    asked = asyncio.create_task(asking.ask_plain(asked_for))
    await until(gates[0].entered.is_set)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert [view.closed for _, view in asked_for] == [False, True, False]
    assert await asking.ask_plain(questions(lambda _: 1)) == [1]
    gates[0].release.set()
    await until(gates[0].returned.is_set)
    await asking.close()
    assert reached == []


async def test_cancelling_while_an_awaitable_is_awaited_leaves_nothing_behind(clock: ManualClock) -> None:
    began = asyncio.Event()

    async def later() -> None:
        began.set()
        await asyncio.Event().wait()

    asking = make(clock, concurrency=1)
    asked = asyncio.create_task(asking.ask_plain(questions(lambda _: later(), lambda _: later())))
    await asyncio.wait_for(began.wait(), _BOUND)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await asking.ask_plain(questions(lambda _: 1)) == [1]
    await asking.close()


async def test_after_closing_nobody_is_asked(clock: ManualClock, gates: list[Gate]) -> None:
    asking = make(clock)
    asked = asyncio.create_task(asking.ask_plain(questions(gates[0])))
    waiting = asyncio.create_task(asking.ask_async(questions(_for_ever)))
    await until(gates[0].entered.is_set)
    await asking.close()
    for task in (asked, waiting):
        with pytest.raises(InvalidOperationError, match="closed"):
            await task
    for ask in (asking.ask_plain, asking.ask_async):
        with pytest.raises(InvalidOperationError, match="closed"):
            await ask(questions(lambda _: 1))
    await asking.close()


async def test_one_that_nobody_closes_leaves_no_thread(clock: ManualClock) -> None:
    """The fixture waits until its thread has gone."""
    assert await make(clock).ask_plain(questions(lambda _: 1)) == [1]


# --- async brains -----------------------------------------------------------------------------------


async def _for_ever(_: AgentView) -> None:
    await asyncio.Event().wait()


async def test_async_brains_overlap_within_their_number_and_keep_order(clock: ManualClock) -> None:
    asking = make(clock, concurrency=3)
    now, most = 0, 0

    async def brain(view: AgentView) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5 - view.number % 5):
            await asyncio.sleep(0)
        now -= 1
        return view.number

    assert await asking.ask_async(questions(*[brain] * 50)) == list(range(50))
    assert most == 3
    await asking.close()


async def test_an_async_brain_has_its_time_from_when_it_begins(clock: ManualClock) -> None:
    asking = make(clock, concurrency=1)
    cancelled: list[float] = []

    async def slow(_: AgentView) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(clock.mono())

    async def fine(_: AgentView) -> str:
        return "fine"

    asked_for = questions(slow, slow, fine)
    asked = asyncio.create_task(asking.ask_async(asked_for))
    await pass_time(clock, asked)
    answers = await asked
    assert [answer.timed_out for answer in answers[:2]] == [True, True]
    assert answers[2] == "fine"
    assert [view.closed for _, view in asked_for] == [True, True, False]
    assert _TIMEOUT <= cancelled[0] <= _TIMEOUT + 2
    assert 2 * _TIMEOUT <= cancelled[1] <= 2 * _TIMEOUT + 4
    assert asking.hung == 0
    await asking.close()


async def test_one_that_will_not_be_cancelled_is_left_behind_and_counted(clock: ManualClock) -> None:
    asking = make(clock, concurrency=1)
    release = asyncio.Event()

    async def stubborn(_: AgentView) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    async def fine(_: AgentView) -> str:
        return "fine"

    asked = asyncio.create_task(asking.ask_async(questions(stubborn, fine)))
    await pass_time(clock, asked)
    answers = await asked
    assert answers[0].timed_out
    assert answers[1].error_type == "TooManyHungError"
    assert asking.hung == 1
    release.set()
    await until(lambda: asking.hung == 0)
    assert await asking.ask_async(questions(fine)) == ["fine"]
    assert answers[0].timed_out
    await asking.close()


async def test_one_that_answers_when_it_is_cancelled_was_late_all_the_same(clock: ManualClock) -> None:
    asking = make(clock)

    async def late(_: AgentView) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "late"

    asked = asyncio.create_task(asking.ask_async(questions(late)))
    await pass_time(clock, asked)
    assert [answer.timed_out for answer in await asked] == [True]
    assert asking.hung == 0
    await asking.close()


async def test_cancelling_ends_async_asking_and_the_next_call_works(clock: ManualClock) -> None:
    asking = make(clock, concurrency=2)
    ended: list[int] = []

    async def brain(view: AgentView) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(view.number)

    async def fine(_: AgentView) -> int:
        return 1

    asked_for = questions(*[brain] * 5)
    asked = asyncio.create_task(asking.ask_async(asked_for))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert [view.closed for _, view in asked_for] == [True, True, False, False, False]
    assert await asking.ask_async(questions(fine)) == [1]
    assert ended == [0, 1]
    await asking.close()


async def test_both_kinds_may_be_asked_at_once(clock: ManualClock) -> None:
    async def waiting(view: AgentView) -> int:
        return view.number

    asking = make(clock)
    plain, later = await asyncio.gather(
        asking.ask_plain(questions(*[lambda view: view.number] * 100)), asking.ask_async(questions(*[waiting] * 100))
    )
    assert plain == later == list(range(100))
    await asking.close()
