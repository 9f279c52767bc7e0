"""Asking many brains at once, each with its time-out, and getting the answers in the order of the questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ostler.errors import InvalidOperationError
from ostler.seams import Clock
from ostler.simulation.answers import After, Again, Answers, Failed, Question, Then, discard
from ostler.simulation.limits import Hanging, Limits, Stuck
from ostler.simulation.thinking import Thinking
from ostler.simulation.view import AgentView
from ostler.simulation.watching import Crew, Watch

__all__ = ["After", "Answers", "Asking", "Failed", "Question"]


class Asking:
    """Plain brains think in threads, async ones in tasks; each kind has `concurrency` places for each call.

    One that does not answer in time is given up on: its view is closed, and what it says later is thrown away. While
    it goes on nevertheless, which only it can end, it keeps its place.
    """

    def __init__(self, *, clock: Clock, timeout: timedelta, concurrency: int) -> None:
        self._limits = Limits(clock=clock, timeout=timeout.total_seconds(), most=concurrency)
        self._stuck = Stuck()
        self._crew = Crew(self._limits, self._stuck)
        self._hanging: Hanging[asyncio.Task[Any]] = Hanging(clock, asyncio.Task.done)
        self._under_way: set[Watch | Thinking] = set()
        self._closed = False

    @property
    def concurrency(self) -> int:
        return self._limits.most

    @property
    def hung(self) -> int:
        """How many were given up on and have not come back."""
        return len(self._crew.hanging) + len(self._hanging)

    def is_stuck(self, view: AgentView) -> bool:
        """Whether whoever was asked with this view was given up on, and still thinks about it."""
        return view in self._stuck

    async def conclude(self, action: Callable[[], Any]) -> After:
        """Do something in the thread of a lane, to its end; what it returned, or raised."""
        self._check_open()
        watch = Watch(self._crew, (), lambda _: action())
        self._under_way.add(watch)
        try:
            answers, _ = await watch.answers()
        finally:
            self._under_way.remove(watch)
        if answers.after is None:
            raise InvalidOperationError("there is no thread left on this machine to work in; end some, and resume")
        return answers.after

    async def ask_plain(
        self, questions: Sequence[Question], then: Then | None = None, again: Again | None = None
    ) -> Answers:
        """Ask callables that answer when they return; an awaitable that one returns is awaited here.

        A list of questions is not copied: leave it as it is until the answers are there. Where all were answered by
        one thread, `then` is called there with the answers, and `Answers.after` tells what came of it. Where `again`
        says so, all are asked once more; the answers are those of the last time.
        """
        self._check_open()
        if not questions:
            return Answers()
        asked = questions if isinstance(questions, list | tuple) else list(questions)
        watch = Watch(self._crew, asked, then, again)
        self._under_way.add(watch)
        try:
            answers, awaited = await watch.answers()
        finally:
            self._under_way.remove(watch)
        if awaited:
            try:
                later = [(lambda _, answer=answer: answer, asked[place][1]) for place, answer in awaited.items()]
                for place, answer in zip(awaited, await self.ask_async(later), strict=True):
                    answers[place] = answer
                    answers.kinds.add(type(answer))
            finally:
                for answer in awaited.values():
                    discard(answer)
        return answers

    async def ask_async(self, questions: Sequence[Question]) -> list[Any | Failed]:
        """Ask coroutine functions, or whatever returns something to await."""
        self._check_open()
        if not questions:
            return []
        thinking = Thinking(self._limits, self._hanging, self._stuck, list(questions))
        self._under_way.add(thinking)
        try:
            return await thinking.answers()
        finally:
            self._under_way.remove(thinking)

    async def close(self) -> None:
        """End the threads; those in which a brain hangs end with it, or with the program: see `hung`."""
        self._closed = True
        for turn in self._under_way:
            turn.stop()
        for task in self._hanging.all():
            task.cancel()
        self._crew.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOperationError("this is closed and asks nobody any more; make another for another run")
