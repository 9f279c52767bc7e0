from __future__ import annotations

import asyncio
import contextvars
import logging
import stat
import sys
import threading
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import AgentContext, Message, WaitAnswer, WaitAsked
from ostler.agents.context import CURRENT_CALL, MAX_HOOKS, CallToken
from ostler.agents.messages import MAX_TEXT, MetricReported, Progress, Signal, TokensUsed
from ostler.errors import ValidationError
from ostler.model.context import ContextData
from ostler.model.spawn import ResourceLimits
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

CLOCK = ManualClock()
LIMITS = ResourceLimits()


class Ear:
    """A voice that remembers."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.asked: list[WaitAsked] = []

    def say(self, message: Message) -> None:
        self.said.append(message)

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        self.asked.append(wait)
        return WaitAnswer(outcome="approved", answer={"by": "ann"})


def context(voice: Ear | None = None, **fields: Any) -> AgentContext:
    return AgentContext(
        instance_id=UUID(int=1), attempt=2, definition_id=UUID(int=3), name="fixer", limits=LIMITS, clock=CLOCK,
        voice=voice or Ear(), **fields,
    )  # fmt: skip


# --- what it knows -----------------------------------------------------------------------------------


def test_data_is_read_with_keys_in_any_case() -> None:
    data: Any = {"targetRepository": "/srv/repo"}
    assert context(data=data).data["TARGETREPOSITORY"] == "/srv/repo"
    assert context(data=ContextData(data)).data["targetrepository"] == "/srv/repo"
    assert not context().data


def test_the_workdir_is_made_when_it_is_first_asked_for(tmp_path: Path) -> None:
    there = tmp_path / "a" / "b"
    mine = context(directory=there)
    assert not there.exists()
    assert mine.workdir == there
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    there.rmdir()
    assert mine.workdir == there, "it is made once; an agent may take it away"
    assert not there.exists()
    assert context().workdir is None


def test_what_the_agent_logs_says_who_it_is(caplog: pytest.LogCaptureFixture) -> None:
    mine = context()
    assert mine.logger is mine.logger
    with caplog.at_level(logging.INFO, "ostler.agent"):
        mine.logger.info("reading %s", "a file", extra={"page": 4, "attempt": 99})
    [record] = caplog.records
    assert record.getMessage() == "reading a file"
    assert (vars(record)["instance_id"], vars(record)["attempt"], vars(record)["page"]) == (str(UUID(int=1)), 2, 4)


def test_it_does_not_show_its_data() -> None:
    data: Any = {"key": "hunter2"}
    assert "hunter2" not in repr(context(data=data))


def test_an_idle_one_is_small() -> None:
    voice = Ear()
    context(voice)
    tracemalloc.start()
    try:
        kept = [context(voice) for _ in range(200)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert size < 1024, f"{size:.0f} bytes"
    assert not hasattr(kept[0], "__dict__")
    assert sys.getsizeof(kept[0]) < 256


# --- what it says ------------------------------------------------------------------------------------


def test_it_speaks_through_its_voice() -> None:
    ear = Ear()
    mine = context(ear)
    mine.report(0.5, "half way", files=3)
    mine.report(1)
    mine.report(message="thinking")
    mine.signal("breakpoint", {"reason": "full"})
    mine.signal("hello")
    mine.report_tokens(1200, model="sonnet")
    mine.report_tokens(0)
    mine.report_metric("cache.hits", 7)
    assert ear.said == [
        Progress(fraction=0.5, message="half way", details={"files": 3}),
        Progress(fraction=1.0),
        Progress(message="thinking"),
        Signal(name="breakpoint", payload={"reason": "full"}),
        Signal(name="hello"),
        TokensUsed(count=1200, model="sonnet"),
        TokensUsed(count=0),
        MetricReported(name="cache.hits", value=7.0),
    ]
    assert isinstance(vars_of(ear.said[1])["fraction"], float)


def vars_of(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}


def test_what_was_said_does_not_change_afterwards() -> None:
    ear = Ear()
    payload = {"files": ["a"]}
    context(ear).signal("done", payload)
    payload["files"].append("b")
    assert ear.said == [Signal(name="done", payload={"files": ["a"]})]


def test_a_long_message_is_clipped_not_refused() -> None:
    ear = Ear()
    context(ear).report(message="x" * 10_000 + "\0")
    [said] = ear.said
    assert isinstance(said, Progress)
    assert said.message is not None
    assert said.message.endswith(f"… ({10_001 - MAX_TEXT} more characters)")


NAN, INF = float("nan"), float("inf")
HUGE = 10**400


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda it: it.report(), "report must say something"),
        (lambda it: it.report(2), "fraction must be 0 to 1, was 2"),
        (lambda it: it.report(-0.01), "fraction must be 0 to 1"),
        (lambda it: it.report(NAN), "fraction must be a finite number"),
        (lambda it: it.report(True), "fraction must be a number, was True"),
        (lambda it: it.report("half"), "fraction must be a number"),
        (lambda it: it.report(message=b"x"), "message must be text"),
        (lambda it: it.report(what=object()), "details.what must be a JSON value"),
        (lambda it: it.report(what="\0"), "details.what must not contain NUL"),
        (lambda it: it.signal(""), "name must have 1 to 200 characters"),
        (lambda it: it.signal("a\nb"), "name must be printable text"),
        (lambda it: it.signal(5), "name must be text, was 5"),
        (lambda it: it.signal("x", [1]), "payload must be a mapping"),
        (lambda it: it.signal("x", {"a": {1, 2}}), "payload.a must be a JSON value"),
        (lambda it: it.signal("x", {"a": INF}), "payload.a must be a finite number"),
        (lambda it: it.signal("x", {1: 1}), "payload must have only text as keys"),
        (lambda it: it.signal("x", {"a": "x" * 300_000}), "payload must be at most 256 KiB"),
        (lambda it: it.report_tokens(-1), "count must be 0 to"),
        (lambda it: it.report_tokens(HUGE), "count must be 0 to"),
        (lambda it: it.report_tokens(1.5), "count must be a whole number"),
        (lambda it: it.report_tokens(True), "count must be a whole number"),
        (lambda it: it.report_tokens(1, model=""), "model must have 1 to 200"),
        (lambda it: it.report_metric("x", NAN), "value must be a finite number"),
        (lambda it: it.report_metric("x", HUGE), "value must be a finite number"),
        (lambda it: it.report_metric("x", None), "value must be a number"),
        (lambda it: it.report_metric("", 1), "name must have 1 to 200"),
        (lambda it: it.add_cleanup(None), "hook must be something that can be called"),
        (lambda it: it.add_cleanup(print, timeout=timedelta(0)), "timeout must be a duration above zero"),
        (lambda it: it.add_cleanup(print, timeout=5), "timeout must be a duration above zero"),
        (lambda it: it.add_cleanup(print, timeout=None), "timeout must be a duration above zero"),
        (lambda it: it.add_cleanup(print, name="\n"), "name must be printable"),
    ],
)
def test_bad_input_is_refused_at_the_call(call: Any, complaint: str) -> None:
    ear = Ear()
    with pytest.raises(ValidationError) as caught:
        call(context(ear))
    assert complaint in str(caught.value)
    assert not ear.said


async def test_waiting_asks_and_gives_back_the_answer() -> None:
    ear = Ear()
    answer = await context(ear).wait_for("human", reason="may I?", timeout=timedelta(hours=1), detail={"pr": 4})
    assert answer.outcome == "approved"
    assert not answer.timed_out
    assert ear.asked == [WaitAsked(kind="human", reason="may I?", timeout=timedelta(hours=1), detail={"pr": 4})]


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": ""},
        {"kind": 1},
        {"kind": "ci", "reason": 4},
        {"kind": "ci", "timeout": timedelta(0)},
        {"kind": "ci", "timeout": 3},
        {"kind": "ci", "detail": {"a": object()}},
    ],
)
async def test_a_bad_wait_is_refused_before_anybody_is_asked(bad: dict[str, Any]) -> None:
    ear = Ear()
    with pytest.raises(ValidationError):
        await context(ear).wait_for(**bad)
    assert not ear.asked


# --- how it ends -------------------------------------------------------------------------------------


def test_hooks_come_out_last_first_and_once() -> None:
    mine = context()
    mine.add_cleanup(test_hooks_come_out_last_first_and_once)
    mine.add_cleanup(lambda: None, name="second", timeout=timedelta(seconds=1))
    taken = [mine.next_cleanup(), mine.next_cleanup(), mine.next_cleanup()]
    assert [hook and (hook.name, hook.timeout.total_seconds()) for hook in taken] == [
        ("second", 1.0),
        ("test_hooks_come_out_last_first_and_once", 5.0),
        None,
    ]


def test_there_is_an_end_to_hooks() -> None:
    mine = context()
    for _ in range(MAX_HOOKS):
        mine.add_cleanup(print)
    with pytest.raises(ValidationError, match="at most 1000"):
        mine.add_cleanup(print)


def test_stopping_the_agent_cancels_whatever_it_does() -> None:
    mine = context()
    assert not mine.cancelled
    mine.raise_if_cancelled()
    mine.mark_stopping()
    assert mine.cancelled
    with pytest.raises(asyncio.CancelledError):
        mine.raise_if_cancelled()


async def test_one_call_is_cancelled_and_the_other_is_not() -> None:
    mine = context()
    seen: dict[str, bool] = {}
    cancelled = asyncio.Event()

    async def call(name: str) -> None:
        CURRENT_CALL.set(CallToken(asyncio.current_task()))
        try:
            await cancelled.wait()
        finally:
            seen[name] = mine.cancelled

    one, other = asyncio.create_task(call("one")), asyncio.create_task(call("other"))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait({one})
    cancelled.set()
    await other
    assert seen == {"one": True, "other": False}
    assert not mine.cancelled, "outside of a call nothing is cancelled"


async def test_a_thread_of_the_call_sees_that_it_was_cancelled() -> None:
    mine = context()
    started, go_on = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        seen.append(mine.cancelled)
        started.set()
        go_on.wait(60)
        seen.append(mine.cancelled)

    async def call() -> None:
        CURRENT_CALL.set(CallToken(asyncio.current_task()))
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            go_on.set()
            thread.join()

    task = asyncio.create_task(call())
    await asyncio.to_thread(started.wait, 60)
    task.cancel()
    await asyncio.wait({task})
    assert seen == [False, True]
