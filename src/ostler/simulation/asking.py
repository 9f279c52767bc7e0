"""Asking many brains at once, each within its time, with the answers in the order of the questions.

Plain brains that answer at once are fastest in one thread, which goes through all of them in C. Brains that wait need
many threads. Which kind they are is not known before, so a round begins with one worker; the event loop looks at it
every few milliseconds, and where the workers neither compute nor wait for a processor it lets twice as many share
what is left. A brain that is over its limit is given up on: its view is closed, its answer is ignored, and its
thread is left behind, because a thread cannot be ended from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler.agents.failures import MAX_MESSAGE, error_place, error_text
from ostler.errors import SimulationError
from ostler.model.text import clipped
from ostler.simulation.brains import Call
from ostler.simulation.view import AgentView

#: Seconds between two looks at the workers; the longer one when no more of them are sent.
_SHORT_LOOK, _LONG_LOOK = 0.005, 0.05
_LOOKS_PER_LIMIT = 8
#: Answers that take less than so many seconds each are not worth a thread of their own.
_WORTH_A_THREAD = 0.0005
#: An idle worker ends after so many seconds.
_IDLE_SECONDS = 10.0
#: Calls that were given up on and still run. They do not count against `concurrency`, or the future of a run would
#: depend on the past of its program; more of them than this stop the run.
MAX_LEFT_BEHIND = 256

Conclude = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands in the place of an answer that did not come."""

    timed_out: bool
    #: The name of the exception's class.
    error_type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        try:
            place = error_place(error)
            said = f"{error_text(error)} ({place})" if place else error_text(error)
        except Exception:  # noqa: BLE001 - foreign code writes the text
            said = type(error).__name__
        return cls(False, type(error).__name__, clipped(said, MAX_MESSAGE))

    @classmethod
    def overdue(cls, seconds: float) -> Failed:
        said = f"no answer within {seconds:g} s; allow more time, or let the brain give up sooner on what it waits for"
        return cls(True, "TimeoutError", said)


class Asking:
    """The threads of one population, kept from turn to turn."""

    def __init__(self, *, timeout: float, concurrency: int) -> None:
        self.timeout = timeout
        self.concurrency = concurrency
        self.idle: list[_Worker] = []
        #: Views whose call was given up on, and how to find out whether it still runs.
        self._left: dict[AgentView, Callable[[], bool]] = {}
        self._closed = False

    def still_runs(self, view: AgentView) -> bool:
        """Whether a call that was given up on goes on."""
        runs = self._left.get(view)
        return runs is not None and runs()

    def leave(self, view: AgentView, runs: Callable[[], bool]) -> None:
        view.closed = True
        self._left[view] = runs

    def require_room(self) -> None:
        """Raise where more calls were left behind than a program should carry."""
        if self._left:
            self._left = {view: runs for view, runs in self._left.items() if runs()}
        if len(self._left) > MAX_LEFT_BEHIND:
            raise SimulationError(
                f"{len(self._left)} brains were given up on and still run in this program; let brains limit how long "
                "they wait, or use Managed brains, then resume in a new program"
            )

    async def ask_plain(self, calls: Sequence[Call], views: Sequence[AgentView], conclude: Conclude) -> Any:
        """Ask all; then `conclude(answers)` in the thread of a worker. The result is what it returns or raises."""
        return await _Round(self, calls, views, conclude).run()

    async def ask_async(self, calls: Sequence[Call], views: Sequence[AgentView]) -> list[Any]:
        answers: list[Any] = [None] * len(calls)
        questions = iter(enumerate(zip(calls, views, strict=True)))

        async def ask_some() -> None:
            for place, (call, view) in questions:
                task = asyncio.ensure_future(_think(call, view))
                try:
                    done, _ = await asyncio.wait((task,), timeout=self.timeout)
                except asyncio.CancelledError:
                    self._give_up(task, view)
                    raise
                if done:
                    answers[place] = task.result()
                else:
                    self._give_up(task, view)
                    answers[place] = Failed.overdue(self.timeout)

        await run_all(ask_some() for _ in range(min(self.concurrency, len(calls))))
        return answers

    def _give_up(self, task: asyncio.Future[Any], view: AgentView) -> None:
        task.cancel()
        self.leave(view, lambda: not task.done())

    def send(self, job: Callable[[_Worker], bool]) -> _Worker:
        """Give a job to an idle worker, or to a new one. It returns whether the worker may take another."""
        while self.idle:
            with contextlib.suppress(IndexError):  # it has just ended for want of work
                worker = self.idle.pop()
                worker.jobs.put(job)
                return worker
        worker = _Worker(self)
        worker.jobs.put(job)
        worker.start()
        return worker

    def put_back(self, worker: _Worker) -> None:
        if self._closed:
            worker.jobs.put(None)
        else:
            self.idle.append(worker)

    def close(self) -> None:
        """End idle workers; those in which a brain hangs end with it, or with the program."""
        self._closed = True
        idle, self.idle = self.idle, []
        for worker in idle:
            worker.jobs.put(None)
        for worker in idle:
            worker.join(1.0)


