"""Ask the brains of a turn: plain ones in threads, async ones in tasks, each within its time limit.

One worker thread asks plain brains in order, turn after turn. The event loop looks at it every few milliseconds. Where
its brains wait instead of computing, up to `concurrency` threads share the rest of the turn. A brain over its limit is
abandoned: its view is closed, its answer is ignored, and its thread ends when the brain returns, because a thread
cannot be ended from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.agents.failures import MAX_MESSAGE, error_place, error_text
from ostler.errors import SimulationError
from ostler.model.text import clipped
from ostler.simulation.brains import Call
from ostler.simulation.view import AgentView

#: Seconds between two looks at the threads; fewer where the limit of a brain is short.
_LOOK = 0.02
#: Threads that compute for less than this share of the time are waiting for something.
_BUSY_SHARE = 0.1
#: Brains that answer within this many seconds each are not worth a thread of their own.
_WORTH_A_THREAD = 0.0005
#: Abandoned calls that still run. They do not count against `concurrency`, or the future of a run would depend on the
#: past of its program; more of them than this stop the run.
MAX_ABANDONED = 256

#: A brain and the view that it is asked with.
Question = tuple[Call, AgentView]


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands in the place of a missing answer."""

    timed_out: bool
    #: The name of the exception's class.
    error_type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        try:
            place = error_place(error)
            message = f"{error_text(error)} ({place})" if place else error_text(error)
        except Exception:  # noqa: BLE001 - foreign code writes the text
            message = type(error).__name__
        return cls(False, type(error).__name__, clipped(message, MAX_MESSAGE))

    @classmethod
    def overdue(cls, seconds: float) -> Failed:
        advice = "allow more time, or let the brain limit how long it waits"
        return cls(True, "TimeoutError", f"no answer within {seconds:g} s; {advice}")


class Round:
    """The plain brains of one turn. The lock of `RoundPlayer` guards it, but for `answers`."""

    #: Parts without an answer: that of the worker, and each shared brain.
    open = 1
    worker_is_asking = True
    #: What the worker has not begun and other threads ask, with the place of each.
    shared: Iterator[tuple[int, Call, AgentView]] = iter(())

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = questions
        #: What the worker has not begun.
        self.left = iter(questions)
        #: Of the worker, in order. It asks as many brains as `end` says.
        self.answers: list[Any] = []
        self.end = len(questions)
        #: Answers of other threads; and time-outs, which replace an answer of the worker.
        self.by_place: dict[int, Any] = {}

    def share(self) -> None:
        """Take what the worker has not begun, for other threads."""
        left = list(self.left)
        if left:
            self.end -= len(left)
            self.shared = iter([(self.end + place, call, view) for place, (call, view) in enumerate(left)])
            self.open += len(left)

    def in_order(self) -> list[Any]:
        if not self.by_place:
            return self.answers
        answers = self.answers[: self.end]
        answers += [None] * (len(self.questions) - len(answers))
        for place, answer in self.by_place.items():
            answers[place] = answer
        return answers


#: Given the answers of a round, in the thread of its last answer: the next round, or None.
Finish = Callable[[list[Any]], Round | None]


