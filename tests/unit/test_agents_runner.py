from __future__ import annotations

import asyncio
import threading
import traceback
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from runner_ground import Plain, clock, doing, pool, raising, runner, turns, workers

from ostler.agents import Agent, AgentContext
from ostler.clock import Deadline
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.testing.clock import ManualClock

__all__ = ["clock", "pool", "workers"]

pytestmark = pytest.mark.anyio

COLOUR: ContextVar[str] = ContextVar("colour", default="none")


# --- the life of one ---------------------------------------------------------------------------------


class Async(Plain):
    async def initialize(self, context: AgentContext) -> None:  # type: ignore[override]  # an agent may be async where its base is not
        await asyncio.sleep(0)
        super().initialize(context)

    async def process(self, request: Any) -> Any:
        await asyncio.sleep(0)
        return super().process(request)

    async def final_state(self) -> Any:
        return super().final_state()

    async def shutdown(self) -> None:  # type: ignore[override]  # an agent may be async where its base is not
        super().shutdown()


@pytest.mark.parametrize("kind", [Plain, Async])
async def test_a_whole_life(kind: type[Plain], clock: ManualClock, workers: Executor | None) -> None:
    it = runner(kind, clock, workers)
    agent = it.make()
    assert it.make() is agent, "one object, made once"
    assert isinstance(agent, Plain)
    assert await it.run("initialize") is None
    assert await it.run("process", 21) == {"double": 42}
    assert await it.run("health") is None
    assert await it.run("final_state") == {"seen": ["fixer", 21]}
    assert await it.run("cleanup") == []
    assert await it.run("shutdown") is None
    assert await it.run("shutdown") is None
    assert agent.seen == ["fixer", 21, "shut"], "shut down once"


async def test_one_that_yields_its_answers_is_not_made(clock: ManualClock) -> None:
    class Yielding(Agent):
        def process(self, request: Any) -> Any:
            yield request

    with pytest.raises(AgentExecutionError, match="must return its answer"):
        await runner(Yielding, clock).run("initialize")


async def test_what_is_not_overridden_does_nothing_and_takes_no_thread(clock: ManualClock) -> None:
    class Idle(Agent):
        pass

    class NoWorkers(Executor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("not worth a thread")

    it = runner(Idle, clock, NoWorkers())
    for verb in ("initialize", "health", "final_state", "cleanup", "shutdown"):
        assert await it.run(verb) in (None, [])
    with pytest.raises(AgentExecutionError, match="Idle does not say how to process a request"):
        await it.run("process", 1)


async def test_plain_methods_run_on_workers_with_the_callers_variables(clock: ManualClock, pool: Executor) -> None:
    def process(_request: Any) -> tuple[str, str]:
        return threading.current_thread().name, COLOUR.get()

    COLOUR.set("red")
    thread, colour = await runner(doing(process), clock, pool).run("process", None)
    assert thread.startswith("worker")
    assert colour == "red"
    thread, colour = await runner(doing(process), clock).run("process", None)
    assert thread == threading.current_thread().name


async def test_a_plain_method_may_give_back_something_to_await(clock: ManualClock, workers: Executor | None) -> None:
    async def later() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    here = threading.current_thread().name
    assert await runner(doing(lambda _: later()), clock, workers).run("process", None) == here


async def test_an_unknown_verb_is_refused(clock: ManualClock) -> None:
    with pytest.raises(InvalidOperationError, match="cannot be asked to 'explode'"):
        await runner(Plain, clock).run("explode")


# --- what the agent raises ---------------------------------------------------------------------------


class PickyError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


async def test_an_error_keeps_its_type_its_text_and_its_trace(clock: ManualClock, workers: Executor | None) -> None:
    def process(_request: Any) -> None:
        raise ValueError("too few\0 files")

    with pytest.raises(AgentExecutionError) as caught:
        await runner(doing(process), clock, workers).run("process", None)
    assert str(caught.value) == "ValueError: too few\ufffd files"
    assert caught.value.exception_type == "ValueError"
    trace = caught.value.stack_trace or ""
    assert trace.splitlines()[-1] == "ValueError: too few\ufffd files"
    assert 'raise ValueError("too few' in trace
    assert "agents/runner.py" not in trace, "our own frames tell the author of the agent nothing"
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("error", "text", "kind"),
    [
        (KeyError("x"), "KeyError: 'x'", "KeyError"),
        (ValueError(), "ValueError", "ValueError"),
        (StopIteration(3), "RuntimeError: coroutine raised StopIteration", "RuntimeError"),
        (PickyError(), "PickyError: (its text cannot be shown)", f"{__name__}.PickyError"),
        (asyncio.CancelledError(), "CancelledError", "asyncio.exceptions.CancelledError"),
        (ExceptionGroup("two", [ValueError("a")]), "ExceptionGroup: two (1 sub-exception)", "ExceptionGroup"),
    ],
)
async def test_all_kinds_of_errors(
    error: BaseException, text: str, kind: str, clock: ManualClock, workers: Executor | None
) -> None:
    with pytest.raises(AgentExecutionError) as caught:
        await runner(doing(lambda _: raising(error)), clock, workers).run("process", None)
    assert (str(caught.value), caught.value.exception_type) == (text, kind)


