"""What an agent process sends: whatever comes is a message or a fault, and is delivered in turns."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.agent_process.framing import ProtocolError, encode
from ostler.isolation import Verb
from ostler.isolation.held import validate
from ostler.isolation.held.channel import Channel
from ostler.model.context import MAX_BYTES, json_faults

ASK = UUID(int=1)
ODD: st.SearchStrategy[Any] = st.sampled_from(
    ["\0", "\ud800", "x", float("inf"), float("nan"), 10**400, -(10**400), 1e308, True, None, [], {}]
)
VALUES = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.just("\ud800"), inner),
    max_leaves=10,
)
WORDS = st.sampled_from(["kind", "name", "value", "fraction", "message", "details", "payload", "count", "model", "id"])
KINDS = st.sampled_from(["progress", "signal", "tokens", "metric", "human"])


@given(st.dictionaries(WORDS, VALUES), KINDS)
def test_whatever_is_said_is_a_message_or_a_fault(said: dict[str, Any], kind: str) -> None:
    asked = {"timeout_seconds": said.get("value"), "detail": said.get("payload"), "reason": said.get("message")}
    for read in (
        lambda: validate.message_of({**said, "kind": kind}),
        lambda: validate.wait_of({**asked, "kind": kind}, ASK),
        lambda: validate.outcome_of({"error": said}),
        lambda: validate.calls_of({"calls": said.get("details")}),
        lambda: validate.ask_key(said.get("id")),
    ):
        try:
            read()
        except ProtocolError:
            continue


@given(st.dictionaries(st.text(max_size=3) | st.just("\ud800"), VALUES))
def test_a_message_is_refused_with_the_first_fault_of_its_payload(payload: dict[str, Any]) -> None:
    came = json.loads(json.dumps(payload))
    faults = list(json_faults("payload", came))
    said = {"kind": "signal", "name": "x", "payload": came}
    if not faults:
        validate.message_of(said)
        return
    with pytest.raises(ProtocolError) as raised:
        validate.message_of(said)
    assert str(raised.value) == faults[0].message


def test_a_call_is_known_by_its_key() -> None:
    assert validate.read_key(validate.key_of(Verb.PROCESS, ASK)) == (Verb.PROCESS, ASK)
    assert validate.calls_of({"calls": [validate.key_of(Verb.HEALTH, ASK)]}) == {ASK: Verb.HEALTH}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "progress", "fraction": 2},
        {"kind": "progress", "fraction": True},
        {"kind": "progress", "message": 7},
        {"kind": "progress", "details": [1]},
        {"kind": "signal"},
        {"kind": "signal", "name": "x" * 10_000},
        {"kind": "signal", "name": "two\nlines"},
        {"kind": "signal", "name": "x", "payload": {"a": "\0"}},
        {"kind": "tokens", "count": -1},
        {"kind": "tokens", "count": 1.5},
        {"kind": "tokens", "count": 1, "number": "7"},
        {"kind": "signal", "name": "x", "number": -1},
        {"kind": "metric", "name": "x", "value": float("inf")},
        {"kind": "rumour"},
        {},
    ],
)
def test_what_is_no_message_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        validate.message_of(fields)


@pytest.mark.parametrize("answer", [{}, {"error": {}}, {"error": "no"}, {"crash": None}])
def test_what_is_no_answer_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        validate.outcome_of(answer)


@pytest.mark.parametrize("question", [{}, {"kind": "human", "timeout_seconds": "soon"}, {"kind": "human", "call": 3}])
def test_what_is_no_question_is_refused(question: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        validate.wait_of(question, ASK)


@pytest.mark.parametrize("welcome", [{}, {"calls": 3}, {"calls": [3]}, {"calls": ["process:x"]}])
def test_what_is_no_welcome_is_refused(welcome: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        validate.calls_of(welcome)


def test_what_is_nested_or_asked_too_long_is_a_fault() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"x": deep}
    with pytest.raises(ProtocolError, match="nested at most"):
        validate.message_of({"kind": "signal", "name": "x", "payload": deep})
    with pytest.raises(ProtocolError, match="at most 256 KiB"):
        validate.wait_of({"kind": "human", "detail": {"x": "y" * MAX_BYTES}}, ASK)
    assert validate.wait_of({"kind": "human", "detail": {"x": "y" * (MAX_BYTES - 100)}}, ASK).detail


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [0.0, 0.005])
async def test_a_crowd_of_messages_is_heard_in_turns(seconds: float) -> None:
    mine, theirs = pair()
    heard: list[Any] = []

    def hear(message: dict[str, Any]) -> None:
        heard.append(message["n"])
        time.sleep(seconds)  # one that takes long to hear

    channel = Channel(mine, hear, lambda _: None)
    for number in range(8):
        theirs.send(encode({"t": "say", "n": number, "body": "y" * 10_000}))
    most = before = turns = 0
    while len(heard) < 8:
        await asyncio.sleep(0)
        most, before, turns = max(most, len(heard) - before), len(heard), turns + 1
        assert turns < 1_000_000
    assert heard == list(range(8))
    assert not seconds or most == 1
    channel.close()
    theirs.close()


@pytest.mark.anyio
async def test_a_channel_that_is_held_can_be_drained_and_closed() -> None:
    mine, theirs = pair()
    heard: list[Any] = []
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hear(message: dict[str, Any]) -> None:
        heard.append(message["n"])
        channel.hold(room)

    channel = Channel(mine, hear, lambda _: None)
    for number in range(6):
        theirs.send(encode({"t": "say", "n": number, "body": "y" * 10_000}))
    while not heard:  # noqa: ASYNC110 - turn by turn, for it is to be held in between
        await asyncio.sleep(0)
    assert heard == [0]
    channel.drain()
    assert heard == list(range(6))
    channel.close()
    theirs.close()


@pytest.mark.anyio
async def test_what_came_before_a_fault_is_heard() -> None:
    mine, theirs = pair()
    heard: list[Any] = []
    closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    Channel(mine, lambda message: heard.append(message["n"]), closed.set_result)
    theirs.send(encode({"t": "say", "n": 1}) + b"no message\n" + encode({"t": "say", "n": 2}))
    assert "a line is not JSON" in (await closed or "")
    assert heard == [1]
    theirs.close()


def pair() -> tuple[socket.socket, socket.socket]:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    return mine, theirs
