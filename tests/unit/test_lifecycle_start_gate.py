"""Many starts at once: by priority, in order, at a bounded pace, and none waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from ostler.lifecycle.start_gate import PATIENCE, StartGate
from ostler.model.states import AgentPriority
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

P = AgentPriority


class Crowd:
    """Each who is let in says so, and leaves when told to."""

    def __init__(self, *, at_once: int = 1, per_second: int = 10_000) -> None:
        self.clock = ManualClock()
        self.gate = StartGate(self.clock, at_once=at_once, per_second=per_second)
        self.entered: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def come(self, name: str, priority: AgentPriority = P.NORMAL) -> None:
        self._doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._pass(name, priority))

    async def _pass(self, name: str, priority: AgentPriority) -> None:
        async with self.gate.turn(priority):
            self.entered.append(name)
            await self._doors[name].wait()

    async def leave(self, name: str) -> None:
        self._doors[name].set()
        await self.tasks[name]
        await turn()

    async def leave_all(self) -> None:
        for name in self._doors:
            self._doors[name].set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_important_ones_go_first_and_equals_in_their_order() -> None:
    crowd = Crowd()
    crowd.come("inside")
    await turn()
    wanted = [("low", P.LOW), ("a", P.NORMAL), ("b", P.NORMAL), ("high", P.HIGH), ("critical", P.CRITICAL)]
    for name, priority in wanted:
        crowd.come(name, priority)
    await turn()
    assert crowd.gate.waiting == 5
    await crowd.leave_all()
    assert crowd.entered == ["inside", "critical", "high", "a", "b", "low"]
    assert crowd.gate.waiting == 0


async def test_no_more_are_inside_than_may_be() -> None:
    crowd = Crowd(at_once=3)
    for number in range(8):
        crowd.come(str(number))
    await turn()
    assert crowd.entered == ["0", "1", "2"]
    await crowd.leave("1")
    assert crowd.entered == ["0", "1", "2", "3"]
    await crowd.leave_all()


async def test_so_many_are_let_in_per_second() -> None:
    crowd = Crowd(at_once=1000, per_second=100)
    for number in range(500):
        crowd.come(str(number))
    await turn()
    for second in range(1, 6):
        assert len(crowd.entered) == 100 * second
        crowd.clock.advance(0.9)
        await turn()
        assert len(crowd.entered) == 100 * second
        crowd.clock.advance(0.1)
        await turn()
    assert len(crowd.entered) == 500
    await crowd.leave_all()


async def test_nobody_waits_for_ever_behind_more_important_ones() -> None:
    crowd = Crowd()
    crowd.come("inside")
    await turn()
    crowd.come("humble", P.LOW)
    crowd.come("next", P.LOW)
    last = "inside"
    for number in range(3 * PATIENCE):
        crowd.come(f"grand {number}", P.CRITICAL)
        await turn()
        await crowd.leave(last)
        last = crowd.entered[-1]
    assert crowd.entered.index("humble") == PATIENCE + 1
    assert crowd.entered.index("next") == 2 * PATIENCE + 2
    await crowd.leave_all()


async def test_who_gives_up_takes_no_turn() -> None:
    crowd = Crowd()
    for name in ("inside", "first", "second", "third"):
        crowd.come(name)
    await turn()
    crowd.tasks["first"].cancel()
    await turn()
    crowd.tasks["second"].cancel()  # in the very moment in which its turn comes
    await crowd.leave("inside")
    assert crowd.entered == ["inside", "third"]
    crowd.come("fourth")
    await crowd.leave("third")
    assert crowd.entered[-1] == "fourth"
    await crowd.leave_all()


async def test_an_open_one_holds_nobody_up() -> None:
    crowd = Crowd(at_once=1, per_second=1)
    for number in range(5):
        crowd.come(str(number))
    await turn()
    assert len(crowd.entered) == 1
    crowd.gate.open()
    await turn()
    assert len(crowd.entered) == 5
    crowd.come("late")
    await turn()
    assert crowd.entered[-1] == "late"
    await crowd.leave_all()


async def test_one_that_takes_its_time_does_not_hold_up_the_others() -> None:
    clock, entered = ManualClock(), []
    gate = StartGate(clock, at_once=1)

    async def enter(name: str) -> None:
        async with gate.turn(P.NORMAL, 0.25):
            entered.append(name)
            await asyncio.Event().wait()

    tasks = [asyncio.ensure_future(enter(name)) for name in ("a", "b", "c")]
    for count in (1, 2, 3):
        await turn()
        assert len(entered) == count
        clock.advance(0.25)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with gate.turn(P.NORMAL):
        assert gate.waiting == 0, "who has left is not counted as leaving again"


async def test_who_says_that_it_is_done_leaves_before_the_end() -> None:
    gate = StartGate(ManualClock(), at_once=1)
    async with gate.turn(P.LOW) as leave:
        leave()
        async with asyncio.timeout(60), gate.turn(P.LOW):
            leave()
            assert gate._inside == 1  # noqa: SLF001 - tests may look inside


async def test_alone_nobody_waits_even_for_the_loop() -> None:
    gate = StartGate(ManualClock(), at_once=1)
    entering = gate.turn(P.LOW).__aenter__()
    with pytest.raises(StopIteration):
        entering.send(None)