async def test_an_async_agent_that_cancels_itself_is_no_cancellation(clock: ManualClock) -> None:
    class Gloomy(Agent):
        async def process(self, request: Any) -> Any:
            await asyncio.sleep(0)
            raise asyncio.CancelledError(request)

    with pytest.raises(AgentExecutionError, match="CancelledError: enough"):
        await runner(Gloomy, clock).run("process", "enough")


async def test_endless_texts_and_traces_are_clipped(clock: ManualClock) -> None:
    def deep(depth: int) -> None:
        if depth:
            (deep if depth % 2 else deeper)(depth - 1)
        else:
            raise ValueError("x" * 100_000)

    def deeper(depth: int) -> None:
        deep(depth)

    with pytest.raises(AgentExecutionError) as caught:
        await runner(doing(lambda _: deep(300)), clock).run("process", None)
    assert len(str(caught.value)) < 2100
    trace = caught.value.stack_trace or ""
    assert len(trace) < 17_000
    assert "characters left out" in trace
    assert trace.startswith("Traceback")


@pytest.mark.parametrize("crash", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_a_crash_passes_out_as_it_is(crash: BaseException, clock: ManualClock, workers: Executor | None) -> None:
    with pytest.raises(type(crash)) as caught:
        await runner(doing(lambda _: raising(crash)), clock, workers).run("process", None)
    assert caught.value is crash


async def test_an_execution_error_of_the_agent_itself_is_not_wrapped(clock: ManualClock) -> None:
    mine = AgentExecutionError("exit code 3")
    with pytest.raises(AgentExecutionError) as caught:
        await runner(doing(lambda _: raising(mine)), clock).run("process", None)
    assert caught.value is mine


async def test_another_agents_end_is_not_taken_for_this_ones(clock: ManualClock) -> None:
    with pytest.raises(AgentExecutionError, match="AgentGoneError: "):
        await runner(doing(lambda _: raising(AgentGoneError())), clock).run("process", None)


async def test_one_that_cannot_be_made_says_why(clock: ManualClock) -> None:
    with pytest.raises(AgentExecutionError, match="KeyError: 'TOKEN'"):
        runner(lambda: raising(KeyError("TOKEN")), clock).make()
    with pytest.raises(AgentExecutionError, match="fixer made 'Plain', which is no Agent"):
        runner(lambda: "Plain", clock).make()


async def test_an_error_is_picturable_without_its_frames(clock: ManualClock) -> None:
    """The error of an agent may be printed by its caller; the chain then shows both sides."""
    with pytest.raises(AgentExecutionError) as caught:
        await runner(doing(lambda _: raising(ValueError("inner"))), clock).run("process", None)
    assert "inner" in "".join(traceback.format_exception(caught.value))


# --- cancelling --------------------------------------------------------------------------------------


async def test_cancelling_reaches_async_code_and_comes_back(clock: ManualClock) -> None:
    seen: list[bool] = []

    class Long(Agent):
        def initialize(self, context: AgentContext) -> None:
            self.context = context

        async def process(self, request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(self.context.cancelled)
            return request

    it = runner(Long, clock)
    await it.run("initialize")
    task = asyncio.create_task(it.run("process", 1))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True]


async def test_what_fails_on_the_way_out_of_a_cancelled_call_does_not_hide_it(clock: ManualClock) -> None:
    class Clumsy(Agent):
        async def process(self, request: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError(request)

    task = asyncio.create_task(runner(Clumsy, clock).run("process", "oops"))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_out_inside_the_agent_is_its_own(clock: ManualClock) -> None:
    class Impatient(Agent):
        async def process(self, request: Any) -> Any:
            async with Deadline(clock, 1):
                await asyncio.Event().wait()
            return request

    task = asyncio.create_task(runner(Impatient, clock).run("process", 1))
    await turns()
    clock.advance(2)
    with pytest.raises(AgentExecutionError, match="TimeoutError"):
        await task


async def test_cancelling_a_plain_method_waits_until_it_has_come_back(clock: ManualClock, pool: Executor) -> None:
    started, go_on = threading.Event(), threading.Event()
    seen: list[bool] = []

    class Slow(Agent):
        def initialize(self, context: AgentContext) -> None:
            self.context = context

        def process(self, request: Any) -> Any:
            started.set()
            go_on.wait(60)
            seen.append(self.context.cancelled)
            self.context.raise_if_cancelled()
            return request

    it = runner(Slow, clock, pool)
    await it.run("initialize")
    task = asyncio.create_task(it.run("process", 1))
    await asyncio.to_thread(started.wait, 60)
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done(), "its thread still runs"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True]


async def test_a_cancelled_plain_method_that_gives_back_a_coroutine_leaves_none_behind(
    clock: ManualClock, pool: Executor
) -> None:
    started, go_on = threading.Event(), threading.Event()

    async def never() -> None: ...

    def process(_request: Any) -> Any:
        started.set()
        go_on.wait(60)
        return never()

    task = asyncio.create_task(runner(doing(process), clock, pool).run("process", 1))
    await asyncio.to_thread(started.wait, 60)
    task.cancel()
    await turns()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


class Held(Agent):
    """Notes each request, and works on it until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.calls: list[int] = []

    def process(self, request: Any) -> Any:
        self.calls.append(request)
        self.begun.release()
        return self.let_go.wait(60)


async def test_one_that_waits_for_a_worker_is_cancelled_before_it_begins(clock: ManualClock) -> None:
    agent = Held()
    with ThreadPoolExecutor(1) as one:
        it = runner(agent, clock, one)
        first, second = (asyncio.create_task(it.run("process", number)) for number in (1, 2))
        await asyncio.to_thread(agent.begun.acquire, timeout=10)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        agent.let_go.set()
        assert await first
    assert agent.calls == [1]


async def test_workers_that_are_closed_mean_that_the_agent_has_ended(clock: ManualClock, pool: Executor) -> None:
    pool.shutdown()
    with pytest.raises(AgentGoneError):
        await runner(doing(lambda _: 1), clock, pool).run("process", 1)


async def test_queued_work_that_is_dropped_means_that_the_agent_has_ended(clock: ManualClock, pool: Executor) -> None:
    agent = Held()
    it = runner(agent, clock, pool)
    tasks = [asyncio.create_task(it.run("process", number)) for number in range(3)]
    for _ in range(2):
        await asyncio.to_thread(agent.begun.acquire, timeout=10)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(AgentGoneError):
        await tasks[2]
    agent.let_go.set()
    assert await asyncio.gather(*tasks[:2]) == [True, True]


async def test_a_call_that_is_dropped_can_be_closed_from_anywhere(clock: ManualClock) -> None:
    class Long(Agent):
        async def process(self, request: Any) -> Any:
            await asyncio.Event().wait()
            return request

    work = runner(Long, clock).run("process", 1)
    copy_context().run(work.send, None)
    copy_context().run(work.close)


async def test_work_that_ends_because_the_agent_stops_is_gone_not_failed(
    clock: ManualClock, workers: Executor | None
) -> None:
    it = runner(doing(lambda _: it.context.raise_if_cancelled()), clock, workers)
    it.context.mark_stopping()
    with pytest.raises(AgentGoneError, match="stopped while it worked"):
        await it.run("process", 1)


# --- what the answers mean ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        (None, None),
        (True, None),
        (False, "reported unhealthy"),
        ("", "reported unhealthy"),
        ("no disk", "no disk"),
        ({"disk": 0}, "{'disk': 0}"),
        (0, "0"),
        ("x" * 5000, "x" * 1000 + "… (4000 more characters)"),
    ],
)
async def test_health(answer: Any, meaning: str | None, clock: ManualClock, workers: Executor | None) -> None:
    assert await runner(doing(lambda: answer, "health"), clock, workers).run("health") == meaning


async def test_health_that_raises_is_an_error(clock: ManualClock) -> None:
    with pytest.raises(AgentExecutionError, match="OSError: gone"):
        await runner(doing(lambda: raising(OSError("gone")), "health"), clock).run("health")
    with pytest.raises(AgentExecutionError, match="no text for you"):
        await runner(doing(PickyError, "health"), clock).run("health")


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ([1], "must answer a mapping or None, was \\[1\\]"),
        ({"a": object()}, "final_state.a must be a JSON value"),
        ({"a": float("nan")}, "final_state.a must be a finite number"),
        ({"a": "x" * 300_000}, "at most 256 KiB"),
    ],
)
async def test_a_final_state_must_be_json(state: Any, complaint: str, clock: ManualClock) -> None:
    with pytest.raises(AgentExecutionError, match=complaint):
        await runner(doing(lambda: state, "final_state"), clock).run("final_state")


async def test_a_final_state_is_a_copy(clock: ManualClock) -> None:
    state = {"files": ["a"]}
    kept = await runner(doing(lambda: state, "final_state"), clock).run("final_state")
    state["files"].append("b")
    assert kept == {"files": ["a"]}
