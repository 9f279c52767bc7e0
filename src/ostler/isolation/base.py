"""The one contract of every isolation level. Each method is documented here and nowhere else.

A level has two halves. `Isolation` is the level itself: what it can do, and how to start or find again. `Cell` is
one living start of one instance. The lifecycle knows these two and nothing of threads, processes or containers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol
from uuid import UUID

from ostler.agents import AgentKind, AgentMaker, AgentManifest, Message, WaitAnswer, WaitAsked
from ostler.clock import Clock
from ostler.errors import AgentInitializationError, InvalidOperationError
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits
from ostler.model.states import AgentPriority, Enforcement, IsolationLevel

#: How long an agent that did not end when it was asked has after a signal, before force.
LAST_CALL = timedelta(seconds=0.5)
_NOTHING: Mapping[UUID, Any] = MappingProxyType({})
#: What of the manager's environment an agent outside its program sees, unless it is told otherwise.
DEFAULT_NAMES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER")


class Verb(StrEnum):
    """What can be asked of a living agent."""

    INITIALIZE = "initialize"
    PROCESS = "process"  #: payload: the request; answers the result
    HEALTH = "health"  #: answers None when well, else a text that says what is wrong
    FINAL_STATE = "final_state"  #: answers a mapping or None
    CLEANUP = (
        "cleanup"  #: runs the hooks, each within its own time-out; answers a list of texts, one per hook that failed
    )
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a level can do. Declared, and checked before anything is reserved."""

    #: By field of `ResourceLimits`: how well this level holds it. One that is missing is advisory.
    limits: Mapping[str, Enforcement] = field(default_factory=dict)
    #: Can stop an agent in mid-work and let it go on where it was.
    freezes: bool = False
    #: Can end an agent that does not want to end, for certain.
    kills: bool = False
    #: What it starts lives on when the manager's program dies, and can be found again.
    outlives_manager: bool = False
    kinds: frozenset[AgentKind] = frozenset({AgentKind.PYTHON})

    def holds(self, limit: str) -> Enforcement:
        return self.limits.get(limit, Enforcement.ADVISORY)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPlan:
    """All that is needed to start one instance once."""

    instance_id: UUID
    attempt: int
    name: str
    manifest: AgentManifest
    #: Makes the agent object; a level that starts elsewhere goes by `manifest.source` instead.
    maker: AgentMaker
    limits: ResourceLimits
    context: Mapping[str, Any]
    #: The directory that the instance works in; None where it has none.
    workdir: Path | None = None
    #: True: the private directory of the instance, made when it is first asked for. False: a directory that the spawn
    #: has given; neither the level nor the agent makes or removes it, and a process starts with it as its working
    #: directory.
    owns_workdir: bool = True
    #: Extra variables of the definition and of this spawn, for the agent's process; they win over the passed-on ones.
    #: Levels none and thread set none of them, the agent reads them as `context.env`.
    env: Mapping[str, str] = field(default_factory=dict)
    #: The log of this start, which a level inside the program writes itself; None where nothing is kept.
    log: Path | None = None
    priority: AgentPriority = AgentPriority.NORMAL


