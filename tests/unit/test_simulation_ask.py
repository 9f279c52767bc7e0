"""Asking brains: in order, at the same time where they wait, each within its limit. Real threads, short limits."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from ostler.errors import InvalidOperationError, SimulationError
from ostler.simulation import ask as module
from ostler.simulation.ask import Asker, Failed, Round
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.view import AgentView, World

pytestmark = pytest.mark.anyio

_BOUND = 20.0
Brain = Callable[[AgentView], Any]


def views(count: int) -> list[AgentView]:
    world = World(SimulationState())
    world.begin_turn()
    members = [Member(f"agent-{place}", place, None, {}) for place in range(count)]
    return [AgentView(member, world, lambda _: None, is_async=False) for member in members]


def questions(brains: Sequence[Brain]) -> list[tuple[Brain, AgentView]]:
    return list(zip(brains, views(len(brains)), strict=True))


async def ask(asker: Asker, *brains: Brain) -> list[Any]:
    return await asker.ask_plain(questions(brains))


def waits(seconds: float) -> Brain:
    def brain(view: AgentView) -> int:
        time.sleep(seconds)
        return view.number

    return brain


async def until(sign: Callable[[], bool]) -> None:
    end = time.monotonic() + _BOUND
    while not sign():
        assert time.monotonic() < end, "the sign never came"
        await asyncio.sleep(0.001)


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
def gates() -> Iterator[list[Gate]]:
    made = [Gate() for _ in range(6)]
    yield made
    for gate in made:
        gate.release.set()


@pytest.fixture(autouse=True)
async def _no_thread_stays() -> AsyncIterator[None]:
    before = set(threading.enumerate())  # other tests in this program may have left brains that hang
    yield
    await until(lambda: not any(thread.name == "ostler-brains" for thread in set(threading.enumerate()) - before))


# --- plain brains ------------------------------------------------------------------------------------


async def test_brains_that_answer_at_once_are_asked_in_order_by_one_thread_beside_the_loop() -> None:
    asker = Asker(limit=5, concurrency=8)
    answers = await ask(asker, *[lambda view: (view.number, threading.get_ident())] * 10_000)
    assert [number for number, _ in answers] == list(range(10_000))
    assert len({thread for _, thread in answers} | {threading.get_ident()}) == 2
    assert await ask(asker) == []


async def test_rounds_follow_one_another_in_the_thread_of_the_brains() -> None:
    asker, threads = Asker(limit=5, concurrency=8), set[int]()

    def brain(view: AgentView) -> int:
        threads.add(threading.get_ident())
        return view.number

    rounds: list[list[Any]] = []

    def finish(answers: list[Any]) -> Round | None:
        threads.add(threading.get_ident())
        rounds.append(answers)
        return Round(questions([brain] * 3)) if len(rounds) < 50 else None

    await asker.play(Round(questions([brain] * 3)), finish)
    assert rounds == [[0, 1, 2]] * 50
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    with pytest.raises(ZeroDivisionError):
        await asker.in_thread(lambda: 1 / 0)


async def test_a_brain_that_hangs_in_a_later_round_costs_its_own_turn_and_the_rounds_go_on(gates: list[Gate]) -> None:
    asker, rounds = Asker(limit=0.2, concurrency=8), list[list[Any]]()

    def finish(answers: list[Any]) -> Round | None:
        rounds.append([getattr(answer, "timed_out", answer) for answer in answers])
        brains: list[Brain] = [lambda _: 1, gates[0] if len(rounds) == 3 else lambda _: 2, lambda _: 3]
        return Round(questions(brains)) if len(rounds) < 6 else None

    await asyncio.wait_for(asker.play(Round(()), finish), _BOUND)
    assert rounds == [[], [1, 2, 3], [1, 2, 3], [1, True, 3], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration("over")]
)
async def test_a_brain_that_raises_fails_alone(error: BaseException) -> None:
    def plain(_: AgentView) -> None:
        raise error

    async def waiting(_: AgentView) -> None:
        await asyncio.sleep(0)
        raise error

    async def fine(_: AgentView) -> int:
        return 1

    asker = Asker(limit=5, concurrency=2)
    tasks: list[Any] = [fine, waiting, waiting, fine]
    found = [await ask(asker, lambda _: 1, plain, plain, lambda _: 1), await asker.ask_async(questions(tasks))]
    for answers in found:
        assert answers[0] == answers[3] == 1
        assert all(isinstance(answer, Failed) and not answer.timed_out for answer in answers[1:3])
    assert found[0][1].error_type == type(error).__name__


async def test_the_words_of_an_error_are_clean_and_short_and_cannot_do_harm() -> None:
    class Odd(Exception):  # noqa: N818 - a user's own
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def long(_: AgentView) -> None:
        raise ValueError("a\0b" + "x" * 10_000)

    def odd(_: AgentView) -> None:
        raise Odd

    asker = Asker(limit=5, concurrency=2)
    first, second, third = await ask(asker, long, odd, lambda _: 3)
    assert first.message.startswith("ValueError: a\ufffdb")
    assert len(first.message) < 3_000
    assert (second.error_type, third) == ("Odd", 3)


async def test_brains_that_block_decide_at_the_same_time() -> None:
    asker, meet = Asker(limit=_BOUND, concurrency=8), threading.Barrier(8)

    def brain(view: AgentView) -> int:
        meet.wait(_BOUND)
        return view.number

    assert await ask(asker, *[brain] * 8) == list(range(8))


@pytest.mark.parametrize("concurrency", [1, 3, 64])
async def test_as_many_decide_at_a_time_as_may_and_no_more(concurrency: int) -> None:
    asker, lock = Asker(limit=_BOUND, concurrency=concurrency), threading.Lock()
    now, most, meet = 0, 0, threading.Barrier(concurrency)

    def brain(view: AgentView) -> int:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        meet.wait(_BOUND)
        with lock:
            now -= 1
        return view.number

    count = 2 * concurrency
    assert await ask(asker, *[brain] * count) == list(range(count))
    assert most == concurrency


async def test_a_brain_that_hangs_costs_its_own_turn_and_the_others_are_asked(gates: list[Gate]) -> None:
    asker = Asker(limit=0.2, concurrency=8)
    brains: list[Brain] = [lambda _: "first", gates[0], *[lambda _: "other"] * 100, gates[1]]
    seen = views(103)
    began = time.monotonic()
    answers = await asker.ask_plain(list(zip(brains, seen, strict=True)))
    assert time.monotonic() - began >= 0.2
    assert (answers[0], set(answers[2:102])) == ("first", {"other"})
    for place in (1, 102):
        assert (answers[place].timed_out, answers[place].error_type) == (True, "TimeoutError")
        assert "0.2 s" in answers[place].message
        assert asker.still_runs(seen[place])
    assert [place for place, view in enumerate(seen) if view.closed] == [1, 102]
    gates[0].release.set()
    await until(lambda: not asker.still_runs(seen[1]))
    assert gates[0].error is not None, "what it said after the time-out was heard"


@pytest.mark.parametrize("concurrency", [1, 2, 8])
async def test_as_many_may_hang_as_like_without_taking_the_places_of_others(
    gates: list[Gate], concurrency: int
) -> None:
    """Abandoned threads do not count, or the future of a run would depend on its program's past."""
    asker = Asker(limit=0.15, concurrency=concurrency)
    answers = await ask(asker, *gates[:3], lambda _: 1, *gates[3:])
    assert [getattr(answer, "timed_out", answer) for answer in answers] == [True] * 3 + [1] + [True] * 3
    assert await ask(asker, lambda _: 2) == [2]


