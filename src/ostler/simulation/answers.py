"""A question to a brain, and what stands in the place of an answer that did not come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ostler.agents.failures import MAX_MESSAGE, error_place, error_text
from ostler.model import clipped
from ostler.simulation.view import AgentView

Question = tuple[Callable[[AgentView], Any], AgentView]


@dataclass(frozen=True, slots=True)
class Failed:
    #: Else it raised, or could not be asked at all.
    timed_out: bool
    #: The name of the exception's class.
    error_type: str
    message: str
    #: False: it is not to blame, for nobody has asked it.
    asked: bool = True


@dataclass(frozen=True, slots=True)
class After:
    """What came of the work that was to be done with all answers, in the thread that had got them."""

    value: Any = None
    error: BaseException | None = None


class Answers(list[Any]):
    """In the order of the questions, and which types are among them, so that not everybody has to look at each."""

    __slots__ = ("after", "kinds")

    def __init__(self, answers: Iterable[Any] = (), kinds: set[type] | None = None) -> None:
        super().__init__(answers)
        self.kinds: set[type] = set(map(type, self)) if kinds is None else kinds
        #: None when nothing was done with them yet.
        self.after: After | None = None


Then = Callable[[Answers], Any]
#: Whether all are to be asked once more, by what was made of their answers.
Again = Callable[[Any], bool]


def failure(error: BaseException) -> Failed:
    try:
        text = placed_text(error)
    except BaseException:  # noqa: BLE001 - foreign code writes the text, and nothing that it does may end the asking
        text = type(error).__name__
    return Failed(timed_out=False, error_type=type(error).__name__, message=clipped(text, MAX_MESSAGE))


def placed_text(error: BaseException) -> str:
    """What it was and where, as far as that is known."""
    place = error_place(error)
    return f"{error_text(error)} ({place})" if place else error_text(error)


def overdue(seconds: float) -> Failed:
    text = f"no answer within {seconds:g} s; allow more time, or have the brain give up sooner on what it waits for"
    return Failed(timed_out=True, error_type="TimeoutError", message=text)


def too_many_hung(hung: int, most: int) -> Failed:
    text = (
        f"not asked: {hung} brains were given up on and still hang, and with a concurrency of {most} no place is left; "
        "let brains limit how long they wait, allow a greater concurrency, or start the program again"
    )
    return Failed(timed_out=False, error_type="TooManyHungError", message=text, asked=False)


def still_thinking() -> Failed:
    text = "not asked: what it was asked in an earlier turn, and did not answer in time, it still thinks about"
    return Failed(timed_out=True, error_type="TimeoutError", message=text)


def discard(answer: Any) -> None:
    """An awaitable that nobody will await: a coroutine that has not begun must be closed, or Python complains."""
    if inspect.iscoroutine(answer) and inspect.getcoroutinestate(answer) == inspect.CORO_CREATED:
        answer.close()
