"""What an agent process holds until its manager has it, and in which order a new manager gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ostler.isolation.inside.speaking import Letter, Outbox, Speaker

from ostler.agents import Progress, Signal, TokensUsed
from ostler.errors import AgentBusyError
from ostler.isolation import backlog, wire
from ostler.isolation.backlog import MAX_WEIGHTY


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def taken(outbox: Outbox) -> list[Any]:
    """All that waits, in its order: numbers, fractions, and the text of letters."""
    found: list[Any] = []
    while (one := outbox.next()) is not None:
        match one[1]:
            case Letter(body=body):
                found.append(body.decode())
            case Progress(fraction=fraction):
                found.append(fraction)
            case Signal(number=number) | TokensUsed(number=number):
                found.append(number)
    return found


def test_what_counts_is_numbered_and_held_until_it_is_acknowledged() -> None:
    outbox = Outbox()
    outbox.add(Signal(name="a"))
    outbox.add(Progress(fraction=0.5))
    outbox.add(TokensUsed(count=1))
    outbox.add_letter(b"answer")
    outbox.add(Signal(name="b"))
    assert taken(outbox) == [1, 0.5, 2, "answer", 3]
    assert taken(outbox) == []
    outbox.forget(1)
    outbox.add(Progress(fraction=0.75))
    outbox.repeat(None, [b"answer", b"question"])
    assert taken(outbox) == [2, 3, 0.75, "answer", "question"]
    outbox.forget(7)
    outbox.repeat(None, [])
    assert taken(outbox) == []
    outbox.add(Signal(name="c"))
    assert taken(outbox) == [4]


def test_what_did_not_get_through_is_said_again_once() -> None:
    outbox = Outbox()
    for fraction in (0.1, 0.2):
        outbox.add(Progress(fraction=fraction))
    outbox.add(Signal(name="a"))
    outbox.repeat(outbox.next(), [])  # type: ignore[arg-type]  # it is news, and no letter
    assert taken(outbox) == [0.1, 0.2, 1]
    outbox.repeat((3, Signal(name="a", number=1)), [])
    assert taken(outbox) == [1], "what is held is not put back as well"


def test_more_than_can_be_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_WEIGHTY == 100_000
    monkeypatch.setattr("ostler.isolation.inside.speaking.MAX_WEIGHTY", 5)
    monkeypatch.setattr(backlog, "MAX_WEIGHTY", 5)
    outbox = Outbox()
    for _ in range(5):
        outbox.add(Signal(name="a"))
    taken(outbox)  # that it was sent does not mean that it was committed
    with pytest.raises(AgentBusyError, match="says more than its manager can hear"):
        outbox.add(TokensUsed(count=1))
    outbox.add(Progress(fraction=0.5))
    outbox.forget(2)
    outbox.add(Signal(name="b"))
    assert taken(outbox) == [0.5, 6], "a refused message takes no number"


def test_a_new_manager_gets_the_state_then_messages_then_answers(loop: asyncio.AbstractEventLoop) -> None:
    ours, its = wire.channel()
    with ours, its:
        speaker = Speaker(its, loop, 1, 1)
        speaker.say(Signal(name="a"))
        speaker.answer("one", wire.encode({"t": "answer", "id": "one", "ok": 1}))
        speaker.say(Signal(name="b"))
        speaker.answer("two", wire.encode({"t": "answer", "id": "two", "ok": 2}))
        speaker.acknowledged(["one"], 1)
        speaker.greet(2, {"t": "state", "calls": []})
        assert speaker.answer_again("two")
        assert not speaker.answer_again("one")
        ours.setblocking(False)
        heard = []
        while True:
            try:
                packet = wire.read(wire.receive(ours) or b"")
            except BlockingIOError:
                break
            heard.append((packet.epoch, wire.decoded(packet.body)))
    assert [one.get("name") or one.get("id") for epoch, one in heard if epoch == 1] == ["a", "one", "b", "two"]
    again = [one for epoch, one in heard if epoch == 2]
    assert [one["t"] for one in again] == ["state", "say", "answer", "answer"]
    assert (again[1]["number"], again[2]["id"], again[3]["id"]) == (2, "two", "two")
