"""Threads that walk through a list of plain brains, one brain after the other, as fast as a bare loop.

Many lanes may walk through one list: each takes what comes next, because `next` of a `zip` over lists is one step
under the interpreter's lock. Nothing else is shared but slots that one side writes and the other reads.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import length_hint
from types import GeneratorType
from typing import Any

from ostler.simulation.answers import After, Answers, Failed, Question, Then, discard, failure

LANE_NAME = "ostler-brains"
#: A lane that has had nothing to do for so many seconds ends.
LINGER_SECONDS = 1.0
#: Stands in the list of answers until there is one.
UNASKED: Any = object()
_NOWHERE = -1
_SHARED = ("ahead", "concluding", "first", "questions", "rest", "tell", "tell_concluded", "then")


class Walk:
    """One list of questions, and the answers so far.

    The lane that comes first goes straight along: it takes from `ahead` and adds to `first`, so that where it is can
    be counted from outside and costs it nothing. Whoever wants to stop it, or to send others to help, takes all that
    is left of `ahead`, which is one step too. From then on each lane takes one question after the other from `rest`
    and puts the answer in its place.

    A lane that went straight along to the end does at once what is to be done then, where all that it needs is still
    at hand.
    """

    __slots__ = ("_awaited", "_ending", "_entered", "_lock", "_over", "_places", "_slots", "_taken", *_SHARED)

    def __init__(
        self,
        questions: Sequence[Question],
        places: list[int],
        tell: Callable[[Lane], None],
        then: Then | None = None,
        relay: Callable[[Lane], Walk | None] = lambda _: None,
    ) -> None:
        """`places` are the numbers from 0 on, at least as many; made once, because to make them costs as well."""
        self.questions = questions
        self.ahead: Iterator[Question] = iter(questions)
        self.first = Answers(kinds=set())
        #: What lanes take one by one.
        self.rest: Iterator[tuple[int, Question]] = iter(())
        #: Called in its thread by each lane that has left.
        self.tell = tell
        #: To be done with all answers.
        self.then = then
        #: For a lane that has concluded and would go on: the next walk, or None.
        self.tell_concluded = relay
        #: It is being done, or has been: nothing is taken from this walk any more.
        self.concluding = False
        self._ending = threading.Lock()
        self._places = places
        #: How many the first lane will have taken when it is done.
        self._taken = len(questions)
        #: By place; None while all go straight along.
        self._slots: list[Any] | None = None
        self._lock = threading.Lock()
        self._awaited: dict[int, Awaitable[Any]] = {}
        self._over = False
        self._entered = False

    @property
    def front(self) -> int:
        """The place to which the lane that goes straight along has come; negative before the first."""
        return self._taken - length_hint(self.ahead) - 1

    @property
    def is_spread(self) -> bool:
        return self._slots is not None

    @property
    def answers(self) -> Answers:
        """As they are now, with `UNASKED` where there is none; a copy unless all went straight along."""
        if self._slots is None and len(self.first) == len(self.questions):
            return self.first
        first = list(self.first)
        slots = self._slots or [UNASKED] * len(self.questions)
        return Answers(first + slots[len(first) :], self.first.kinds)

    def is_answered(self, place: int) -> bool:
        return place < len(self.first) or (self._slots is not None and self._slots[place] is not UNASKED)

    def enter(self) -> bool:
        """Whether the lane that comes now may go straight along; only the first may, and only alone."""
        if self._entered:
            self.spread()
            return False
        self._entered = True
        return self._slots is None

    def spread(self) -> None:
        """Nobody goes straight along any more. From the side that gives the walk out; harmless twice."""
        with self._lock:
            if self._slots is None and not self.concluding:
                self._slots = [UNASKED] * len(self.questions)
                left = list(self.ahead)
                self._taken -= len(left)
                self.rest = zip(self._places[self._taken :], left, strict=False)

    def conclude(self) -> None:
        """From the lane that went straight along. Not where anything is left to be asked, awaited or told."""
        if self.then is None:
            return
        with self._lock:
            whole = len(self.first) == len(self.questions) and self._slots is None
            if not whole or self._over or self._awaited:
                return
            self.concluding = True
            self._ending.acquire()
        try:
            self.first.after = After(self.then(self.first))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever wants the answers
            self.first.after = After(error=error)
        finally:
            self._ending.release()

    def join(self) -> None:
        """Until what is being concluded is over."""
        with self._ending:
            pass

    def again(self, places: Iterable[int]) -> None:
        """What was taken but never asked, for the lane that comes next."""
        self.spread()
        self.rest = iter([(place, self.questions[place]) for place in places])

    def put(self, place: int, answer: Any) -> None:
        """From a lane, which has its place only since the walk was spread."""
        if self._slots is not None:
            self._slots[place] = answer

    def set_aside(self, place: int, answer: Any) -> None:
        """An answer that has to be awaited, which a lane cannot do."""
        with self._lock:
            if not self._over:
                self._awaited[place] = answer
                return
        discard(answer)

    def finish(self) -> dict[int, Awaitable[Any]]:
        """From now on, nothing is set aside any more. What was."""
        with self._lock:
            self._over = True
            return self._awaited


class Lane:
    """One thread. It is a daemon, so that a brain that never returns cannot keep the program from ending."""

    __slots__ = ("_along", "_at", "_inbox", "_leaving", "_linger", "_lock", "_thread", "ended")

    def __init__(self, linger: float = LINGER_SECONDS) -> None:
        self._inbox: queue.SimpleQueue[Walk | None] = queue.SimpleQueue()
        self._linger = linger
        #: Held while it is decided that the thread ends, and by whoever relies on it not to.
        self._lock = threading.Lock()
        self._leaving = False
        #: The walk that it is to go straight along.
        self._along: Walk | None = None
        self._at = _NOWHERE
        self.ended = False
        self._thread = threading.Thread(target=self._live, name=LANE_NAME, daemon=True)
        self._thread.start()

    # --- from outside --------------------------------------------------------------------------------

    @property
    def at(self) -> int:
        """The place in the list at which it is; negative before it has come to the first."""
        along = self._along
        return self._at if along is None else along.front

    def go_straight(self, walk: Walk) -> None:
        """The next walk of one that has just concluded. From its own thread, while nobody stops it."""
        walk.enter()
        self._along = walk

    def give(self, walk: Walk) -> bool:
        """False: it has ended, take another."""
        with self._lock:
            if self.ended or self._leaving:
                return False
            self._at = _NOWHERE
            self._along = walk if walk.enter() else None
            self._inbox.put(walk)
            return True

    def leave(self) -> int:
        """Stop after the present question and end. The place of that question; of those after it, none is asked.

        A lane writes where it is and then looks whether it shall leave; here it is the other way round. So either it
        sees the flag before it asks, or its new place is seen here. One that goes straight along finds nothing ahead.
        """
        self._leaving = True
        if (along := self._along) is not None:
            along.spread()
        self._inbox.put(None)
        return self.at

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def cpu_seconds(self) -> float:
        """What it has spent so far. To ask for the time of a thread that is gone may crash the program."""
        with self._lock:
            ident = self._thread.ident
            if self.ended or ident is None:
                return 0.0
            return time.clock_gettime(time.pthread_getcpuclockid(ident))

    # --- in its thread -------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            with self._lock:
                self.ended = True

    def _serve(self) -> bool:
        """The next walk; nothing of it is held when this returns."""
        walk = self._next()
        if walk is None:
            return False
        try:
            self._ask(walk)
        finally:
            walk.tell(self)
        return True

    def _next(self) -> Walk | None:
        while not self.ended:
            with contextlib.suppress(queue.Empty):
                walk = self._inbox.get(timeout=self._linger)
                if walk is not None:
                    return walk
            with self._lock:
                self.ended = self._inbox.empty()
        return None

    def _ask(self, walk: Walk) -> None:
        while True:
            self._go_along(walk)
            if self._along is None:
                break
            walk.conclude()
            following = walk.tell_concluded(self) if walk.concluding else None
            if following is None:
                break
            walk = following
        self._along = None
        if not self._leaving:
            self._take_turns(walk)

    def _go_along(self, walk: Walk) -> None:
        """Every step here is paid once per brain and turn: hence one `try` around all, and no place to count."""
        ahead, answers, kinds = walk.ahead, walk.first, walk.first.kinds
        usual: type | None = None
        while True:
            try:
                for decide, view in ahead:
                    answer = decide(view)
                    answers.append(answer)
                    if type(answer) is not usual:
                        usual = type(answer)
                        if usual not in kinds and not _is_plain(walk, len(answers) - 1, answer):
                            usual = None
            except BaseException as error:  # noqa: BLE001 - a brain must not end the run, whatever it raises
                answers.append(failure(error))
                kinds.add(Failed)
            else:
                return

    def _take_turns(self, walk: Walk) -> None:
        """Beside other lanes, with brains that are slow anyway."""
        kinds = walk.first.kinds
        for place, (decide, view) in walk.rest:
            self._at = place
            if self._leaving:
                return
            try:
                answer = decide(view)
            except BaseException as error:  # noqa: BLE001 - a brain must not end the run, whatever it raises
                walk.put(place, failure(error))
                kinds.add(Failed)
                continue
            walk.put(place, answer)
            if type(answer) not in kinds:
                _is_plain(walk, place, answer)


def _is_plain(walk: Walk, place: int, answer: Any) -> bool:
    """Note a type that was not known yet; what has to be awaited is set aside, each time."""
    kind = type(answer)
    if not (hasattr(kind, "__await__") or kind is GeneratorType):
        walk.first.kinds.add(kind)
        return True
    if inspect.isawaitable(answer):
        walk.set_aside(place, answer)
    return False
