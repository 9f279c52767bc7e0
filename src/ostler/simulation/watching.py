"""The loop's side of a turn of plain brains: it opens lanes, and gives up on those that are stuck.

Brains that answer at once are fastest in one lane, brains that wait for something in many. Nobody says which they
are, so a turn begins with one lane, and while lanes get on slowly without computing, their number doubles.

Most turns of a small population are over sooner than the loop could go to sleep and be woken up. So it looks on for a
moment first, and does everything else only when that was not enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

from ostler.errors import InvalidOperationError
from ostler.seams import Timer
from ostler.simulation.answers import (
    Again,
    Answers,
    Failed,
    Question,
    Then,
    discard,
    failure,
    overdue,
    too_many_hung,
)
from ostler.simulation.lanes import UNASKED, Lane, Walk
from ostler.simulation.limits import Hanging, Limits, Stuck
from ostler.simulation.pace import Pace

#: For so many seconds the loop looks on, and does nothing else; longer where one moment may hold many turns.
_MOMENT, _LONG_MOMENT = 0.002, 0.005
#: After so many turns that were over by then, others on the loop get their chance all the same.
_MOMENTS = 16
#: After so many seconds the lanes are looked at for the first time.
_FIRST_LOOK = 0.005
#: Between two looks; the time-out decides within these bounds.
_SHORTEST, _LONGEST = 0.001, 0.25
_LOOKS_PER_TIMEOUT = 8
_JOIN_SECONDS = 1.0


class Crew:
    """The lanes, kept from turn to turn."""

    def __init__(self, limits: Limits, stuck: Stuck) -> None:
        self.limits = limits
        self.stuck = stuck
        self.hanging: Hanging[Lane] = Hanging(limits.clock, lambda lane: lane.ended)
        self._idle: list[Lane] = []
        self._places: list[int] = []
        self._moments = 0

    def places(self, count: int) -> list[int]:
        """Numbers from 0 on, at least so many; never changed, because lanes may still walk along them."""
        if len(self._places) < count:
            self._places = list(range(count))
        return self._places

    async def breathe(self, *, now: bool) -> None:
        """After a moment in which the loop did nothing else: let others have it, now and then."""
        self._moments += 1
        if now or self._moments >= _MOMENTS:
            self._moments = 0
            await asyncio.sleep(0)

    def room(self, running: int) -> int:
        return self.limits.most - running - len(self.hanging)

    def send(self, walk: Walk) -> Lane:
        """Have an idle lane, or a new one, walk. The last that came back goes first, so that the others may end."""
        while self._idle:
            lane = self._idle.pop()
            if lane.give(walk):
                return lane
        lane = Lane()
        lane.give(walk)
        return lane

    def take_back(self, lane: Lane) -> None:
        self._idle = [one for one in self._idle if not one.ended]
        self._idle.append(lane)

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for lane in idle:
            lane.leave()
        for lane in idle:
            lane.join(_JOIN_SECONDS)  # it waits for nothing but this


class Watch:
    """One turn."""

    def __init__(
        self, crew: Crew, questions: Sequence[Question], then: Then | None = None, again: Again | None = None
    ) -> None:
        """Where all are to be asked `again`, the same lane does it, for as long as the loop looks on."""
        self._crew = crew
        self._limits = crew.limits
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._again = again
        self._then = then
        self._walk = self._new_walk(questions)
        #: Held until the first lane has left, or the moment is over.
        self._moment = threading.Lock()
        self._moment.acquire()
        self._telling = threading.Lock()
        self._looks_on = True
        #: Each lane at work, and since when it is known to be at which place.
        self._running: dict[Lane, tuple[int, float]] = {}
        #: What stands in the place of an answer, whatever is said there later.
        self._instead: dict[int, Failed] = {}
        self._step = min(max(self._limits.timeout / _LOOKS_PER_TIMEOUT, _SHORTEST), _LONGEST)
        self._pause = min(_FIRST_LOOK, self._step)
        self._pace = Pace(len(questions))
        self._timer: Timer | None = None

    def _new_walk(self, questions: Sequence[Question]) -> Walk:
        return Walk(questions, self._crew.places(len(questions)), self._tell, self._then, self._next)

    def _next(self, lane: Lane) -> Walk | None:
        """In the thread of the lane. Once the loop has stopped looking on, the walk that it knows is the last."""
        after = self._walk.first.after
        if self._again is None or after is None or after.error is not None:
            return None
        with self._telling:
            if not self._looks_on or not self._again(after.value):
                return None
            self._walk = self._new_walk(self._walk.questions)
            lane.go_straight(self._walk)
            return self._walk

    async def answers(self) -> tuple[Answers, dict[int, Awaitable[Any]]]:
        """The answers in order, and those of them that have to be awaited."""
        try:
            self._ask(range(len(self._walk.questions)))
            if self._is_over_soon():
                await self._crew.breathe(now=self._again is not None)
            else:
                self._timer = self._limits.clock.call_later(self._pause, self._look)
                await self._done
        except BaseException:
            if self._walk.concluding:
                await self._hold_on()
            self._break_off()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
        awaited = self._walk.finish()
        # A copy where anything went wrong: one that was given up on may still write into the list that it knows.
        answers = self._walk.answers
        for place, failed in self._instead.items():
            answers[place] = failed
            answers.kinds.add(Failed)
            discard(awaited.pop(place, None))
        return answers, awaited

    async def _hold_on(self) -> None:
        """What is done with the answers changes the state of others, so nobody goes on before it is over."""
        over: asyncio.Future[None] = self._loop.create_future()

        def heard() -> None:
            if not over.done():
                over.set_result(None)

        def tell() -> None:
            self._walk.join()
            with contextlib.suppress(RuntimeError):  # a closed loop means that nobody wants to know
                self._loop.call_soon_threadsafe(heard)

        threading.Thread(target=tell, name="ostler-engine-end", daemon=True).start()
        await over  # who calls it off a second time does not want to wait any more

    def _is_over_soon(self) -> bool:
        """Look on for a moment. What is told later is told by way of the loop."""
        moment = _MOMENT if self._again is None else _LONG_MOMENT
        if self._running and not self._moment.acquire(timeout=moment):
            with self._telling:
                self._looks_on = False
            if not self._moment.acquire(blocking=False):
                self._pace.begin(self._limits.clock.mono(), self._running)
                return False
        for lane in tuple(self._running):
            self._left(lane)
        return True

    def stop(self) -> None:
        if not self._done.done():
            self._done.set_exception(InvalidOperationError("the run was closed while its brains were asked"))

    # --- from the lanes ------------------------------------------------------------------------------

    def _tell(self, lane: Lane) -> None:
        with self._telling:
            if self._looks_on:
                self._looks_on = False
                self._moment.release()
                return
        # A closed loop means that nobody wants to know.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._left, lane)

    def _left(self, lane: Lane) -> None:
        if self._running.pop(lane, None) is None:
            return  # it was given up on
        self._crew.take_back(lane)
        if not self._running:
            self._go_on()

    # --- opening -------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """No lane is at work any more. Whatever was passed over then is surely not being asked."""
        if self._done.done():
            return
        left: list[int] = []
        if self._walk.is_spread:  # a lane left early, or found nothing ahead, so some may have been passed over
            answers = self._walk.answers
            left = [place for place, one in enumerate(answers) if one is UNASKED and place not in self._instead]
        if left:
            self._walk.again(left)
            self._pace.begin_again(left[0], left[-1] + 1)
            self._ask(left)
        else:
            self._done.set_result(None)

    def _ask(self, places: range | list[int]) -> None:
        """Send the first lane. Where that is not possible, say so in the place of every answer."""
        refused: Failed | None = None
        if self._crew.room(0) < 1 and self._walk.questions:  # what only concludes is no brain, and takes no place
            refused = too_many_hung(len(self._crew.hanging), self._limits.most)
        else:
            try:
                self._open()
            except RuntimeError as error:  # no more threads on this machine
                refused = failure(error)
        if refused is not None:
            self._instead.update(dict.fromkeys(places, refused))
            self._done.set_result(None)

    def _open(self) -> None:
        lane = self._crew.send(self._walk)
        self._running[lane] = (-1, self._limits.clock.mono())
        if not self._looks_on:
            self._pace.enter(lane)

    def _open_more(self) -> bool:
        wanted = min(len(self._running), self._crew.room(len(self._running)), self._pace.left)
        try:
            for _ in range(wanted):
                self._open()
        except RuntimeError:
            return False  # no more threads on this machine; those at work will get to it
        return wanted > 0

    # --- looking -------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._done.done() or self._walk.concluding:
            return
        now = self._limits.clock.mono()
        is_slow = self._pace.is_slow(now, self._running)
        for lane, (place, since) in tuple(self._running.items()):
            if lane.at != place:
                self._running[lane] = (lane.at, now)
            elif place >= 0 and now - since >= self._limits.timeout:
                self._give_up(lane, place)
        opened = False
        if not self._running:
            self._go_on()
        elif is_slow:
            opened = self._open_more()
        self._pause = min(_FIRST_LOOK if opened else self._pause * 2, self._step)
        if not self._done.done():
            first = min((since for place, since in self._running.values() if place >= 0), default=now)
            due = max(first + self._limits.timeout - now, _SHORTEST)
            self._timer = self._limits.clock.call_later(min(self._pause, due), self._look)

    def _give_up(self, lane: Lane, place: int) -> None:
        if lane.leave() != place or self._walk.is_answered(place):
            return  # it answered at the last moment; it will say when it has left
        del self._running[lane]
        self._instead[place] = overdue(self._limits.timeout)
        view = self._walk.questions[place][1]
        view.closed = True
        self._crew.stuck.add(view, lambda: lane.ended)
        self._crew.hanging.add(lane)

    def _break_off(self) -> None:
        for lane in self._running:
            place = lane.leave()
            if place >= 0:
                self._walk.questions[place][1].closed = True
            self._crew.hanging.add(lane, within=self._limits.timeout)
        self._running.clear()
        for answer in self._walk.finish().values():
            discard(answer)
