"""The contract of an isolation level. Every method is documented here and nowhere else.

`Isolation` is a level: what it can do, and how an agent is started or found again. `Cell` is one start (attempt) of one
agent instance at that level. `Listener` is what a cell tells the manager. The lifecycle knows only these three.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol
from uuid import UUID

from ostler.agents import Agent, AgentKind, AgentMaker, AgentManifest, Message, WaitAnswer, WaitAsked
from ostler.clock import Clock
from ostler.errors import AgentInitializationError, InvalidOperationError
from ostler.isolation.log_files import FileLogs, InstanceLogs, NoLogs
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import ResourceLimits
from ostler.model.states import AgentPriority, Enforcement, IsolationLevel

#: The last part of a stop's grace, in which the agent gets TERM instead of a message.
LAST_CALL = timedelta(seconds=0.5)
#: The manager's variables that an agent outside its program gets unless the settings name others.
DEFAULT_NAMES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER")


#: What a level without terminals answers.
NO_TERMINALS = "this level has no terminals; commands at level process can have one"


class Verb(StrEnum):
    """What an agent can be asked."""

    INITIALIZE = "initialize"
    PROCESS = "process"  #: payload: the request; returns the result
    HEALTH = "health"  #: returns None when healthy, else a sentence
    FINAL_STATE = "final_state"  #: returns a mapping or None
    CLEANUP = "cleanup"  #: runs the clean-up hooks, each within its own time-out; returns a sentence per failed hook
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a level can do. Declared data; checked before a quota or a directory is reserved."""

    #: By field of `ResourceLimits`, how well the level enforces it. A missing field is advisory.
    limits: Mapping[str, Enforcement] = field(default_factory=dict)
    #: `Cell.freeze` works.
    freezes: bool = False
    #: `Cell.stop` ends an agent that ignores it.
    kills: bool = False
    #: Agents survive the death of the manager, and `adopt` finds them.
    outlives_manager: bool = False
    #: Commands can have a terminal, and a standard input that stays open.
    has_terminals: bool = False
    #: Each agent has a process of its own, so that a start costs a core for a moment and usage is its own.
    has_own_process: bool = False
    kinds: frozenset[AgentKind] = frozenset({AgentKind.PYTHON})

    def holds(self, limit: str) -> Enforcement:
        return self.limits.get(limit, Enforcement.ADVISORY)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPlan:
    """All that is needed to start one attempt of one instance."""

    instance_id: UUID
    attempt: int
    name: str
    manifest: AgentManifest
    #: Makes the agent object, only inside the program: `to_json` leaves it out, for it is an object of the manager.
    maker: AgentMaker
    limits: ResourceLimits
    #: Given to the agent as `context.data`.
    context: Mapping[str, Any]
    workdir: Path | None = None
    #: True: a private directory, made on first use. False: a directory of the user, never made or removed here, and the
    #: working directory of the process.
    owns_workdir: bool = True
    #: Variables of the definition and of this spawn; they win over inherited ones. Also `context.env`.
    env: Mapping[str, str] = field(default_factory=dict)
    #: The log that a level inside the program writes; None: no log.
    log: Path | None = None
    priority: AgentPriority = AgentPriority.NORMAL
    #: Of a command: rows and columns of its terminal, and whether its standard input stays open.
    terminal: tuple[int, int] | None = None
    open_stdin: bool = False
    #: Options that only one level reads: image, network, mounts, user (container); sandbox (process).
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Where another process finds the code of a Python agent, as `PythonProgram.source`; None: found by `maker`.
    source: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """For another machine. The plan of a Python agent needs its `source`."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "maker"}
        records = {name: json.loads(values[name].to_json()) for name in ("manifest", "limits")}
        return json.dumps({**values, **records}, default=_plain)

    @classmethod
    def from_json(cls, text: str | bytes) -> StartPlan:
        values = json.loads(text)
        for name in ("workdir", "log"):
            values[name] = None if values[name] is None else Path(values[name])
        values["manifest"] = AgentManifest.from_json(json.dumps(values["manifest"]))
        values["limits"] = ResourceLimits.from_json(json.dumps(values["limits"]))
        values["instance_id"] = UUID(values["instance_id"])
        values["priority"] = AgentPriority(values["priority"])
        values["terminal"] = None if values["terminal"] is None else tuple(values["terminal"])
        return cls(**values, maker=_made_elsewhere)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path | UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _made_elsewhere() -> Agent:
    raise InvalidOperationError("this plan came from another program; only a level outside the program can start it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """What a terminal got, up to a position. Where earlier output is not kept any more, `data` clears it first."""

    #: The unit whose terminal it is, and how much its terminal got so far.
    unit: str
    position: int
    data: bytes = b""
    #: The program has ended, and this is all.
    has_ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """Bytes for the standard input of a program."""

    data: bytes = b""
    #: Who writes, and how much the same writer sent before: what is sent again after a lost answer is taken once.
    writer: str | None = None
    at: int = 0
    #: Nothing follows. Not for a terminal.
    close: bool = False
    #: Of the writer's window; a terminal takes the size of who typed last.
    size: tuple[int, int] | None = None


class Console(Protocol):
    """The terminal and the open standard input of the newest command of an instance: living, or ended a moment ago.

    All raise `AgentGoneError` where there is no such command, or none any more, and `InvalidOperationError` where it
    has no terminal or no open input.
    """

    async def read(self, after: Screen | None) -> Screen:
        """What the terminal got after `after`, all that is kept for None. Waits for it at most 10 s."""
        ...

    async def write(self, data: Input) -> tuple[int, bool]:
        """How many bytes were taken, perhaps none after 10 s, and whether the program reads no more."""
        ...

    async def resize(self, size: tuple[int, int] | None, *, redraw: bool = False) -> None:
        """None: the size it has. `redraw`: a program that sees the size it had is made to draw its screen again."""
        ...


@dataclass(kw_only=True)
class Site:
    """The manager's surroundings, for levels that reach beyond its program. Shared by all levels of a manager."""

    #: The home; None: nothing is kept on disk, and agents end with the manager.
    directory: Path | None = None
    #: How long agents live on without a manager (the lease).
    outlive: timedelta = timedelta(0)
    #: The epoch of the manager's ownership of the store; set when that is taken, hence mutable.
    epoch: int = 0
    #: Names of variables that agents outside the program inherit.
    environment: tuple[str, ...] = DEFAULT_NAMES
    #: Bytes that each agent may write in a second; what is beyond is dropped and counted.
    output_rate: int = 2 * 1024 * 1024

    @property
    def outlives(self) -> bool:
        """Agents outside the program live on without a manager."""
        return self.directory is not None and self.outlive > timedelta(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How an attempt ended without being asked to."""

    outcome: AttemptOutcome
    detail: str | None = None
    exception_type: str | None = None
    stack_trace: str | None = None
    #: Of the agent's process: exit code, or number of the signal that killed it.
    code: int | None = None
    signal: int | None = None
    #: UTC; None when nothing recorded it.
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
    """CPU since the start; memory and threads now. Memory of a shared program is the whole program's."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_is_shared: bool = False
    thread_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LastOutput:
    """What a cell wrote last, as it is known without reading a log; up to a second old."""

    at: datetime
    #: Without control sequences, and only its last part where it is long. It may not have an end yet.
    line: str
    #: Bytes that came faster than `Site.output_rate` allows, and are in no log.
    dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopReport:
    #: The agent ended by itself within its grace.
    graceful: bool
    #: Processes that could not be ended, as a sentence; None: proven that nothing is left.
    left_behind: str | None = None


class OtherVersionError(InvalidOperationError):
    """What holds the agents belongs to another version of Ostler: they go on, and cannot be adopted before it ends."""

    def __init__(self, held_by: str, remedy: str) -> None:
        super().__init__(f"agents of this home are {held_by}; {remedy}")
        #: By what, as the end of a sentence about an agent.
        self.held_by = held_by


class Listener(Protocol):
    """Called by a cell, always on the loop that called `start` or `adopt`, also while that call is under way.

    What a listener raises is logged by the cell and changes nothing else.
    """

    def on_message(self, attempt: int, message: Message) -> asyncio.Future[None] | None:
        """The agent sent a message. Where a future is returned, no message follows before it is done (back-pressure).

        Signals and token counts carry a number where the level can repeat them. Those that the manager did not `ack`
        come again, in order, after an adoption; the listener drops the numbers that it has.
        """
        ...

    async def on_question(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        """The agent waits for this answer. Cancelled when the agent no longer does. Asked again after an adoption."""
        ...

    def on_report(self, attempt: int, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        """After an adoption, once: calls that an earlier manager made and did not acknowledge, running or answered,
        and the questions that are open. `Cell.call` with such an id joins the call instead of repeating it.

        Comes when the agent can say it: of a frozen or blocked agent later, of one that ends first never.
        """
        ...

    def on_exit(self, attempt: int, how: Exit) -> None:
        """The agent ended without being asked to. Nothing of it is left but what cannot be killed; `Cell.stop` names
        that. A second call for an attempt is harmless.
        """
        ...


class Cell(ABC):
    """One attempt of one instance, living or being ended."""

    @property
    @abstractmethod
    def handle(self) -> Mapping[str, Any]:
        """JSON that the store keeps for `adopt`. Never a bare process id."""

    @property
    def enforcement(self) -> Mapping[str, Enforcement] | None:
        """How well this very cell enforces each limit; None: as the level's capabilities say."""
        return None

    @property
    def ended(self) -> Exit | None:
        """How it ended without being asked to; None while it lives or when it was stopped."""
        return None

    @property
    def is_stuck(self) -> bool:
        """A cancelled call did not stop within 5 s: only force helps."""
        return False

    @property
    def is_idle(self) -> bool:
        """It lives, and no thread or process of its own runs now: there is nothing to ping or to measure."""
        return False

    @property
    def may_have_lost_calls(self) -> bool:
        """Its holder was replaced since the start: a call that the report of an adoption does not name was lost."""
        return False

    @property
    def last_output(self) -> LastOutput | None:
        """Of what the store has not been told to forget; None: it has written nothing."""
        return None

    @abstractmethod
    async def call(self, verb: Verb, payload: Any = None, *, call_id: UUID | None = None) -> Any:
        """Ask the agent and return its answer. Calls may overlap. A call to a frozen cell waits for the thaw.

        With a `call_id` the agent keeps its answer until `ack`, and the same id again joins or repeats the answer: the
        work runs once. Without one the answer is acknowledged when it arrives.
        Cancelling cancels the work in the agent and returns when that has stopped, or after 5 s (see `is_stuck`).
        Raises `AgentExecutionError` for what the agent raised, `AgentGoneError` when the agent has ended.
        """

    def ack(self, calls: Collection[UUID] = (), message: int = 0) -> None:  # noqa: B027 - nothing survives a program
        """The manager has committed the answers of these calls, and every message up to this number.

        The agent forgets them. Sent within 50 ms, so that an acknowledged answer can come once more after a crash of
        the manager. Unknown ids are ignored.
        """

    @abstractmethod
    async def ping(self) -> None:
        """Return when the agent's loop answers: the heartbeat. Raises `AgentGoneError`."""

    @abstractmethod
    async def freeze(self) -> None:
        """Stop every process of the cell where it is; a later run of a command waits for `thaw`. Twice is harmless."""

    @abstractmethod
    async def thaw(self) -> None:
        """Undo `freeze`. Harmless on a cell that is not frozen."""

    @abstractmethod
    async def usage(self) -> Usage: ...

    @abstractmethod
    async def stop(self, grace: timedelta) -> StopReport:
        """Ask the agent to end, wait for at most `grace`, then kill it. Works on a frozen cell.

        Takes at most the grace and 15 s. Further callers get the same report and can only shorten the grace. After a
        report with something left behind, calling it again kills again.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Kill what lives, and release everything: process, exit record, socket, threads. Never raises; twice is fine.

        The manager has committed the end of the attempt before: nothing can be asked about it afterwards.
        """

    def detach(self) -> None:  # noqa: B027 - nothing survives a program
        """Leave the agent alive for the next manager. Calls raise `AgentGoneError`, the listener hears nothing more,
        `stop` and `destroy` do nothing. Only where `outlives_manager`. Never raises; twice is fine.
        """


class LeftBehindError(AgentInitializationError):
    """A start failed or was cancelled, and something of it could not be ended: stop `cell` until nothing is left."""

    def __init__(self, cell: Cell, left_behind: str) -> None:
        super().__init__(f"its start failed and could not be undone: {left_behind}")
        self.cell = cell


class Isolation(ABC):
    """One isolation level of one manager."""

    level: ClassVar[IsolationLevel]

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        self._clock = clock
        self._site = site or Site()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    async def prepare(self, plan: StartPlan) -> None:  # noqa: B027 - optional
        """What may be slow or fail before anything is started: find the source, start the keeper, pull the image.

        Leaves nothing that would have to be undone.
        """

    @abstractmethod
    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        """Start the attempt and return when the agent object exists; `call(INITIALIZE)` follows.

        A start that fails or is cancelled leaves nothing; undoing it takes no longer than a `stop` without grace.
        Where something of it could not be ended, it raises `LeftBehindError` from what made it fail.
        """

    async def adopt(self, handle: Mapping[str, Any] | None, plan: StartPlan, listener: Listener) -> Cell | Exit:
        """Find what an earlier manager started: the living cell, or how it ended. Does not wait for the agent.

        Of one that ended and left what cannot be killed, a cell too: its exit is reported, and `stop` tries again.
        Without a handle only the intent to start was committed; instance and attempt identify it. Raises
        `InvalidOperationError` when it cannot be known now; then it may be called again.
        """
        del handle, plan, listener
        return Exit(outcome=AttemptOutcome.LOST, detail="it lived inside a program that has ended")

    def console(self, instance_id: UUID) -> Console:
        """Of its newest command."""
        del instance_id
        raise InvalidOperationError(NO_TERMINALS)

    async def sweep(self, keep: Collection[tuple[UUID, int]]) -> int:
        """End every attempt that is neither in `keep` nor a cell of this manager, and forget its exit record.

        Called after recovery, and again when the ends found by `adopt` are committed. Returns how many lived.
        """
        del keep
        return 0

    def logs(self, instance_id: UUID) -> InstanceLogs:
        """What an instance of this level wrote: files of the home, where a level does not keep it elsewhere."""
        return NoLogs() if self._site.directory is None else FileLogs(self._site.directory, instance_id)

    async def close(self) -> None:  # noqa: B027 - optional
        """Release what the level holds. Cells that were not destroyed are detached, or end where nothing outlives."""