@dataclass(kw_only=True)
class Site:
    """Where a manager stands: what a level that reaches beyond its program has to know of it."""

    #: Where a level may keep things; None when nothing is to be kept.
    directory: Path | None = None
    #: How long agents go on without a manager, where they can.
    outlive: timedelta = timedelta(0)
    #: The epoch of the manager's lease. Known only when the lease is taken, hence not frozen.
    epoch: int = 0
    #: Names of the variables that are passed on to agents outside the program.
    environment: tuple[str, ...] = DEFAULT_NAMES
    #: Bytes that each agent may write in a second; what is beyond is dropped and counted.
    output_rate: int = 2 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a start ended by itself."""

    outcome: AttemptOutcome
    detail: str | None = None
    exception_type: str | None = None
    stack_trace: str | None = None
    #: Of its process, where it had one: the exit code, or the number of the signal that ended it.
    code: int | None = None
    signal: int | None = None
    #: When it ended, in UTC, as far as the keeper has recorded it.
    ended_at: datetime | None = None

    def before_ready(self, when: str) -> AgentInitializationError:
        """The same as an error, for a caller that waits for the agent to become ready."""
        return AgentInitializationError(
            f"{when}: {self.detail or self.outcome}",
            outcome=self.outcome,
            exception_type=self.exception_type,
            stack_trace=self.stack_trace,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a cell uses now. CPU is counted from its start; memory of a shared program is the whole program's."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_is_shared: bool = False
    thread_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopReport:
    """What stopping came to."""

    #: It ended by itself within its grace.
    graceful: bool
    #: What could not be ended and lives on, cut off; None when all is proven gone.
    left_behind: str | None = None


class Listener(Protocol):
    """What the manager is told by a cell. Called on the loop that called `start` or `recover`.

    Messages and questions of an agent may arrive while `start` or `recover` is still under way.
    """

    def heard(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        """The agent said something. A future that is answered means: deliver nothing more until it is done.

        What an agent says last of all is delivered all the same. A numbered message that was not acknowledged by
        `Cell.confirm_heard` is delivered again, in order, after an adoption; the listener drops the numbers that it
        has heard before.
        """
        ...

    async def asked(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        """The agent waits for this answer. Cancelled when the agent does not wait any more."""
        ...

    def exited(self, attempt: int, how: Exit) -> None:
        """The agent ended and the manager had not asked for it. A second call for the same attempt is harmless."""
        ...


class Cell(ABC):
    """One living start of one instance."""

    @property
    @abstractmethod
    def handle(self) -> Mapping[str, Any]:
        """JSON by which `recover` finds it again. Never a bare process id."""

    @abstractmethod
    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        """Ask the agent something and wait for the answer; calls may overlap.

        With a `call_id` the answer is kept until `confirm`, and a call of `in_flight` is joined, not begun. Without one
        the call is confirmed as soon as it is answered, and so is the initialisation.

        Cancelling the caller cancels the work, and returns only when it has stopped or the level gives it up; such a
        call is confirmed by the cell. A call that meets a frozen cell waits for the thaw.
        Raises `AgentExecutionError` for what the agent raised, `AgentGoneError` when the agent has ended.
        """

    def confirm(self, call_id: UUID) -> None:  # noqa: B027 - inside a program there is no next manager
        """The manager has committed the answer of this call; the agent, or the keeper, may forget it.

        Until then the next manager finds the call in `in_flight`, and `rejoin` gives the same answer without running
        it again. The acknowledgement is sent within 50 ms: a manager that is killed in between may find a confirmed
        call once more. An unknown or unanswered call is passed over; a cell that is destroyed needs no confirm.
        """

    def confirm_heard(self, number: int) -> None:  # noqa: B027 - as above
        """The manager has committed every numbered message up to this one; the agent may forget them.

        Until then the agent holds each of them (at most 100,000, then it gets an `AgentBusyError`) and says them again
        to the next manager. Sent within 50 ms, as `confirm`.
        """

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        """Calls that an earlier manager made, found again with the cell and not taken up by `rejoin` yet.

        Those that were answered and not confirmed are among them; they are no running work.
        """
        return _NOTHING

    @property
    def may_have_lost_calls(self) -> bool:
        """What held its processes was replaced since it was started: a call that is not in `in_flight` was lost."""
        return False

    @property
    def open_asks(self) -> frozenset[UUID]:
        """The `ask_id` of each question that the agent waits for. Of an adopted cell: complete once it has reported."""
        return frozenset()

    def on_reported(self, tell: Callable[[], None]) -> None:
        """Call `tell` once, when it is known what an adopted agent works on, also when that is nothing.

        At the next turn of the loop when that is known already; of an agent that is frozen or blocks its loop when it
        goes on; never of one that ends first. `in_flight` and `open_asks` are complete then.
        """
        asyncio.get_running_loop().call_soon(tell)

    async def rejoin(self, call_id: UUID) -> Any:
        """As `call`, for one of `in_flight`."""
        raise InvalidOperationError(f"no call {call_id} was found again")

    @property
    def enforcement(self) -> Mapping[str, Enforcement] | None:
        """By field of `ResourceLimits`, how well this very cell holds it, and by a name of its own what it bounds
        besides; None: as the level declares it.
        """
        return None

    @property
    def is_stuck(self) -> bool:
        """A cancelled call did not stop within the level's bound: only force helps now."""
        return False

    @property
    def ended(self) -> Exit | None:
        """How it ended by itself, as far as that is known; None while it lives or was stopped."""
        return None

    @abstractmethod
    async def ping(self) -> None:
        """Returns when the agent's place answers; the heartbeat. Costs nothing to speak of."""

    def alive_now(self) -> bool | None:
        """Whether it lives and uses nothing of its own, where that can be said without asking; else None."""
        return None

    @abstractmethod
    async def freeze(self) -> None:
        """Stop everything in it where it stands; only where `capabilities.freezes`.

        A command without a run is frozen as well: a run that would begin waits for the thaw.
        """

    @abstractmethod
    async def thaw(self) -> None:
        """Let a frozen cell go on; one that is not frozen stays as it is."""

    @abstractmethod
    async def stop(self, grace: timedelta) -> StopReport:
        """End it: ask, wait for at most `grace`, then force. Bounded, also while frozen; safe to call twice.

        Takes at most the grace and 15 s more; where a keeper does not answer, the grace and 35 s.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Release what is left: threads, sockets, files. Never raises; safe to call twice.

        What still lives is ended by force first. Where a keeper does not answer, it returns after about 4 s; the
        keeper ends the rest when it answers again.
        """

    def detach(self) -> None:  # noqa: B027 - inside a program nothing goes on without it
        """Leave it alone, alive, for the next manager: open calls and questions end here and go on there.

        Calls raise `AgentGoneError`, nothing is said to the listener any more, and `stop` does nothing from now on.
        Only where `capabilities.outlives_manager`; never raises, safe to call twice.
        """

    @abstractmethod
    async def usage(self) -> Usage:
        """What it uses now."""


