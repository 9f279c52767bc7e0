"""Where an engine works: beside the brains, to its end, and never on the event loop unless it asks for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from ostler.errors import InvalidOperationError, SimulationError
from ostler.simulation import SimulationOrchestrator, SimulationSettings

pytestmark = pytest.mark.anyio
SHORT = SimulationSettings(decision_timeout=timedelta(milliseconds=150))


class Engine:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def update(self, state: Any, decisions: Any, world: Any) -> Any:
        del decisions, world
        state.global_state["thread"] = threading.current_thread() is threading.main_thread()
        return self.act()


class AsyncEngine(Engine):
    async def update(self, state: Any, decisions: Any, world: Any) -> Any:
        del decisions, world
        state.global_state["thread"] = threading.current_thread() is threading.main_thread()
        await asyncio.sleep(0)
        return self.act()


def plain(_view: Any) -> int:
    return 1


async def later(_view: Any) -> int:
    return 1


def orchestrator(engine: Any, *brains: Any, settings: SimulationSettings = SHORT) -> SimulationOrchestrator:
    made = SimulationOrchestrator(engine=engine, settings=settings)
    for brain in brains:
        made.add_agent("one", brain, {})
    return made


@pytest.mark.parametrize("brains", [(plain,), (later,), (plain, later)], ids=["plain", "async", "both"])
async def test_a_plain_engine_does_not_hold_up_the_loop_and_an_async_one_lives_on_it(brains: tuple[Any, ...]) -> None:
    async with orchestrator(Engine(lambda: None), *brains) as run:
        await run.play_turn()
        assert run.state.global_state == {"thread": False}
    async with orchestrator(AsyncEngine(lambda: None), *brains) as run:
        await run.play_turn()
        assert run.state.global_state == {"thread": True}


@pytest.mark.parametrize("brain", [plain, later], ids=["plain", "async"])
async def test_an_engine_may_take_longer_than_a_brain(brain: Any) -> None:
    release = threading.Event()
    async with orchestrator(Engine(lambda: release.wait() and None), brain) as run:
        playing = asyncio.create_task(run.play_turn())
        # Several times as long as a brain may think.
        done, _ = await asyncio.wait([playing], timeout=0.5)
        assert not done
        release.set()
        report = await playing
        assert not report.failures
        assert list(report.decisions) == ["one"]


@pytest.mark.parametrize("brain", [plain, later], ids=["plain", "async"])
async def test_a_turn_that_is_called_off_waits_for_its_engine(brain: Any) -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        release.wait()
        ended.set()

    async with orchestrator(Engine(act), brain) as run:
        playing = asyncio.create_task(run.play_turn())
        await asyncio.to_thread(begun.wait)
        playing.cancel()
        done, _ = await asyncio.wait([playing], timeout=0.1)
        assert not done  # the state is still being changed
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert ended.is_set()
        with pytest.raises(InvalidOperationError, match="turn 1 was not completed"):
            await run.play_turn()


@pytest.mark.parametrize("brain", [plain, later], ids=["plain", "async"])
async def test_an_engine_that_raises_is_told_by_name(brain: Any) -> None:
    async with orchestrator(Engine(lambda: dict[str, int]()["gold"]), brain) as run:
        with pytest.raises(SimulationError, match="the engine failed in turn 1: KeyError: 'gold'"):
            await run.play_turn()


async def test_what_a_plain_engine_returns_to_await_is_awaited() -> None:
    async def act() -> None:
        heard.append(threading.current_thread() is threading.main_thread())

    heard: list[bool] = []
    async with orchestrator(Engine(act), plain) as run:
        await run.play_turn()
    assert heard == [True]


async def test_nobody_is_heard_once_the_engine_works() -> None:
    class Keen:
        def decide(self, view: Any) -> int:
            self.view = view
            return 1

    keen = Keen()

    def act() -> None:
        keen.view.remove_agent()

    async with orchestrator(Engine(act), keen) as run:
        with pytest.raises(SimulationError, match="the turn of one is over"):
            await run.play_turn()
