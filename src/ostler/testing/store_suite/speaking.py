"""What an agent says of itself, what is answered to it, and who hears that the log has grown."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import InvalidOperationError, OstlerError, StaleWriterError, ValidationError
from ostler.model import (
    AgentInstance,
    AgentMetrics,
    AgentProgressEvent,
    AgentSignalEvent,
    AgentState,
    Wait,
    WaitKind,
)
from ostler.store import Seams, Store
from ostler.store.commands import (
    Command,
    EndWait,
    OpenWait,
    RecordAudit,
    ReportMetrics,
    ReportProgress,
    ReportSignal,
    ReportSignals,
)
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import (
    HOME,
    OpenStore,
    StoreGround,
    brought_to,
    current,
    moved,
    reserved,
    whole_log,
)

ANY = UUID(int=1)
HALF_A_CONTEXT = "x" * (200 * 1024)


def asked(clock: ManualClock, number: int, one: AgentInstance, **fields: Any) -> Wait:
    known: dict[str, Any] = {"workspace_id": HOME, "kind": WaitKind.AGENT, "created_at": clock.wall()}
    return Wait(wait_id=UUID(int=number), instance_id=one.instance_id, **known, **fields)


async def until(heard: list[int], newest: int) -> None:
    """A listener is told on another thread; the time limit of the test bounds the wait."""
    while not heard or heard[-1] != newest:  # noqa: ASYNC110 - the writer's thread sets no event of ours
        await asyncio.sleep(0.001)


class SpeakingContract(StoreGround):
    async def test_progress_is_an_event_and_no_act(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.PROCESSING)
        audit = await store.audit_head()
        clock.advance(3)
        said: dict[str, Any] = {"fraction": 0.25, "message": "a\0 quarter", "details": {"files": [1, None]}}
        new = await store.commit(ReportProgress(instance_id=one.instance_id, attempt=1, **said))
        assert (new.version, new.updated_at) == (one.version + 1, clock.wall())
        assert await current(store, one.instance_id) == new
        event = (await whole_log(store))[-1]
        assert isinstance(event, AgentProgressEvent)
        assert (event.fraction, event.message) == (0.25, "a\ufffd quarter")
        assert (event.details, event.version, event.attempt) == ({"files": [1, None]}, new.version, 1)
        assert await store.audit_head() == audit

    async def test_progress_may_be_little_or_long(self, store: Store) -> None:
        one = await brought_to(store, AgentState.READY)
        for fraction in (None, 0, 1, 0.5):
            await store.commit(ReportProgress(instance_id=one.instance_id, fraction=fraction))
        await store.commit(ReportProgress(instance_id=one.instance_id, message="x\ud800" * 100_000))
        told = [event for event in await whole_log(store) if isinstance(event, AgentProgressEvent)]
        assert [event.fraction for event in told] == [None, 0.0, 1.0, 0.5, None]
        assert told[-1].message is not None
        assert told[-1].message.endswith("more characters)")
        assert len(told[-1].message) < 2100

    async def test_a_signal_carries_its_name_and_its_payload(self, store: Store) -> None:
        one = await brought_to(store, AgentState.WAITING)
        audit = await store.audit_head()
        await store.commit(ReportSignal(instance_id=one.instance_id, name="need-review", payload={"pr": 7}))
        new = await store.commit(ReportSignal(instance_id=one.instance_id, name="bare"))
        first, second = (await whole_log(store))[-2:]
        assert isinstance(first, AgentSignalEvent)
        assert (first.name, first.payload) == ("need-review", {"pr": 7})
        assert isinstance(second, AgentSignalEvent)
        assert (second.name, second.payload, second.version) == ("bare", None, new.version)
        assert await store.audit_head() == audit

    async def test_several_signals_are_each_an_event_in_their_order(self, store: Store) -> None:
        one = await brought_to(store, AgentState.PROCESSING)
        said = tuple((f"n-{number}", {"n": number} if number % 2 else None) for number in range(2000))
        new = await store.commit(ReportSignals(instance_id=one.instance_id, attempt=1, signals=said))
        assert await current(store, one.instance_id) == new
        assert new.version == one.version + len(said)
        told = [event for event in await whole_log(store) if isinstance(event, AgentSignalEvent)]
        assert tuple((event.name, event.payload) for event in told) == said
        assert [event.version for event in told] == list(range(one.version + 1, new.version + 1))
        assert await store.commit(ReportSignals(instance_id=one.instance_id, signals=())) == new

    async def test_only_the_living_speak_and_only_the_current_attempt(self, store: Store) -> None:
        for state in AgentState:
            one = await brought_to(store, state)
            words: list[Command[AgentInstance]] = [
                ReportProgress(instance_id=one.instance_id, fraction=0.5),
                ReportSignal(instance_id=one.instance_id, name="n"),
                ReportSignals(instance_id=one.instance_id, signals=(("n", None),)),
            ]
            for word in words:
                if one.is_active:
                    await store.commit(word)
                    continue
                with pytest.raises(InvalidOperationError, match=f"is {state}"):
                    await store.commit(word)
        one = await reserved(store)
        with pytest.raises(StaleWriterError):
            await store.commit(ReportSignal(instance_id=one.instance_id, name="n", attempt=2))

    async def test_unfit_words_are_refused_by_field(self, store: Store) -> None:
        before = await store.head()
        wrong: Any = "wrong"
        bad: list[tuple[str, Command[Any]]] = [
            *(
                ("fraction must be a number from 0 to 1", ReportProgress(instance_id=ANY, fraction=fraction))
                for fraction in (-0.1, 1.1, float("nan"), float("inf"), wrong, True, 10**400)
            ),
            ("message must be text", ReportProgress(instance_id=ANY, message=5)),  # type: ignore[arg-type]  # wrong on purpose
            ("details must be a mapping", ReportProgress(instance_id=ANY, details=wrong)),
            ("details.a must be a JSON value", ReportProgress(instance_id=ANY, details={"a": object()})),
            ("instance_id must be a UUID", ReportProgress(instance_id=wrong)),
            ("name must be text", ReportSignal(instance_id=ANY, name=5)),  # type: ignore[arg-type]  # wrong on purpose
            ("name must have 1 to 200 characters", ReportSignal(instance_id=ANY, name="")),
            ("name must be printable", ReportSignal(instance_id=ANY, name="a\nb")),
            ("payload must be at most 256 KiB", ReportSignal(instance_id=ANY, name="n", payload={"a": "x" * 2**20})),
            ("signals must be pairs", ReportSignals(instance_id=ANY, signals=wrong)),
            ("signals must be pairs", ReportSignals(instance_id=ANY, signals=(wrong,))),
            ("signals.1.name must be text", ReportSignals(instance_id=ANY, signals=(("n", None), (5, None)))),  # type: ignore[arg-type]  # wrong on purpose
            ("signals.0.payload must be a mapping", ReportSignals(instance_id=ANY, signals=(("n", wrong),))),
            ("answer must be a mapping", EndWait(wait_id=ANY, outcome="o", answer=wrong)),
            ("answer.a must not contain NUL", EndWait(wait_id=ANY, outcome="o", answer={"a": "\0"})),
        ]
        for said, command in bad:
            with pytest.raises(ValidationError) as refused:
                await store.commit(command)
            (fault,) = refused.value.faults
            assert said in fault.message
        assert await store.head() == before

    async def test_whose_memory_is_measured_is_kept_with_the_sample(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.READY)
        sample = AgentMetrics(sampled_at=clock.wall(), memory_bytes=5, memory_is_shared=True)
        await store.commit(ReportMetrics(instance_id=one.instance_id, metrics=sample))
        assert (await current(store, one.instance_id)).metrics == sample

    # --- waits ----------------------------------------------------------------------------------

    async def test_an_answer_is_kept_with_the_wait_it_ends(self, store: Store, clock: ManualClock) -> None:
        one = await brought_to(store, AgentState.WAITING)
        await store.commit(OpenWait(wait=asked(clock, 1, one, detail={"question": "why?"})))
        await store.commit(OpenWait(wait=asked(clock, 2, one)))
        first = await store.commit(EndWait(wait_id=UUID(int=1), outcome="answered", answer={"text": ["so"]}))
        assert first.detail == {"question": "why?", "answer": {"text": ["so"]}}
        second = await store.commit(EndWait(wait_id=UUID(int=2), outcome="answered", answer={}))
        assert second.detail == {"answer": {}}
        assert [await store.get_wait(UUID(int=number)) for number in (1, 2, 3)] == [first, second, None]

    async def test_an_answer_that_does_not_fit_beside_the_question_leaves_the_wait_open(
        self, store: Store, clock: ManualClock
    ) -> None:
        one = await brought_to(store, AgentState.WAITING)
        await store.commit(OpenWait(wait=asked(clock, 1, one, detail={"question": HALF_A_CONTEXT})))
        with pytest.raises(ValidationError, match="detail must be at most 256 KiB"):
            await store.commit(EndWait(wait_id=UUID(int=1), outcome="answered", answer={"text": HALF_A_CONTEXT}))
        assert len(await store.open_waits()) == 1

    async def test_waits_are_found_by_the_instance_they_hold(self, store: Store, clock: ManualClock) -> None:
        one, other = await reserved(store), await reserved(store)
        due: list[tuple[int, AgentInstance, int | None]] = [
            (1, one, 9), (2, other, 1), (3, one, 3), (4, one, None), (5, other, None), (6, one, 5),
        ]  # fmt: skip
        for number, about, minutes in due:
            when = None if minutes is None else clock.wall() + timedelta(minutes=minutes)
            await store.commit(OpenWait(wait=asked(clock, number, about, due_at=when)))
        await store.commit(EndWait(wait_id=UUID(int=6), outcome="done"))

        async def found(**wanted: Any) -> list[int]:
            return [wait.wait_id.int for wait in await store.open_waits(**wanted)]

        assert await found() == [2, 3, 1, 4, 5]
        assert await found(instance_id=one.instance_id) == [3, 1, 4]
        assert await found(instance_id=other.instance_id) == [2, 5]
        assert await found(instance_id=UUID(int=404)) == []
        soon = clock.wall() + timedelta(minutes=4)
        assert await found(instance_id=one.instance_id, due_until=soon) == [3]
        seen: list[Wait] = []
        while page := await store.open_waits(instance_id=one.instance_id, limit=1, after=seen[-1] if seen else None):
            seen += page
        assert [wait.wait_id.int for wait in seen] == [3, 1, 4]

    # --- listeners ------------------------------------------------------------------------------

    async def test_a_listener_hears_of_the_newest_event_once_the_caller_is_answered(self, store: Store) -> None:
        heard: list[int] = []
        end = store.subscribe(heard.append)
        one = await reserved(store)
        await until(heard, 1)
        await moved(store, one, AgentState.FAILED)
        await moved(store, one, AgentState.TERMINATED)  # two events, told once
        await until(heard, 4)
        assert heard == [1, 2, 4]
        await asyncio.gather(*(reserved(store) for _ in range(20)))
        await until(heard, 24)
        assert (await store.head()).sequence == 24
        assert heard == sorted(set(heard))
        end()
        end()
        other: list[int] = []
        store.subscribe(other.append)
        await reserved(store)
        await until(other, 25)
        assert heard[-1] == 24

    async def test_a_commit_without_events_is_not_told(self, store: Store) -> None:
        heard: list[int] = []
        store.subscribe(heard.append)
        await store.commit(RecordAudit(what="look", about="door"))
        with pytest.raises(OstlerError):
            await store.commit(ReportSignal(instance_id=ANY, name="n"))
        await reserved(store)
        await until(heard, 1)
        assert heard == [1]

    async def test_what_a_listener_hears_of_can_be_read(self, open_store: OpenStore, seams: Seams) -> None:
        """It is durable by then: also somebody else sees it."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        async with open_store(seams) as store, open_store(seams) as other:

            def listen(_sequence: int) -> None:
                loop.call_soon_threadsafe(told.set)

            store.subscribe(listen)
            making = asyncio.ensure_future(reserved(store))
            await told.wait()
            assert (await other.head()).sequence == 1
            await making

    async def test_a_listener_that_fails_is_not_called_again_and_harms_nobody(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls: list[str] = []

        def failing(error: BaseException) -> Callable[[int], None]:
            def listen(_sequence: int) -> None:
                calls.append(type(error).__name__)
                raise error

            return listen

        heard: list[int] = []
        ends = [store.subscribe(failing(one)) for one in (ZeroDivisionError(), asyncio.CancelledError(), SystemExit())]
        store.subscribe(heard.append)
        with caplog.at_level(logging.ERROR):
            await reserved(store)
            await reserved(store)
            await until(heard, 2)
        assert sorted(calls) == ["CancelledError", "SystemExit", "ZeroDivisionError"]
        assert heard == [1, 2]
        assert sum("will not be called again" in record.getMessage() for record in caplog.records) == 3
        for end in ends:
            end()

    async def test_the_same_listener_may_listen_twice_and_outlasts_the_store(
        self, open_store: OpenStore, seams: Seams
    ) -> None:
        heard: list[int] = []
        again = open_store(seams)
        once, _ = again.subscribe(heard.append), again.subscribe(heard.append)
        async with again:
            await reserved(again)
        once()
        async with again:
            await reserved(again)
        assert heard == [1, 1, 2]