class Asker:
    """Asks the brains of one population, and remembers which of them were abandoned."""

    def __init__(self, *, limit: float, concurrency: int) -> None:
        self.limit = limit
        self.concurrency = concurrency
        #: Views whose call was abandoned, and how to find out whether it still runs.
        self.abandoned: dict[AgentView, Callable[[], bool]] = {}

    def still_runs(self, view: AgentView) -> bool:
        """Whether an abandoned call goes on."""
        runs = self.abandoned.get(view)
        return runs is not None and runs()

    def abandon(self, view: AgentView, runs: Callable[[], bool]) -> None:
        view.closed = True
        self.abandoned[view] = runs

    def require_room(self) -> None:
        """Raise where more abandoned calls still run than a program should carry."""
        self.abandoned = {view: runs for view, runs in self.abandoned.items() if runs()}
        if len(self.abandoned) > MAX_ABANDONED:
            raise SimulationError(
                f"{len(self.abandoned)} brains were given up and still run in this program; let brains limit how long "
                "they wait, or use Managed brains, then resume in a new program"
            )

    async def play(self, first: Round, finish: Finish) -> None:
        """Ask one round after the other, in threads, until `finish` returns None. Raises what `finish` raises."""
        await RoundPlayer(self, finish).play(first)

    async def ask_plain(self, questions: Sequence[Question]) -> list[Any]:
        answers: list[Any] = []
        await self.play(Round(questions), answers.extend)
        return answers

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises. When it is cancelled, `work` is waited for."""
        results: list[Any] = []
        await self.play(Round(()), lambda _: results.append(work()))
        return results[0]

    async def ask_async(self, questions: Sequence[Question]) -> list[Any]:
        answers: list[Any] = [None] * len(questions)
        left = iter(enumerate(questions))

        async def ask_some() -> None:
            for place, (call, view) in left:
                task = asyncio.ensure_future(_decide(call, view))
                try:
                    done, _ = await asyncio.wait((task,), timeout=self.limit)
                except asyncio.CancelledError:
                    self._cancel(task, view)
                    raise
                if done:
                    answers[place] = task.result()
                else:
                    self._cancel(task, view)
                    answers[place] = Failed.overdue(self.limit)

        await run_all(ask_some() for _ in range(min(self.concurrency, len(questions))))
        return answers

    def _cancel(self, task: asyncio.Future[Any], view: AgentView) -> None:
        task.cancel()
        self.abandon(view, lambda: not task.done())


class RoundPlayer:
    """Plays rounds, one after the other, and watches its threads from the event loop.

    The thread that gives the last answer of a round finishes it and is the worker of the next.
    """

    def __init__(self, asker: Asker, finish: Finish) -> None:
        self._asker = asker
        self._finish = finish
        #: Decides whether an answer or a time-out counts.
        self._lock = threading.Lock()
        self._stopped = False
        self._is_over = False
        self._error: BaseException | None = None
        self._helpers: list[_Thread] = []
        #: Answers of the rounds before this one.
        self._answered = 0
        #: The last look: when, the answers until then, and the CPU time of each thread.
        self._looked, self._progress = time.monotonic(), 0
        self._cpu: dict[_Thread, float] = {}
        #: The brain that the worker was seen asking, and since when.
        self._seen: tuple[Round | None, int] = (None, 0)
        self._since = 0.0

    async def play(self, first: Round) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._round: Round | None = first
        self._interval = min(_LOOK, self._asker.limit / 4)
        self._worker = _Thread(lambda thread: self._work(thread, first))
        self._worker.start()
        self._timer = self._loop.call_later(self._interval, self._look)
        try:
            await self._done
        except asyncio.CancelledError:
            await self._stop()
            raise
        finally:
            self._timer.cancel()
        if self._error is not None:
            raise self._error

    # --- in the threads --------------------------------------------------------------------------

    def _work(self, thread: _Thread, current: Round | None) -> None:
        while current is not None:
            answers = current.answers
            answer = answers.append
            while True:
                try:
                    for call, view in current.left:
                        answer(call(view))
                    break
                except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
                    answer(Failed.of(error))
            with self._lock:
                if not current.worker_is_asking:
                    return  # this thread was abandoned
                current.worker_is_asking = False
                current.open -= 1
                if current.open or self._stopped:
                    return
            current = self._finish_round(thread, current)

    def _help(self, thread: _Thread, current: Round) -> None:
        """Ask one shared brain after the other, until none is left."""
        is_last = False
        for place, call, view in current.shared:
            thread.asking = (place, view, time.monotonic())
            try:
                answer = call(view)
            except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
                answer = Failed.of(error)
            with self._lock:
                if place in current.by_place:
                    return  # this thread was abandoned
                thread.asking = None
                current.by_place[place] = answer
                current.open -= 1
                is_last = not current.open and not self._stopped
        with self._lock:
            self._helpers.remove(thread)
        if is_last:
            self._go_on(thread, current)

    def _go_on(self, thread: _Thread, current: Round) -> None:
        self._work(thread, self._finish_round(thread, current))

    def _finish_round(self, thread: _Thread, current: Round) -> Round | None:
        following = None
        try:
            following = self._finish(current.in_order())
        except BaseException as error:  # noqa: BLE001 - raised by `play`
            self._error = error
        with self._lock:
            self._answered += len(current.questions)
            self._worker = thread
            self._round = following = None if self._stopped else following
        if following is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                self._loop.call_soon_threadsafe(self._set_done)
        return following

    # --- on the event loop -----------------------------------------------------------------------

    def _set_done(self) -> None:
        self._is_over = True
        if not self._done.done():
            self._done.set_result(None)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            current = self._round
            if current is not None and current.open:  # else the engine works, for as long as it likes
                self._abandon_overdue(current, now)
                self._add_helpers(current, now)
        self._timer = self._loop.call_later(self._interval, self._look)

    def _abandon_overdue(self, current: Round, now: float) -> None:
        limit, place = self._asker.limit, len(current.answers)
        if self._seen != (current, place):
            self._seen, self._since = (current, place), now
        elif current.worker_is_asking and now - self._since >= limit:
            current.share()
            if len(current.answers) == place < current.end:
                current.worker_is_asking = False
                self._abandon(current, place, current.questions[place][1], self._worker)
        for helper in tuple(self._helpers):
            if helper.asking is not None and now - helper.asking[2] >= limit:
                self._helpers.remove(helper)
                self._abandon(current, *helper.asking[:2], helper)

    def _abandon(self, current: Round, place: int, view: AgentView, thread: _Thread) -> None:
        current.by_place[place] = Failed.overdue(self._asker.limit)
        self._asker.abandon(view, thread.is_alive)
        current.open -= 1
        if not current.open:  # no other thread may be there to finish
            _Thread(lambda thread: self._go_on(thread, current)).start()

    def _add_helpers(self, current: Round, now: float) -> None:
        """Four times as many threads as there are, while these are waiting."""
        active = [*self._helpers, *([self._worker] if current.worker_is_asking else ())]
        cpu = {thread: thread.cpu_seconds() for thread in active}
        computed = sum(seconds - self._cpu.get(thread, 0.0) for thread, seconds in cpu.items())
        progress = self._answered + len(current.answers) + len(current.by_place)
        quick = (progress - self._progress) * _WORTH_A_THREAD
        interval = now - self._looked
        self._looked, self._progress, self._cpu = now, progress, cpu
        room = self._asker.concurrency - len(active)
        if room > 0 and max(computed / _BUSY_SHARE, quick) < interval:
            current.share()
            count = min(room, max(1, 3 * len(active)), operator.length_hint(current.shared))
            helpers = [_Thread(lambda thread: self._help(thread, current)) for _ in range(count)]
            self._helpers += helpers
            for helper in helpers:
                helper.start()

    async def _stop(self) -> None:
        """The turn was cancelled. An engine that has begun is waited for: it must not work on behind its caller."""
        with self._lock:
            self._stopped = True
            current = self._round
            if current is not None and current.open:
                current.share()
                for _ in current.shared:
                    pass
                for _, view in current.questions:
                    view.closed = True
                return
        while not self._is_over:
            self._done = self._loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self._done


class _Thread(threading.Thread):
    """Does not keep the program from ending, and has a CPU clock."""

    def __init__(self, work: Callable[[_Thread], None]) -> None:
        super().__init__(name="ostler-brains", daemon=True)
        self._work = work
        self._clock: int | None = None
        #: The place and the view of the shared brain that it asks, and since when.
        self.asking: tuple[int, AgentView, float] | None = None

    def run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._work(self)

    def cpu_seconds(self) -> float:
        with contextlib.suppress(OSError):  # it has just ended
            if self._clock is not None:
                return time.clock_gettime(self._clock)
        return 0.0


async def _decide(call: Call, view: AgentView) -> Any:
    try:
        return await call(view)
    except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
        return Failed.of(error)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once. The first error cancels the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def discard(answer: Any) -> None:
    """Close a coroutine that will not be awaited, or Python warns about it."""
    if inspect.iscoroutine(answer):
        answer.close()
