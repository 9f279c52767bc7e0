"""What an agent says, read from the wire: whatever comes is a message or a fault, and nothing else; and in turns."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ostler.isolation.process.channel import Channel

from ostler.isolation import wire
from ostler.isolation.process import hearing
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
        lambda: hearing.message_of({**said, "kind": kind}),
        lambda: hearing.wait_of({**asked, "kind": kind}, ASK),
        lambda: hearing.outcome_of({"error": said}),
        lambda: hearing.calls_of({"calls": said.get("details")}),
        lambda: hearing.ask_key(said.get("id")),
    ):
        try:
            read()
        except wire.WireError:
            continue


@given(st.dictionaries(st.text(max_size=3) | st.just("\ud800"), VALUES))
def test_a_message_is_refused_with_the_first_fault_of_its_payload(payload: dict[str, Any]) -> None:
    came = json.loads(json.dumps(payload))
    faults = list(json_faults("payload", came))
    said = {"kind": "signal", "name": "x", "payload": came}
    if not faults:
        hearing.message_of(said)
        return
    with pytest.raises(wire.WireError) as raised:
        hearing.message_of(said)
    assert str(raised.value) == faults[0].message


def test_what_is_nested_or_asked_too_long_is_a_fault() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"x": deep}
    with pytest.raises(wire.WireError, match="nested at most"):
        hearing.message_of({"kind": "signal", "name": "x", "payload": deep})
    with pytest.raises(wire.WireError, match="at most 256 KiB"):
        hearing.wait_of({"kind": "human", "detail": {"x": "y" * MAX_BYTES}}, ASK)
    assert hearing.wait_of({"kind": "human", "detail": {"x": "y" * (MAX_BYTES - 100)}}, ASK).detail


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [0.0, 0.005])
async def test_a_crowd_of_packets_is_heard_in_turns(seconds: float) -> None:
    mine, theirs = wire.channel()
    heard: list[Any] = []

    def hear(message: dict[str, Any]) -> None:
        heard.append(message["n"])
        time.sleep(seconds)  # one that takes long to hear

    channel = Channel(mine, 1, 1, hear, lambda _: None)
    body = "y" * 20_000
    for number in range(8):
        theirs.send(next(wire.packets(wire.encode({"t": "say", "n": number, "body": body}), 1, 1)))
    most = before = turns = 0
    while len(heard) < 8:
        await asyncio.sleep(0)
        most, before, turns = max(most, len(heard) - before), len(heard), turns + 1
        assert turns < 1_000_000
    assert heard == list(range(8))
    assert most <= (4 if not seconds else 1)
    channel.close()
    theirs.close()


@pytest.mark.anyio
async def test_a_channel_that_rests_can_be_drained_and_closed() -> None:
    mine, theirs = wire.channel()
    heard: list[Any] = []
    channel = Channel(mine, 1, 1, lambda message: heard.append(message["n"]), lambda _: None)
    for number in range(6):
        theirs.send(next(wire.packets(wire.encode({"t": "say", "n": number, "body": "y" * 40_000}), 1, 1)))
    while not heard:  # noqa: ASYNC110 - turn by turn, for it is to rest in between
        await asyncio.sleep(0)
    channel.drain()
    assert heard == list(range(6))
    channel.close()
    theirs.close()
    await asyncio.sleep(0.01)