async def test_the_last_answer_may_be_a_time_out(gates: list[Gate]) -> None:
    asker = Asker(limit=0.05, concurrency=4)
    for brains in ([gates[0]], [lambda _: 1, gates[1]], [gates[2], gates[3]]):
        answers = await asyncio.wait_for(ask(asker, *brains), _BOUND)
        assert answers[-1].timed_out


async def test_a_brain_that_comes_back_within_the_turn_takes_no_question_of_others(gates: list[Gate]) -> None:
    asker, numbers = Asker(limit=0.3, concurrency=2), list[int]()

    def slow(view: AgentView) -> int:
        gates[0].release.set()  # by now it was given up on
        time.sleep(0.005)
        numbers.append(view.number)
        return view.number

    answers = await ask(asker, gates[0], gates[1], *[slow] * 20)
    assert answers[0].timed_out
    assert answers[1].timed_out
    assert answers[2:] == list(range(2, 22))
    assert sorted(numbers) == list(range(2, 22))


async def test_brains_that_compute_are_not_slowed_down_by_threads_beside_them() -> None:
    """24 brains that compute for 20 ms each: in 24 threads each of them would take 0.5 s or more."""
    asker, threads = Asker(limit=5, concurrency=64), set[int]()

    def compute(view: AgentView) -> int:
        threads.add(threading.get_ident())
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return view.number

    assert await ask(asker, *[compute] * 24) == list(range(24))
    assert len(threads) <= 16


async def test_brains_that_wait_a_little_are_asked_at_the_same_time_too() -> None:
    asker, threads = Asker(limit=5, concurrency=8), set[int]()

    def brain(view: AgentView) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.002)
        return view.number

    assert await ask(asker, *[brain] * 100) == list(range(100))
    assert len(threads) > 1