class Isolation(ABC):
    """One level."""

    level: ClassVar[IsolationLevel]

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        self._clock = clock
        self._site = site or Site()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    async def prepare(self, plan: StartPlan) -> None:  # noqa: B027 - most levels have nothing to prepare
        """Whatever can fail before anything lives: an image, a template, a directory. Undone by `discard`.

        Takes at most 60 s, where no keeper answers; a cancelled one returns at once.
        """

    async def discard(self, plan: StartPlan) -> None:  # noqa: B027 - nor to undo
        """Undo `prepare`. Never raises."""

    @abstractmethod
    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        """Make a cell in which the agent object exists; it is initialised by `call`. Failing leaves nothing.

        The caller bounds it by cancelling; what was begun is then undone first, which takes at most 5 s. Where a keeper
        does not answer in that time, it ends what is left as soon as it does.
        """

    async def recover(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        """Find again what an earlier manager started: the living cell, or how it ended.

        Without a handle only the intent to start was written down; it is found by instance and attempt. The plan's
        maker is not needed here. Takes 2 s where the agent blocks its loop, and at most 100 s where a keeper has to be
        started first or does not answer; then it raises `InvalidOperationError`, and may be called again.
        """
        del handle, plan, listener  # inside a program nothing outlives it
        return Exit(outcome=AttemptOutcome.LOST, detail="it lived inside a program that has ended")

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        """After recovery: end all that the level still holds and that is not in `keep` (instance, attempt).

        Answers how many there were. Takes at most 130 s, where a keeper does not answer, and raises as `recover`.
        """
        del keep
        return 0

    async def kill_survivors(self, instance_id: UUID) -> str | None:
        """Kill once more what starts of this instance left that could not be ended then. Answers what still lives.

        Costs nothing where nothing was left. As long as it answers something the instance is not at its end.
        """
        del instance_id
        return None

    async def forget(self, instance_id: UUID, attempt: int) -> None:  # noqa: B027 - nor to forget
        """How this attempt ended, as `recover` has told, is committed: the level need not keep it. Never raises."""

    async def close(self) -> None:  # noqa: B027 - nor to release
        """Release what the level itself holds. Cells that were not destroyed are detached."""
