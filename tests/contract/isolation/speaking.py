"""What an agent says and asks while it lives."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from isolation.ground import ATTEMPT, IsolationGround, RecordingListener, Start, do, passing, until
from ostler.agents import Progress, Signal, TokensUsed, WaitAnswer
from ostler.errors import AgentGoneError
from ostler.isolation import Isolation, Verb
from ostler.isolation.held.cell import HeldCell
from ostler.testing.clock import ManualClock


class SpeakingContract(IsolationGround):
    async def test_all_is_heard_in_order_before_the_answer(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        await cell.call(Verb.PROCESS, do("chat", count=500))
        fractions = [one.fraction for one in listener.messages if isinstance(one, Progress)]
        assert fractions == [number / 500 for number in range(500)]
        assert [one.count for one in listener.messages if isinstance(one, TokensUsed)] == [0, 100, 200, 300, 400]

    async def test_the_listener_is_called_where_the_start_was(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        await cell.call(Verb.PROCESS, do("chat", count=10))
        assert listener.threads == {threading.get_ident()}
        assert listener.attempts == {ATTEMPT}

    async def test_what_counts_is_heard_however_much_is_said(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        await cell.call(Verb.PROCESS, do("chat", count=10_000))
        hundreds = [one.payload for one in listener.messages if isinstance(one, Signal)]
        assert hundreds == [{"number": number} for number in range(0, 10_000, 100)]
        assert sum(isinstance(one, TokensUsed) for one in listener.messages) == 100
        fractions = [one.fraction or 0.0 for one in listener.messages if isinstance(one, Progress)]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 0.9999, "the newest news are the ones to keep"

    async def test_a_listener_that_fails_harms_nobody(
        self, start: Start, listener: RecordingListener, caplog: pytest.LogCaptureFixture
    ) -> None:
        cell = await start()
        listener.fails = True
        await cell.call(Verb.PROCESS, do("chat", count=3))
        assert len(listener.messages) == 5
        with pytest.raises(AgentGoneError):
            await cell.call(Verb.PROCESS, do("exit"))
        await until(lambda: len(listener.exits) == 1)
        assert "failed" in caplog.text

    async def test_what_it_wrote_last_is_known_without_its_log(self, start: Start) -> None:
        cell, before = await start(), datetime.now(UTC)
        assert cell.last_output is None
        await cell.call(Verb.PROCESS, do("log", text="the first line"))
        await cell.call(Verb.PROCESS, do("log", text="\x1b[31mthe last line\x1b[0m, coloured\n\n"))
        await until(lambda: cell.last_output is not None and cell.last_output.line.endswith("coloured"))
        output = cell.last_output
        assert output is not None
        assert output.line.endswith("the last line, coloured")
        assert output.at >= before or not isinstance(cell, HeldCell), "levels inside the program use the test's clock"
        assert output.dropped == 0

    async def test_a_question_is_answered(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask", detail={"from": ["red", "blue"]})))
        await until(lambda: bool(listener.questions))
        assert listener.signals == ["began"], "what was said before is heard before"
        (question,) = listener.questions
        assert (question.kind, question.reason) == ("human", "which colour?")
        assert question.detail == {"from": ["red", "blue"]}
        listener.answer.set_result(WaitAnswer(outcome="answered", answer={"colour": "red"}))
        outcome, answer = await call
        assert (outcome, answer) == ("answered", {"colour": "red"})

    async def test_a_question_says_which_it_is_and_in_which_call(
        self, start: Start, listener: RecordingListener
    ) -> None:
        cell, ids = await start(), [uuid4(), uuid4()]
        calls = [asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask"), call_id=one)) for one in ids]
        await until(lambda: len(listener.questions) == 2)
        assert {question.call_id for question in listener.questions} == set(ids)
        assert all(isinstance(question.ask_id, UUID) for question in listener.questions)
        assert len({question.ask_id for question in listener.questions}) == 2
        listener.answer.set_result(WaitAnswer(outcome="answered"))
        await asyncio.gather(*calls)

    async def test_what_counts_is_numbered_where_it_can_be_said_again(
        self, isolation: Isolation, start: Start, listener: RecordingListener
    ) -> None:
        cell = await start()
        await cell.call(Verb.PROCESS, do("say", count=6))
        wanted = [1, 2, 3, 4, 5, 6] if isolation.capabilities.outlives_manager else [0] * 6
        assert listener.numbers == wanted
        cell.ack(message=6)
        cell.ack(message=3)  # it has been said before
        await cell.call(Verb.PROCESS, do("say", count=1))
        assert len(listener.numbers) == 7

    async def test_confirming_an_answer_is_harmless(self, start: Start) -> None:
        cell, call_id = await start(), uuid4()
        cell.ack([call_id])
        assert await cell.call(Verb.PROCESS, do("echo", value=1), call_id=call_id) == 1
        cell.ack([call_id])
        cell.ack([call_id])
        assert await cell.call(Verb.PROCESS, do("echo", value=2), call_id=call_id) == 2, "its name is free again"

    async def test_a_question_is_called_off_with_its_call(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask")))
        await until(lambda: bool(listener.questions))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: listener.called_off == 1)
        assert await cell.call(Verb.PROCESS, do("echo", value="alive")) == "alive"

    async def test_a_question_is_called_off_by_a_stop(self, start: Start, listener: RecordingListener) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("ask")))
        await until(lambda: bool(listener.questions))
        assert (await cell.stop(timedelta(seconds=30))).graceful
        with pytest.raises(AgentGoneError):
            await call
        await until(lambda: listener.called_off == 1)

    async def test_after_the_end_nothing_is_heard(
        self, start: Start, listener: RecordingListener, clock: ManualClock
    ) -> None:
        cell = await start()
        call = asyncio.ensure_future(cell.call(Verb.PROCESS, do("stubborn")))
        await listener.signal("began")
        report = await passing(clock, cell.stop(timedelta(seconds=1)), 3)
        assert not report.graceful
        with pytest.raises(AgentGoneError):
            await call
        heard = len(listener.messages)
        await cell.destroy()
        await asyncio.sleep(0.05)
        assert len(listener.messages) == heard