async def _think(call: Call, view: AgentView) -> Any:
    try:
        return await call(view)
    except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
        return Failed.of(error)


class _Worker(threading.Thread):
    def __init__(self, asking: Asking) -> None:
        super().__init__(name="ostler-brains", daemon=True)
        self._asking = asking
        self.jobs: queue.SimpleQueue[Callable[[_Worker], bool] | None] = queue.SimpleQueue()
        #: The question that it is at as a helper, and since when.
        self.at: tuple[int, AgentView, float] | None = None

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                try:
                    self._asking.idle.remove(self)
                except ValueError:  # a job is on its way
                    continue
                return
            if job is None or not job(self):
                return

    def busy_seconds(self) -> float | None:
        """The time that it has run or waited for a processor; None where the system does not tell."""
        try:
            run, waited, _ = Path(f"/proc/self/task/{self.native_id}/schedstat").read_text("ascii").split()
        except (OSError, ValueError):
            return None
        return (int(run) + int(waited)) / 1e9


class _Round:
    """One turn of plain brains.

    The walker is the first worker: it answers the questions before `first`, in order. What it has not begun may be
    taken away from it and shared by helpers. `lock` decides whether an answer or a time-out counts.
    """

    def __init__(self, asking: Asking, calls: Sequence[Call], views: Sequence[AgentView], conclude: Conclude) -> None:
        self._asking = asking
        self._views = views
        self._calls_left, self._views_left = iter(calls), iter(views)
        self._conclude = conclude
        self._lock = threading.Lock()
        self._first = len(calls)
        #: Answers of the walker; its place is their number.
        self._answers: list[Any] = []
        #: Answers of the helpers by place, and time-outs, which go before an answer of the walker.
        self._others: dict[int, Any] = {}
        self._rest: Iterator[tuple[int, Call, AgentView]] = iter(())
        #: Parts without an answer: that of the walker, and each question of the helpers.
        self._owed = 1
        self._walker_owes = True
        self._stopped = False
        self._over = False
        self._result: Any = None
        self._error: BaseException | None = None
        #: What the last look has seen: the place of the walker and since when, the busy time of each worker.
        self._place, self._since = -1, 0.0
        self._busy: dict[_Worker, float] = {}
        self._looked, self._seen = 0.0, 0
        self._helpers: list[_Worker] = []
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> Any:
        self._walker = self._asking.send(self._walk)
        self._timer = self._loop.call_later(min(_SHORT_LOOK, self._longest_look), self._look)
        try:
            await self._done
        except asyncio.CancelledError:
            await self._stop()
            raise
        finally:
            self._timer.cancel()
        if self._error is not None:
            raise self._error
        return self._result

    # --- in the workers --------------------------------------------------------------------------

    def _walk(self, worker: _Worker) -> bool:
        answers = self._answers
        steps = map(operator.call, self._calls_left, self._views_left)
        while True:
            try:
                answers.extend(steps)
                with self._lock:
                    if len(answers) >= self._first:
                        break
                raise StopIteration  # noqa: TRY301 - a brain raised it, which looks like the end of the list
            except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
                answers.append(Failed.of(error))
        with self._lock:
            if not self._walker_owes:
                return False  # it was given up on
            self._walker_owes = False
            last = self._answered()
        return self._finish(worker, last=last)

    def _help(self, worker: _Worker) -> bool:
        """One question after the other, until none is left."""
        last = False
        for place, call, view in self._rest:
            worker.at = (place, view, time.monotonic())
            try:
                answer = call(view)
            except BaseException as error:  # noqa: BLE001 - whatever a brain raises is its own failure
                answer = Failed.of(error)
            with self._lock:
                if place in self._others:
                    return False  # it was given up on
                self._others[place] = answer
                worker.at = None
                last = self._answered()
        return self._finish(worker, last=last)

    def _answered(self) -> bool:
        """Whether this was the last answer, so that the caller, who holds `lock`, has to conclude."""
        self._owed -= 1
        return self._owed == 0 and not self._stopped

    def _finish(self, worker: _Worker, *, last: bool) -> bool:
        if last:
            try:
                self._result = self._conclude(self._in_order())
            except BaseException as error:  # noqa: BLE001 - raised where the round is awaited
                self._error = error
        self._asking.put_back(worker)
        if last:
            with contextlib.suppress(RuntimeError):  # the loop has closed: no caller is left
                self._loop.call_soon_threadsafe(self._deliver)
        return True

    def _in_order(self) -> list[Any]:
        if not self._others:
            return self._answers
        answers = self._answers[: self._first]
        answers += [None] * (len(self._views) - len(answers))
        for place, answer in self._others.items():
            answers[place] = answer
        return answers

    # --- on the loop -----------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._over = True
        if not self._done.done():
            self._done.set_result(None)

    @property
    def _longest_look(self) -> float:
        return min(max(self._asking.timeout / _LOOKS_PER_LIMIT, 0.001), _LONG_LOOK)

    def _look(self) -> None:
        if self._owed == 0:
            return  # the engine works, for as long as it likes
        now = time.monotonic()
        active = [*([self._walker] if self._walker_owes else ()), *self._helpers]
        waiting = self._are_waiting(active, now)
        self._expire(now)
        room = self._asking.concurrency - len(self._helpers) - self._walker_owes
        if waiting and room > 0:
            self._take_rest()
            self._send_helpers(min(max(len(active), 1), room))
        elif room > 0 and not self._helpers:
            self._send_helpers(1)
        pause = _LONG_LOOK if waiting is False else _SHORT_LOOK
        self._timer = self._loop.call_later(min(pause, self._longest_look), self._look)

    def _are_waiting(self, active: Sequence[_Worker], now: float) -> bool | None:
        """Whether the workers neither compute nor wait for a processor; None while that is not known."""
        before, self._busy = self._busy, {}
        for worker in active:
            seconds = worker.busy_seconds()
            if seconds is None:
                return len(self._answers) == self._place
            self._busy[worker] = seconds
        interval, self._looked = now - self._looked, now
        answered = len(self._answers) + len(self._others)
        progress, self._seen = answered - self._seen, answered
        if not before:
            return None
        if progress * _WORTH_A_THREAD > interval:
            return False
        return sum(self._busy[one] - before.get(one, self._busy[one]) for one in active) < interval / 2

    def _expire(self, now: float) -> None:
        limit, place = self._asking.timeout, len(self._answers)
        if place != self._place:
            self._place, self._since = place, now
        elif self._walker_owes and now - self._since >= limit:
            self._take_rest()
            with self._lock:
                if len(self._answers) == place < self._first:
                    self._walker_owes = False
                    self._give_up(place, self._views[place], self._walker)
        for helper in tuple(self._helpers):
            at = helper.at
            if at is not None and now - at[2] >= limit:
                with self._lock:
                    if helper.at is at:
                        self._helpers.remove(helper)
                        self._give_up(at[0], at[1], helper)

    def _give_up(self, place: int, view: AgentView, worker: _Worker) -> None:
        """The caller holds `lock`."""
        self._others[place] = Failed.overdue(self._asking.timeout)
        self._asking.leave(view, worker.is_alive)
        if self._answered():  # no worker may be left to conclude
            self._asking.send(lambda helper: self._finish(helper, last=True))

    def _send_helpers(self, count: int) -> None:
        for _ in range(min(count, operator.length_hint(self._rest))):
            self._helpers.append(self._asking.send(self._help))

    def _take_rest(self) -> None:
        """Take what the walker has not begun. It takes a call and then a view, so the calls go first."""
        with self._lock:
            calls = list(self._calls_left)
            views = list(self._views_left)
            if calls:
                self._first -= len(calls)
                places = range(self._first, self._first + len(calls))
                self._rest = iter(list(zip(places, calls, views, strict=True)))
                self._owed += len(calls)

    async def _stop(self) -> None:
        """The turn was cancelled. An engine that has begun is waited for: it must not work on behind its caller."""
        self._take_rest()
        with self._lock:
            self._stopped = self._owed > 0
            for _ in self._rest:
                pass
        if self._stopped:
            for view in self._views:
                view.closed = True
        while not (self._stopped or self._over):
            self._done = self._loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self._done


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once. The first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def discard(answer: Any) -> None:
    """A coroutine that will not be awaited is closed, or Python complains."""
    if inspect.iscoroutine(answer):
        answer.close()