async def test_more_than_256_abandoned_brains_stop_the_run(monkeypatch: pytest.MonkeyPatch, gates: list[Gate]) -> None:
    monkeypatch.setattr(module, "MAX_ABANDONED", 3)
    asker = Asker(limit=0.05, concurrency=8)
    await ask(asker, *gates[:3])
    asker.require_room()
    await ask(asker, gates[3])
    with pytest.raises(SimulationError, match="4 brains were given up and still run"):
        asker.require_room()
    gates[0].release.set()

    def has_room() -> bool:
        try:
            asker.require_room()
        except SimulationError:
            return False
        return True

    await until(has_room)


async def test_cancelling_ends_the_asker_and_the_next_call_works(gates: list[Gate]) -> None:
    asker, reached = Asker(limit=_BOUND, concurrency=1), list[int]()
    seen = views(2)
    brains: list[Brain] = [gates[0], lambda view: reached.append(view.number)]
    asked = asyncio.ensure_future(asker.ask_plain(list(zip(brains, seen, strict=True))))
    await until(gates[0].entered.is_set)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert all(view.closed for view in seen)
    assert await ask(asker, lambda _: 1) == [1]
    gates[0].release.set()
    await until(gates[0].returned.is_set)
    assert reached == []


async def test_cancelling_waits_for_an_engine_that_has_begun() -> None:
    asker = Asker(limit=5, concurrency=1)
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go.wait(_BOUND)
        ended.set()

    asked = asyncio.ensure_future(asker.in_thread(work))
    await until(began.is_set)
    asked.cancel()
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.sleep(0)
    assert not asked.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert ended.is_set()


def _mixture(seed: int) -> tuple[list[Brain], list[Any]]:
    chance = random.Random(seed)
    brains: list[Brain] = []
    expected: list[Any] = []

    def fails(_: AgentView) -> None:
        raise ValueError

    for _ in range(chance.randint(1, 60)):
        match chance.randrange(12):
            case 0:
                brains.append(fails)
                expected.append("ValueError")
            case 1 if chance.random() < 0.2:
                brains.append(lambda _: time.sleep(1.0))
                expected.append("TimeoutError")
            case 1 | 2 | 3:
                pause = chance.choice([0.0005, 0.004, 0.012, 0.03])
                brains.append(waits(pause))
                expected.append("number")
            case _:
                brains.append(lambda view: view.number)
                expected.append("number")
    return brains, expected


async def _ask_mixtures(seeds: range) -> None:
    for seed in seeds:
        brains, expected = _mixture(seed)
        asker = Asker(limit=0.4, concurrency=random.Random(seed).choice([1, 2, 8, 64]))
        answers = await asyncio.wait_for(ask(asker, *brains), _BOUND)
        found = [getattr(answer, "error_type", "number") for answer in answers]
        assert found == expected, f"seed {seed}"
        numbers = [answer for answer in answers if not isinstance(answer, Failed)]
        assert numbers == [place for place, what in enumerate(expected) if what == "number"], f"seed {seed}"


async def test_any_mixture_of_brains_is_answered_in_order() -> None:
    await _ask_mixtures(range(8))


@pytest.mark.torture
@pytest.mark.timeout(1800)
async def test_a_thousand_mixtures_of_brains_are_answered_in_order() -> None:
    await _ask_mixtures(range(100, 1100))


# --- async brains ------------------------------------------------------------------------------------


async def test_async_brains_overlap_within_their_number_and_keep_their_order() -> None:
    now, most = 0, 0

    async def brain(view: AgentView) -> int:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.001 * (20 - view.number))
        now -= 1
        return view.number

    asker = Asker(limit=5, concurrency=3)
    assert await asker.ask_async(questions([brain] * 20)) == list(range(20))
    assert most == 3
    assert await asker.ask_async([]) == []


async def test_an_async_brain_that_hangs_is_given_up_on_whatever_it_makes_of_it() -> None:
    stubborn = asyncio.Event()

    async def hangs(_: AgentView) -> None:
        await asyncio.Event().wait()

    async def answers_when_cancelled(_: AgentView) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        return "never"

    async def ignores(_: AgentView) -> None:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    async def fine(_: AgentView) -> int:
        return 1

    asker, seen = Asker(limit=0.1, concurrency=2), views(4)
    brains: list[Any] = [hangs, answers_when_cancelled, ignores, fine]
    answers = await asker.ask_async(list(zip(brains, seen, strict=True)))
    assert [getattr(answer, "timed_out", answer) for answer in answers] == [True, True, True, 1]
    assert [view.closed for view in seen] == [True, True, True, False]
    await asyncio.sleep(0.01)
    assert [asker.still_runs(view) for view in seen] == [False, False, True, False]
    stubborn.set()
    await until(lambda: not asker.still_runs(seen[2]))


async def test_cancelling_ends_async_brains() -> None:
    ended: list[int] = []

    async def brain(view: AgentView) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(view.number)

    asker = Asker(limit=_BOUND, concurrency=2)
    asked = asyncio.ensure_future(asker.ask_async(questions([brain] * 3)))
    await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.sleep(0.01)
    assert sorted(ended) == [0, 1]
