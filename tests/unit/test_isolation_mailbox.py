from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from uuid import UUID

import pytest

from ostler.agents import Message, MetricReported, Progress, Signal, TokensUsed, WaitAnswer, WaitAsked
from ostler.errors import AgentBusyError, AgentGoneError
from ostler.isolation import Exit, Verb
from ostler.isolation.mailbox import MAX_WAITING, MAX_WEIGHTY, Backlog, Mailbox
from ostler.model.attempt import AttemptOutcome

pytestmark = pytest.mark.anyio
QUESTION = WaitAsked(kind="human")


class RecordingListener:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.exits: list[Exit] = []
        self.asked_at: list[int] = []
        self.was_asked = asyncio.Event()
        self.enough: asyncio.Future[None] | None = None

    def on_message(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        assert attempt == 7
        self.messages.append(message)
        return self.enough

    async def on_question(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        assert attempt == 7
        self.asked_at.append(len(self.messages))
        self.was_asked.set()
        if wait.kind == QUESTION.kind:
            await asyncio.Event().wait()
        return WaitAnswer(outcome="answered")

    def on_report(self, attempt: int, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        raise AssertionError(attempt, calls, questions)

    def on_exit(self, attempt: int, how: Exit) -> None:
        assert attempt == 7
        self.exits.append(how)


@pytest.fixture
async def listener() -> RecordingListener:
    return RecordingListener()


@pytest.fixture
async def mailbox(listener: RecordingListener) -> Mailbox:
    return Mailbox(asyncio.get_running_loop(), listener, 7)


def test_the_oldest_news_make_room() -> None:
    backlog = Backlog()
    dropped = 0
    for number in range(MAX_WAITING + 10):
        dropped += backlog.add(MetricReported(name="n", value=number) if number % 2 else Progress(fraction=0.0))
    assert (dropped, len(backlog)) == (10, MAX_WAITING)
    dropped += sum(backlog.add(TokensUsed(count=number)) for number in range(20))
    assert (dropped, len(backlog)) == (30, MAX_WAITING)
    taken = [backlog.take() for _ in range(len(backlog))]
    assert taken[0] == Progress(fraction=0.0)
    assert taken[1] == MetricReported(name="n", value=31.0)
    assert taken[-20:] == [TokensUsed(count=number) for number in range(20)]
    assert not backlog


def test_what_counts_never_makes_room_but_is_refused_in_the_end() -> None:
    backlog = Backlog()
    assert sum(backlog.add(Signal(name=str(number))) for number in range(MAX_WEIGHTY)) == 0
    assert backlog.add(Progress(fraction=0.5)) == 1, "there is no room, so it is the oldest news itself"
    with pytest.raises(AgentBusyError, match="more than its manager can hear"):
        backlog.add(Signal(name="one too many"))
    assert [backlog.take() for _ in range(3)] == [Signal(name=name) for name in ("0", "1", "2")]


async def test_many_threads_may_speak_and_each_is_heard_in_order(mailbox: Mailbox, listener: RecordingListener) -> None:
    def speak(name: str) -> None:
        for number in range(300):
            mailbox.say(Signal(name=name, payload={"number": number}))

    await asyncio.gather(*(asyncio.to_thread(speak, name) for name in "abc"))
    mailbox.flush()
    for name in "abc":
        mine = [
            message.payload for message in listener.messages if isinstance(message, Signal) and message.name == name
        ]
        assert mine == [{"number": number} for number in range(300)]
    assert mailbox.dropped == 0


async def test_a_chatterbox_is_heard_in_several_turns(mailbox: Mailbox, listener: RecordingListener) -> None:
    for number in range(900):
        mailbox.say(Signal(name=str(number)))
    heard = []
    while len(listener.messages) < 900:
        await asyncio.sleep(0)
        heard.append(len(listener.messages))
    assert len(heard) > 3
    assert listener.messages == [Signal(name=str(number)) for number in range(900)]


async def test_no_message_follows_until_the_listener_can_take_more(
    mailbox: Mailbox, listener: RecordingListener
) -> None:
    messages = [Signal(name=str(number)) for number in range(10)]
    enough = listener.enough = asyncio.get_running_loop().create_future()
    for message in messages:
        mailbox.say(message)
    mailbox.catch_up()
    await asyncio.sleep(0)
    assert listener.messages == messages[:1]
    listener.enough = None
    enough.set_result(None)
    await asyncio.sleep(0)
    mailbox.catch_up()
    assert listener.messages == messages


async def test_what_was_dropped_is_counted_and_said(
    mailbox: Mailbox, listener: RecordingListener, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAX_WAITING * 3):
        mailbox.say(Progress(fraction=number / 10_000))
    mailbox.flush()
    assert mailbox.dropped == MAX_WAITING * 2
    assert len(listener.messages) == MAX_WAITING
    assert "2000 messages were dropped" in caplog.text


async def test_after_the_end_there_is_silence(mailbox: Mailbox, listener: RecordingListener) -> None:
    mailbox.say(Signal(name="before"))
    mailbox.tell_exit(Exit(outcome=AttemptOutcome.ERROR))
    mailbox.say(Signal(name="after"))
    await asyncio.sleep(0)
    mailbox.flush()
    assert listener.messages == [Signal(name="before")]
    assert len(listener.exits) == 1
    with pytest.raises(AgentGoneError):
        await mailbox.ask(QUESTION)


async def test_a_question_comes_after_what_was_said_before(mailbox: Mailbox, listener: RecordingListener) -> None:
    async def speak() -> str:
        mailbox.say(Signal(name="before"))
        return (await mailbox.ask(WaitAsked(kind="quick"))).outcome

    assert await speak() == "answered"
    assert await asyncio.to_thread(asyncio.run, speak()) == "answered"
    assert listener.asked_at == [1, 2]


async def test_who_still_waits_when_the_manager_lets_go_is_told(mailbox: Mailbox, listener: RecordingListener) -> None:
    waiting = asyncio.ensure_future(asyncio.to_thread(asyncio.run, mailbox.ask(QUESTION)))
    await listener.was_asked.wait()
    mailbox.close()
    with pytest.raises(AgentGoneError):
        await waiting


def test_a_manager_that_is_gone_is_no_fault_of_the_agent() -> None:
    home = asyncio.new_event_loop()
    mailbox = Mailbox(home, RecordingListener(), 7)
    home.close()
    mailbox.say(Signal(name="anybody?"))
    with pytest.raises(AgentGoneError):
        asyncio.run(mailbox.ask(QUESTION))
