"""Async brains: each in a task of its own, so many at a time, each with its own time-out."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ostler.errors import InvalidOperationError
from ostler.seams import Timer
from ostler.simulation.answers import Question, failure, overdue, too_many_hung
from ostler.simulation.limits import Hanging, Limits, Stuck

#: A brain that was cancelled may clean up for so many seconds; then it is left behind.
_GRACE = 0.1

_Task = asyncio.Task[Any]


class Thinking:
    """One turn."""

    def __init__(self, limits: Limits, hanging: Hanging[_Task], stuck: Stuck, questions: list[Question]) -> None:
        self._limits = limits
        self._hanging = hanging
        self._stuck = stuck
        self._questions = questions
        self._rest: Iterator[tuple[int, Question]] = enumerate(questions)
        self._answers: list[Any] = [None] * len(questions)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Place and end of its time; as all have the same time, in the order in which it ends.
        self._running: dict[_Task, tuple[int, float]] = {}
        #: Out of time and cancelled; until when they are waited for, in that order.
        self._ending: dict[_Task, float] = {}
        self._timer: Timer | None = None

    async def answers(self) -> list[Any]:
        try:
            self._fill()
            self._arm()
            await self._done
        except BaseException:
            self._break_off()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        return self._answers

    def stop(self) -> None:
        if not self._done.done():
            self._done.set_exception(InvalidOperationError("the run was closed while its brains were asked"))

    def _fill(self) -> None:
        """Begin as many as may think; when there is nothing to wait for any more, that was all."""
        room = self._limits.most - len(self._hanging) - len(self._running) - len(self._ending)
        while room > 0 and (taken := next(self._rest, None)) is not None:
            place, (decide, view) = taken
            task = asyncio.create_task(_think(decide, view))
            task.add_done_callback(self._ended)
            self._running[task] = (place, self._limits.clock.mono() + self._limits.timeout)
            room -= 1
        if self._running or self._ending or self._done.done():
            return
        refused = too_many_hung(len(self._hanging), self._limits.most)
        for place, _ in self._rest:
            self._answers[place] = refused
        self._done.set_result(None)

    def _ended(self, task: _Task) -> None:
        if (known := self._running.pop(task, None)) is not None:
            self._answers[known[0]] = failure(asyncio.CancelledError()) if task.cancelled() else task.result()
        elif self._ending.pop(task, None) is None:
            return  # it was given up on
        self._fill()

    def _arm(self) -> None:
        """One timer for all, because those who are next are known."""
        due = [end for _, end in islice(self._running.values(), 1)] + list(islice(self._ending.values(), 1))
        if due and not self._done.done():
            left = max(min(due) - self._limits.clock.mono(), 0.0)
            self._timer = self._limits.clock.call_later(left, self._look)

    def _look(self) -> None:
        now = self._limits.clock.mono()
        for task, due in tuple(self._ending.items()):
            if due <= now:
                del self._ending[task]
                self._hanging.add(task)
        for task, (place, due) in tuple(self._running.items()):
            if due > now:
                break
            del self._running[task]
            self._ending[task] = now + _GRACE
            self._answers[place] = overdue(self._limits.timeout)
            view = self._questions[place][1]
            view.closed = True
            self._stuck.add(view, task.done)
            task.cancel()
        self._fill()
        self._arm()

    def _break_off(self) -> None:
        for place, _ in self._running.values():
            self._questions[place][1].closed = True
        for task in (*self._running, *self._ending):
            task.cancel()
            self._hanging.add(task, within=_GRACE)
        self._running.clear()
        self._ending.clear()


async def _think(decide: Any, view: Any) -> Any:
    try:
        answer = decide(view)
        return await answer if inspect.isawaitable(answer) else answer
    except BaseException as error:  # noqa: BLE001 - a brain must not end the run, whatever it raises
        return failure(error)
