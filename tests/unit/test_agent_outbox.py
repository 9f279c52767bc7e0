"""What an agent process holds until its manager has it, and in which order a new manager gets it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.agent_process import outbox as outbox_module
from ostler.agent_process.framing import encode
from ostler.agent_process.outbox import MAX_BYTES, MAX_HELD, Outbox
from ostler.agents import Progress, Signal, TokensUsed
from ostler.errors import AgentBusyError, ValidationError

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.run_until_complete(asyncio.sleep(0))  # what it was asked to do
    made.close()


@pytest.fixture
def outbox(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Outbox:
    return Outbox(loop, str(tmp_path / "unsent"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, its = socket.socketpair()
    for sock in (mine, its):
        sock.setblocking(False)
    with mine, its:
        yield mine, its


def received(sock: socket.socket) -> list[dict[str, Any]]:
    data = b""
    while True:
        try:
            piece = sock.recv(1 << 18)
        except BlockingIOError:
            piece = b""
        if not piece:
            return [json.loads(line) for line in data.splitlines()]
        data += piece


def test_a_new_manager_gets_the_welcome_then_messages_then_answers(outbox: Outbox, ends: Ends) -> None:
    outbox.say(Signal(name="a"))
    outbox.say(Progress(fraction=0.5))  # no manager hears it
    outbox.answer("one", encode({"t": "answer", "id": "one", "ok": 1}))
    outbox.say(TokensUsed(count=1))
    outbox.answer("two", encode({"t": "answer", "id": "two", "ok": 2}))
    outbox.acknowledged(["one"], 1)
    outbox.connect(ends[1], {"t": "welcome"})
    welcome, tokens, answer = received(ends[0])
    assert welcome == {"t": "welcome", "dropped": 1}
    assert (tokens["kind"], tokens["number"]) == ("tokens", 2)
    assert answer["id"] == "two"
    assert outbox.repeat_answer("two")
    assert not outbox.repeat_answer("one")
    outbox.say(Progress(fraction=0.5))
    outbox.say(Signal(name="b"))
    assert [message.get("number") or message["t"] for message in received(ends[0])] == ["answer", "say", 3]


def test_more_than_can_be_held_is_refused(outbox: Outbox, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MAX_HELD, MAX_BYTES) == (100_000, 8 << 20)
    monkeypatch.setattr(outbox_module, "MAX_HELD", 5)
    outbox.connect(ends[1], {"t": "welcome"})
    for _ in range(5):
        outbox.say(Signal(name="a"))
    with pytest.raises(AgentBusyError, match="says more than its manager can hear"):
        outbox.say(TokensUsed(count=1))  # that it was sent does not mean that it was committed
    outbox.acknowledged((), 2)
    outbox.say(Signal(name="b"))
    assert received(ends[0])[-1]["number"] == 6, "a refused message takes no number"


def test_a_signal_that_is_too_long_is_refused(outbox: Outbox) -> None:
    for length in (1 << 20, 17 << 20):
        with pytest.raises(ValidationError, match="to leave its process"):
            outbox.say(Signal(name="a", payload={"text": "v" * length}))


def test_news_beyond_their_bytes_make_room(outbox: Outbox, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_BYTES", 1 << 20)
    outbox.connect(ends[1], {"t": "welcome"})
    for number in range(100):
        outbox.say(Progress(fraction=number / 100, details={"text": "v" * 60_000}))
    assert outbox.dropped > 50


def test_what_is_kept_on_a_full_disk_are_whole_lines(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.say(Signal(name="first"))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, body: write(fd, body[:10]))
    outbox.say(Signal(name="second"))
    monkeypatch.undo()
    outbox.say(Signal(name="third"))
    lines = [json.loads(line) for line in (tmp_path / "unsent").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["first", "third"]


def test_a_descriptor_above_a_thousand_is_waited_for(outbox: Outbox, ends: Ends) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    high = socket.socket(fileno=fcntl.fcntl(ends[1].fileno(), fcntl.F_DUPFD_CLOEXEC, 1500))
    try:
        outbox.connect(high, {"t": "welcome"})
        while outbox._buffer == b"":  # noqa: SLF001 - until the socket is full
            outbox.say(Signal(name="a", payload={"text": "v" * 60_000}))
        outbox.drain(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        outbox.disconnect(spool=False)
