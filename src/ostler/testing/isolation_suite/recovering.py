"""What outlives its manager is found again by the next one: nothing is lost, nothing is done twice."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest

from ostler.agents import WaitAnswer
from ostler.errors import AgentGoneError, InvalidOperationError
from ostler.isolation import Cell, Exit, Isolation, StartPlan, Verb
from ostler.model import AttemptOutcome
from ostler.testing.isolation_suite.ground import ATTEMPT, INSTANCE, Ear, IsolationGround, do, until

CALL = UUID("01890000-0000-7000-8000-0000000ca11d")
Successor = Callable[[], Isolation]


class RecoveringContract(IsolationGround):
    """Asked only of a level that outlives its manager. It then gives `successor` as well."""

    @pytest.fixture
    def successor(self) -> Successor:
        """Makes the level of the next manager over the same home; whoever made it closes it."""
        raise NotImplementedError("a level that outlives its manager says how the next one is made")

    @pytest.fixture
    async def heir(self, isolation: Isolation, request: pytest.FixtureRequest) -> AsyncIterator[Isolation | None]:
        """The next manager's level, to which nothing was said yet; None where there cannot be one."""
        if not isolation.capabilities.outlives_manager:
            yield None
            return
        successor: Successor = request.getfixturevalue("successor")
        level = successor()
        yield level
        await level.close()
        last = successor()  # whatever a failed test has left
        await last.sweep(keep=())
        await last.close()

    @pytest.fixture
    def plan(self, plan_of: Callable[..., StartPlan]) -> StartPlan:
        return replace(plan_of(), instance_id=INSTANCE)

    async def test_a_living_agent_is_found_with_all_it_knows(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, ear)
        process = (await cell.call(Verb.PROCESS, do("tell")))["process"]
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("echo"))
        found = await heir.recover(None, plan, ear)
        assert isinstance(found, Cell)
        assert not found.in_flight
        told = await found.call(Verb.PROCESS, do("tell"))
        assert (told["process"], told["attempt"]) == (process, ATTEMPT)
        assert await found.call(Verb.FINAL_STATE) == {"asked": 2}
        assert found.handle == cell.handle
        assert not ear.exits
        assert (await found.stop(timedelta(seconds=30))).graceful
        await found.destroy()

    async def test_a_call_in_flight_is_answered_to_the_next_manager(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, ear)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("meet", first=True), call_id=CALL))
        await ear.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.recover(cell.handle, plan, ear)
        assert isinstance(found, Cell)
        assert found.in_flight == {CALL: Verb.PROCESS}
        again = asyncio.ensure_future(found.rejoin(CALL))
        assert await found.call(Verb.PROCESS, do("meet", first=False)) == "came"
        assert await again == "met"
        assert not found.in_flight
        with pytest.raises(InvalidOperationError):
            await found.rejoin(CALL)
        await found.destroy()

    async def test_an_answer_that_nobody_heard_is_kept(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan, release: Callable[[], None]
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, ear)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn"), call_id=CALL))
        await ear.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        release()
        await asyncio.sleep(0.1)  # whether it answers before or after the next manager comes, it is answered once
        found = await heir.recover(cell.handle, plan, ear)
        assert isinstance(found, Cell)
        assert found.in_flight == {CALL: Verb.PROCESS}
        assert await found.rejoin(CALL) == "ended"
        assert await found.call(Verb.FINAL_STATE) == {"asked": 1}
        await found.destroy()

    async def test_an_end_that_nobody_saw_is_told_as_it_was(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan, release: Callable[[], None]
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, ear)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("exit_when_released")))
        await ear.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        release()
        how: Cell | Exit = cell
        for _ in range(200):
            how = await heir.recover(cell.handle, plan, ear)
            if isinstance(how, Exit):
                break
            how.detach()
            await asyncio.sleep(0.01)
        assert isinstance(how, Exit)
        assert how.outcome in {AttemptOutcome.EXIT_CODE, AttemptOutcome.ERROR}
        assert how.detail
        assert not ear.exits, "whoever looks for it is told, and nobody else"

    async def test_a_question_is_asked_again(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, ear)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask"), call_id=CALL))
        await until(lambda: len(ear.questions) == 1)
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.recover(cell.handle, plan, ear)
        assert isinstance(found, Cell)
        await until(lambda: len(ear.questions) == 2)
        first, second = ear.questions
        assert first.ask_id is not None
        assert first == second
        assert second.call_id == CALL
        ear.answer.set_result(WaitAnswer(outcome="answered", answer={"colour": "red"}))
        assert list(await found.rejoin(CALL)) == ["answered", {"colour": "red"}]
        await found.destroy()

    async def test_what_is_frozen_stays_so(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan
    ) -> None:
        if heir is None or not heir.capabilities.freezes:
            return
        cell = await _started(isolation, plan, ear)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("tick"), call_id=CALL))
        await ear.signal("tick")
        await cell.freeze()
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.recover(cell.handle, plan, ear)
        assert isinstance(found, Cell)
        heard = len(ear.signals)
        await asyncio.sleep(0.1)
        assert len(ear.signals) == heard
        await found.thaw()
        assert found.in_flight == {CALL: Verb.PROCESS}
        await until(lambda: len(ear.signals) > heard)
        await found.destroy()

    async def test_what_was_never_started_is_lost(self, heir: Isolation | None, ear: Ear, plan: StartPlan) -> None:
        if heir is None:
            return
        how = await heir.recover(None, plan, ear)
        assert isinstance(how, Exit)
        assert how.outcome is AttemptOutcome.LOST

    async def test_what_nobody_wants_back_is_swept(
        self, isolation: Isolation, heir: Isolation | None, ear: Ear, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        other = replace(plan, instance_id=UUID(int=INSTANCE.int + 1))
        await _started(isolation, plan, ear)
        await _started(isolation, other, ear)
        await isolation.close()
        found = await heir.recover(None, plan, ear)
        assert isinstance(found, Cell)
        assert await heir.sweep(keep={(INSTANCE, ATTEMPT)}) == 1
        assert isinstance(await heir.recover(None, other, ear), Exit)
        assert await found.call(Verb.PROCESS, do("echo", value=1)) == 1
        assert await heir.sweep(keep=()) == 0, "what it holds itself is not swept"
        await found.destroy()


async def _started(isolation: Isolation, plan: StartPlan, ear: Ear) -> Cell:
    await isolation.prepare(plan)
    cell = await isolation.start(plan, ear)
    await cell.call(Verb.INITIALIZE)
    return cell
