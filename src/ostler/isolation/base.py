"""The one contract of every place an agent can live in. Each method is documented here and nowhere else.

A level has two halves. `Isolation` is the level itself: what it can do, and how to start or find again. `Cell` is
one living start of one instance. The lifecycle knows these two and nothing of threads, processes or containers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol
from uuid import UUID

from ostler.agents import AgentKind, AgentMaker, AgentManifest, Message, WaitAnswer, WaitAsked
from ostler.errors import AgentInitializationError, InvalidOperationError
from ostler.model import AgentPriority, AttemptOutcome, Enforcement, IsolationLevel, ResourceLimits
from ostler.seams import Clock

#: How long one that did not end when it was asked has after a signal, before force.
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
    kinds: frozenset[AgentKind] = frozenset({AgentKind.PYTHON, AgentKind.COMMAND})

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
    #: The private directory of the instance; None where it has none. May not exist yet.
    workspace: Path | None = None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a start ended by itself."""

    outcome: AttemptOutcome
    detail: str | None = None
    exception_type: str | None = None
    stack_trace: str | None = None

    def before_ready(self, when: str) -> AgentInitializationError:
        """The same as an error, for whoever waited for it to become ready."""
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
    """The manager's ear. A level calls it on the loop that called `start`, and bears that nobody listens any more."""

    def heard(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        """Take note of it. Who has enough for now answers what to wait for; until then nothing more should be said.

        What an agent says last of all is said all the same.
        """
        ...

    async def asked(self, attempt: int, wait: WaitAsked) -> WaitAnswer: ...

    def exited(self, attempt: int, how: Exit) -> None:
        """Only for an end that nobody asked for. Saying it twice is harmless."""
        ...


class Cell(ABC):
    """One living start of one instance."""

    @property
    @abstractmethod
    def handle(self) -> Mapping[str, Any]:
        """JSON by which `recover` finds it again. Never a bare process id."""

    @abstractmethod
    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        """Ask the agent something and wait for the answer; calls may overlap. `call_id` is for `in_flight` later.

        Cancelling the caller cancels the work, and returns only when it has stopped or the level gives it up.
        Raises `AgentExecutionError` for what the agent raised, `AgentGoneError` when the agent has ended.
        """

    @property
    def in_flight(self) -> Mapping[UUID, Verb]:
        """Calls that an earlier manager made, found again with the cell and not taken up by `rejoin` yet."""
        return _NOTHING

    def when_found(self, tell: Callable[[], None]) -> None:  # noqa: B027 - most know them as soon as they are found
        """Call this when more of `in_flight` comes to light later: an agent that blocks tells when it does not."""

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
        """Stop everything in it where it stands; only where `capabilities.freezes`."""

    @abstractmethod
    async def thaw(self) -> None: ...

    @abstractmethod
    async def stop(self, grace: timedelta) -> StopReport:
        """End it: ask, wait for at most `grace`, then force. Bounded, also while frozen; safe to call twice."""

    @abstractmethod
    async def destroy(self) -> None:
        """Let go of what is left: threads, sockets, files. Never raises; safe to call twice."""

    def let_go(self) -> None:  # noqa: B027 - inside a program nothing goes on without it
        """Leave it alone, alive, for the next manager: open calls and questions end here and go on there.

        Calls raise `AgentGoneError`, nothing is said to the listener any more, and `stop` does nothing from now on.
        Only where `capabilities.outlives_manager`; never raises, safe to call twice.
        """

    @abstractmethod
    async def usage(self) -> Usage: ...


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
        """Whatever can fail before anything lives: an image, a template, a directory. Undone by `discard`."""

    async def discard(self, plan: StartPlan) -> None:  # noqa: B027 - nor to undo
        """Undo `prepare`. Never raises."""

    @abstractmethod
    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        """Make a cell in which the agent object exists; it is initialised by `call`. Failing leaves nothing."""

    async def recover(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        """Find again what an earlier manager started: the living cell, or how it ended.

        Without a handle only the intent to start was written down; it is found by instance and attempt. The plan's
        maker is not needed here.
        """
        del handle, plan, listener  # inside a program nothing outlives it
        return Exit(outcome=AttemptOutcome.LOST, detail="it lived inside a program that has ended")

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        """After recovery: end all that the level still holds and that is not in `keep` (instance, attempt).

        Answers how many there were.
        """
        del keep
        return 0

    async def end_remains(self, instance_id: UUID) -> str | None:
        """Strike once more what starts of it left that could not be ended then. What lives in spite of it, if any.

        Costs nothing where nothing was left. As long as it answers something the instance is not at its end.
        """
        del instance_id
        return None

    async def close(self) -> None:  # noqa: B027 - nor to let go
        """Let go of what the level itself holds. Every cell has been destroyed before."""
