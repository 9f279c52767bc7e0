"""Messages to the task that owns an instance: verbs of callers, and news of the agent, of operations and of timers.

A message that carries an attempt counts only if it is the record's present one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.agents.messages import WaitAnswer, WaitAsked
from ostler.clock import Timer
from ostler.errors import StaleWriterError
from ostler.isolation import base
from ostler.isolation.base import Exit
from ostler.model.access import SYSTEM, Actor
from ostler.model.spawn import TerminationOptions
from ostler.model.states import SuspendDepth
from ostler.policy.health import ProbeResult

#: The reason in the record of an agent that was ended because its manager was.
MANAGER_CLOSED = "the manager was closed"


@dataclass(slots=True, eq=False)
class Message:
    """Anything that the owner of an instance acts upon."""


@dataclass(slots=True, eq=False, kw_only=True)
class Verb(Message):
    """A caller waits for `reply`."""

    by: Actor = SYSTEM
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer(self, value: Any) -> None:
        if not self.reply.done():
            self.reply.set_result(value)

    def refuse(self, error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # looked at: the caller may have gone


# --- verbs -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Join(Verb):
    """Wait until the instance is ready, or hear why it did not become so: a spawn."""


@dataclass(slots=True, eq=False, kw_only=True)
class Process(Verb):
    request: Any
    request_id: str | None = None
    #: Of the request; only with an id.
    digest: str = ""
    #: The caller's own limit, waiting included.
    timeout: timedelta | None = None
    #: When it ends, by the monotonic clock.
    due: float | None = None
    timer: Timer | None = None
    #: False: a full agent is an error at once, not a place in the queue.
    wait: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class Withdraw(Message):
    """The caller of a verb was cancelled; it waits for `done` before it goes."""

    of: Verb
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish(self, _: object = None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def finish_with(self, verb: Verb) -> None:
        verb.reply.add_done_callback(self.finish)


@dataclass(slots=True, eq=False, kw_only=True)
class Suspend(Verb):
    depth: SuspendDepth = SuspendDepth.HOLD
    resume_after: timedelta | None = None
    timeout: timedelta | None = None
    reason: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Resume(Verb):
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Restart(Verb):
    reason: str


@dataclass(slots=True, eq=False, kw_only=True)
class Terminate(Verb):
    options: TerminationOptions
    #: How its job ended, where that is why it is terminated.
    exit: Exit | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Verb):
    wait_id: UUID
    outcome: str
    answer_data: Mapping[str, Any] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Detach(Verb):
    """Leave the agent alive for the next manager."""


@dataclass(slots=True, eq=False, kw_only=True)
class Close(Verb):
    """The manager closes: end in order, or park what is suspended."""

    grace: timedelta


# --- what messages refer to --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Operation:
    """Work that takes time: starting, stopping, freezing. It reports by a message and never raises."""

    name: str
    #: The attempt that it is about.
    attempt: int
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True, eq=False, kw_only=True)
class Phase:
    #: Each phase has at most one timer; leaving the phase cancels it.
    timer: Timer | None = None
    #: Messages that are handled when the phase is left.
    deferred: list[Message] = field(default_factory=list)

    @property
    def waiting(self) -> list[Verb]:
        """Verbs that wait for what the phase leads to."""
        return []


class CallEnding(StrEnum):
    """Why a call is being cancelled."""

    TIMEOUT = "timeout"
    WITHDRAWN = "withdrawn"


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One request, from asking until its answer is durable."""

    #: The id at the agent; of a request with an id it is made from that id when it begins, so that it is found again.
    call_id: UUID
    request: Any = None
    request_id: str | None = None
    digest: str = ""
    #: How often the request id was begun, this time included.
    tries: int = 1
    #: Several where the same request id was asked for again; none where it was adopted.
    callers: list[Process] = field(default_factory=list)
    #: What its caller, or the limits of its agent, allow it.
    limit: timedelta = timedelta(0)
    #: Seconds of execution time that are left; the clock stands still while it waits or is frozen.
    left: float = 0.0
    timer: Timer | None = None
    armed_at: float | None = None
    began_at: float = 0.0
    task: asyncio.Task[None] | None = None
    #: Its open waits: while there is one it does not work.
    waits: set[UUID] = field(default_factory=set)
    ending: CallEnding | None = None
    #: Callers that were cancelled and wait until its work has stopped.
    withdrawn: list[Process] = field(default_factory=list)
    adopted: bool = False
    #: It has ended, and its answer is being written or waits for the caller that knows its id.
    ended: bool = False
    result: Any = None
    error: BaseException | None = None

    @property
    def works(self) -> bool:
        return self.task is not None and not self.waits and not self.ended


# --- news of the agent -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class WaitRequested(Message):
    """The agent waits for an answer from outside."""

    attempt: int
    wait: WaitAsked
    reply: asyncio.Future[WaitAnswer]


@dataclass(slots=True, eq=False, kw_only=True)
class WaitCancelled(Message):
    """The agent stopped waiting."""

    wait_id: UUID


@dataclass(slots=True, eq=False, kw_only=True)
class Exited(Message):
    attempt: int
    how: Exit


@dataclass(slots=True, eq=False, kw_only=True)
class Reported(Message):
    """An adopted agent has said what it works on; perhaps nothing."""

    attempt: int
    calls: Mapping[UUID, base.Verb]
    questions: Collection[UUID]


@dataclass(slots=True, eq=False, kw_only=True)
class Probed(Message):
    attempt: int
    result: ProbeResult | None = None
    #: The probe found the agent gone.
    gone: Exit | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class OwnerLost(Message):
    """Another manager owns the store."""

    error: StaleWriterError


# --- news of operations, timers and the store --------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class OperationDone(Message):
    operation: Operation
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class CallEnded(Message):
    call: Call
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class CallDue(Message):
    """The time of a request is over."""

    call: Call


@dataclass(slots=True, eq=False, kw_only=True)
class CallerDue(Message):
    """One caller of a request does not wait any longer."""

    caller: Process


@dataclass(slots=True, eq=False, kw_only=True)
class ReadyToServe(Message):
    """The instance has begun to answer requests."""


@dataclass(slots=True, eq=False, kw_only=True)
class JobEnded(Message):
    """The request that the instance was spawned for was answered, or refused."""

    reply: asyncio.Future[Any]


@dataclass(slots=True, eq=False, kw_only=True)
class NextCalls(Message):
    """The token limit allows another request."""


@dataclass(slots=True, eq=False, kw_only=True)
class WaitDue(Message):
    wait_id: UUID


@dataclass(slots=True, eq=False, kw_only=True)
class Due(Message):
    """The one timer of a phase: backoff, resumption, time limit of a suspension, the next try to end."""

    phase: Phase


@dataclass(slots=True, eq=False, kw_only=True)
class Registered(Message):
    """The definition of the instance was registered."""


@dataclass(slots=True, eq=False, kw_only=True)
class WriteFailed(Message):
    """A fact could not be written."""

    error: BaseException


@dataclass(slots=True, eq=False, kw_only=True)
class WriteDue(Message):
    """What could not be written is tried again."""
