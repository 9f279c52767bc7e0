"""What outlives its manager is found again by the next one: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from isolation.ground import ATTEMPT, INSTANCE, IsolationGround, RecordingListener, do, until
from ostler.agents import WaitAnswer
from ostler.errors import AgentExecutionError, AgentGoneError
from ostler.isolation import Cell, Exit, Isolation, StartPlan, Verb
from ostler.model.attempt import AttemptOutcome

CALL = UUID("01890000-0000-7000-8000-0000000ca11d")
Successor = Callable[[], Isolation]


class RecoveringContract(IsolationGround):
    """Asked only of a level that outlives its manager. It then gives `successor` as well."""

    @pytest.fixture
    def successor(self) -> Successor:
        """Makes the level of the next manager over the same home; the test that made it closes it."""

        def make() -> Isolation:
            raise NotImplementedError("a level that outlives its manager says how the next one is made")

        return make

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
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        process = (await cell.call(Verb.PROCESS, do("tell")))["process"]
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("echo"))
        found = await heir.adopt(None, plan, listener)
        assert isinstance(found, Cell)
        assert await listener.report() == ({}, frozenset())
        told = await found.call(Verb.PROCESS, do("tell"))
        assert (told["process"], told["attempt"]) == (process, ATTEMPT)
        assert await found.call(Verb.FINAL_STATE) == {"asked": 2}
        assert found.handle == cell.handle
        assert not listener.exits
        assert (await found.stop(timedelta(seconds=30))).graceful
        await found.destroy()

    async def test_what_it_wrote_last_is_known_to_the_next_manager(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        await cell.call(Verb.PROCESS, do("log", text="before the adoption"))
        await until(lambda: cell.last_output is not None)
        await isolation.close()
        adopted = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(adopted, Cell)
        assert adopted.last_output == cell.last_output
        assert cell.last_output is not None
        assert cell.last_output.line.endswith("before the adoption")
        await adopted.call(Verb.PROCESS, do("log", text="after it"))
        await until(lambda: adopted.last_output is not None and adopted.last_output.line.endswith("after it"))
        await adopted.destroy()

    async def test_a_call_in_flight_is_answered_to_the_next_manager(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("meet", first=True), call_id=CALL))
        await listener.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert (await listener.report())[0] == {CALL: Verb.PROCESS}
        again = asyncio.ensure_future(found.call(Verb.PROCESS, call_id=CALL))
        assert await found.call(Verb.PROCESS, do("meet", first=False)) == "came"
        assert await again == "met"
        await found.destroy()

    async def test_an_answer_that_nobody_heard_is_kept(
        self,
        isolation: Isolation,
        heir: Isolation | None,
        listener: RecordingListener,
        plan: StartPlan,
        release: Callable[[], None],
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn"), call_id=CALL))
        await listener.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        release()
        await asyncio.sleep(0.1)  # whether it answers before or after the next manager comes, it is answered once
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert (await listener.report())[0] == {CALL: Verb.PROCESS}
        assert await found.call(Verb.PROCESS, call_id=CALL) == "ended"
        assert await found.call(Verb.FINAL_STATE) == {"asked": 1}
        await found.destroy()

    async def test_an_answer_that_was_not_confirmed_is_given_again_and_a_confirmed_one_is_not(
        self, isolation: Isolation, successor: Successor, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if not isolation.capabilities.outlives_manager:
            return
        cell = await _started(isolation, plan, listener)
        failed = uuid4()
        assert await cell.call(Verb.PROCESS, do("echo", value="once"), call_id=CALL) == "once"
        with pytest.raises(AgentExecutionError, match="as told"):
            await cell.call(Verb.PROCESS, do("fail"), call_id=failed)
        assert await cell.call(Verb.PROCESS, do("echo", value="unnamed")) == "unnamed"
        assert not cell.is_stuck
        await isolation.close()
        second = successor()
        found = await second.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert (await listener.report())[0] == {CALL: Verb.PROCESS, failed: Verb.PROCESS}
        assert not found.is_stuck
        assert await found.call(Verb.PROCESS, call_id=CALL) == "once"
        with pytest.raises(AgentExecutionError, match="as told"):
            await found.call(Verb.PROCESS, call_id=failed)
        found.ack([CALL])
        await second.close()
        third = successor()
        found = await third.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert (await listener.report(2))[0] == {failed: Verb.PROCESS}
        found.ack([failed])  # also of one that this manager does not want
        assert await found.call(Verb.FINAL_STATE) == {"asked": 3}, "nothing was done twice"
        await found.destroy()
        await third.close()

    async def test_a_call_that_was_given_up_is_not_found_again(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("hang"), call_id=CALL))
        await listener.signal("began")
        call.cancel()
        await asyncio.wait((call,))
        await isolation.close()
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert await listener.report() == ({}, frozenset())
        await found.destroy()

    async def test_what_was_not_acknowledged_is_said_again_in_order(
        self, isolation: Isolation, successor: Successor, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if not isolation.capabilities.outlives_manager:
            return
        cell = await _started(isolation, plan, listener)
        await cell.call(Verb.PROCESS, do("say", count=9), call_id=CALL)
        assert listener.numbers == list(range(1, 10))
        cell.ack(message=4)
        await isolation.close()
        second, again = successor(), RecordingListener()
        found = await second.adopt(cell.handle, plan, again)
        assert isinstance(found, Cell)
        assert await found.call(Verb.PROCESS, call_id=CALL) == 1
        assert again.numbers == list(range(5, 10)), "what was said before an answer is heard before it"
        assert [one for one in again.messages if one in listener.messages] == again.messages
        await found.call(Verb.PROCESS, do("say", count=2))
        assert again.numbers == list(range(5, 12))
        found.ack(message=11)
        await second.close()
        third, silent = successor(), RecordingListener()
        found = await third.adopt(cell.handle, plan, silent)
        assert isinstance(found, Cell)
        await found.ping()
        assert silent.numbers == []
        await found.destroy()
        await third.close()

    async def test_an_adopted_agent_reports_once_what_it_works_on(
        self, isolation: Isolation, successor: Successor, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if not isolation.capabilities.outlives_manager:
            return
        cell = await _started(isolation, plan, listener)
        await isolation.close()
        assert not listener.reports
        second = successor()
        found = await second.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        assert await listener.report() == ({}, frozenset()), "also when that is nothing"
        asyncio.ensure_future(found.call(Verb.PROCESS, do("ask"), call_id=CALL)).add_done_callback(_retrieve)
        await until(lambda: len(listener.questions) == 1)
        await second.close()
        third = successor()
        found = await third.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        (question, *_) = listener.questions
        assert await listener.report(2) == ({CALL: Verb.PROCESS}, frozenset({question.ask_id}))
        await asyncio.sleep(0.05)
        assert len(listener.reports) == 2
        listener.answer.set_result(WaitAnswer(outcome="answered"))
        assert list(await found.call(Verb.PROCESS, call_id=CALL)) == ["answered", None]
        await found.destroy()
        await third.close()

    async def test_a_frozen_agent_reports_after_the_thaw(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None or not heir.capabilities.freezes:
            return
        cell = await _started(isolation, plan, listener)
        await cell.freeze()
        await isolation.close()
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        await asyncio.sleep(0.1)
        assert not listener.reports
        await found.thaw()
        await listener.report()
        await found.destroy()

    async def test_a_blocked_agent_is_adopted_at_once_and_reports_later(
        self,
        isolation: Isolation,
        heir: Isolation | None,
        listener: RecordingListener,
        plan: StartPlan,
        release: Callable[[], None],
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("block"), call_id=CALL))
        await listener.signal("began")
        await isolation.close()
        call.add_done_callback(_retrieve)
        found = await asyncio.wait_for(heir.adopt(cell.handle, plan, listener), 5)
        assert isinstance(found, Cell)
        await asyncio.sleep(0.1)
        assert not listener.reports
        release()
        assert (await listener.report())[0] == {CALL: Verb.PROCESS}
        await found.call(Verb.PROCESS, call_id=CALL)
        await found.destroy()

    async def test_what_was_said_while_no_manager_was_there_survives_the_agent(
        self,
        isolation: Isolation,
        heir: Isolation | None,
        listener: RecordingListener,
        plan: StartPlan,
        release: Callable[[], None],
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("say_when_released")))
        await listener.signal("began")
        process = cell.handle["pid"]
        await isolation.close()
        call.add_done_callback(_retrieve)
        release()
        await asyncio.sleep(0.3)
        os.kill(process, signal.SIGKILL)
        later = RecordingListener()
        how: Cell | Exit = cell
        for _ in range(200):
            how = await heir.adopt(cell.handle, plan, later)
            if isinstance(how, Exit):
                break
            how.detach()
            await asyncio.sleep(0.01)
        assert isinstance(how, Exit)
        assert how.signal == signal.SIGKILL
        assert "unheard" in later.signals

    async def test_an_end_that_nobody_saw_is_told_as_it_was(
        self,
        isolation: Isolation,
        heir: Isolation | None,
        listener: RecordingListener,
        plan: StartPlan,
        release: Callable[[], None],
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("exit_when_released")))
        await listener.signal("began")
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        release()
        async with asyncio.timeout(60):
            while isinstance(how := await heir.adopt(cell.handle, plan, listener), Cell):
                how.detach()
                await asyncio.sleep(0.01)
        assert how.outcome in {AttemptOutcome.EXIT_CODE, AttemptOutcome.ERROR}
        assert how.detail
        assert not listener.exits, "whoever looks for it is told, and nobody else"

    async def test_a_question_is_asked_again(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask"), call_id=CALL))
        await until(lambda: len(listener.questions) == 1)
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        await until(lambda: len(listener.questions) == 2)
        first, second = listener.questions
        assert first.ask_id is not None
        assert first == second
        assert second.call_id == CALL
        listener.answer.set_result(WaitAnswer(outcome="answered", answer={"colour": "red"}))
        assert list(await found.call(Verb.PROCESS, call_id=CALL)) == ["answered", {"colour": "red"}]
        await found.destroy()

    async def test_what_is_frozen_stays_so(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None or not heir.capabilities.freezes:
            return
        cell = await _started(isolation, plan, listener)
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("tick"), call_id=CALL))
        await listener.signal("tick")
        await cell.freeze()
        await isolation.close()
        with pytest.raises(AgentGoneError):
            await call
        found = await heir.adopt(cell.handle, plan, listener)
        assert isinstance(found, Cell)
        heard = len(listener.signals)
        await asyncio.sleep(0.1)
        assert len(listener.signals) == heard
        await found.thaw()
        assert (await listener.report())[0] == {CALL: Verb.PROCESS}
        await until(lambda: len(listener.signals) > heard)
        await found.destroy()

    async def test_what_was_never_started_is_lost(
        self, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        how = await heir.adopt(None, plan, listener)
        assert isinstance(how, Exit)
        assert how.outcome is AttemptOutcome.LOST

    async def test_what_nobody_wants_back_is_swept(
        self, isolation: Isolation, heir: Isolation | None, listener: RecordingListener, plan: StartPlan
    ) -> None:
        if heir is None:
            return
        other = replace(plan, instance_id=UUID(int=INSTANCE.int + 1))
        await _started(isolation, plan, listener)
        await _started(isolation, other, listener)
        await isolation.close()
        found = await heir.adopt(None, plan, listener)
        assert isinstance(found, Cell)
        assert await heir.sweep(keep={(INSTANCE, ATTEMPT)}) == 1
        assert isinstance(await heir.adopt(None, other, listener), Exit)
        assert await found.call(Verb.PROCESS, do("echo", value=1)) == 1
        assert await heir.sweep(keep=()) == 0, "what it holds itself is not swept"
        await found.destroy()


def _retrieve(call: asyncio.Future[Any]) -> None:
    """It ends with its manager."""
    call.exception()


async def _started(isolation: Isolation, plan: StartPlan, listener: RecordingListener) -> Cell:
    await isolation.prepare(plan)
    cell = await isolation.start(plan, listener)
    await cell.call(Verb.INITIALIZE)
    return cell
