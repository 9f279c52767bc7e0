"""The contract between cells and what holds their processes: our keeper, or a container engine.

A *unit* is one main process with everything it starts: a Python agent, or one run of a command. A *cell* is all units
of one attempt: limits, freeze and usage act on a cell. Names are strings: a cell is `INSTANCEHEX.ATTEMPT`; the unit of
a Python agent has the name of its cell, a run of a command `INSTANCEHEX.ATTEMPT.CALLHEX`.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ostler.isolation.base import NO_TERMINALS, Input, LastOutput, Screen, Usage

ErrorKind = Literal[
    "unknown",  # the holder has no such unit or cell
    "gone",  # the agent's process has just ended; its exit follows
    "taken",  # a unit of this name exists
    "start",  # the program could not be started; the sentence says why
    "freeze",  # the cell did not stand still in time
    "busy",  # not now: the unit still lives, or is being ended
    "lost",  # the holder is gone; what it held has ended, and that was reported before this is raised
    "late",  # no answer in time; the request may still be carried out
    "stale",  # a newer manager has the holder
    "version",  # the holder speaks another version of the protocol
    "refused",  # the holder does not speak to this program
    "ending",  # the holder is about to end; another follows it
    "request",  # the request makes no sense to this holder
]


class HolderError(Exception):
    """The holder refuses or cannot. The text is a sentence for the user."""

    def __init__(self, kind: ErrorKind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class CellLimits:
    memory_bytes: int | None = None
    cpu_percent: int | None = None  #: of one core
    pids: int | None = None  #: processes and threads
    weight: int = 100  #: share of busy cores


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonProgram:
    """An agent class or function, imported in its own process."""

    #: `{module, path, qualname, main, package}`: where another process finds the code.
    source: Mapping[str, Any]
    #: The environment and directory in which the module is imported; agents with the same ones may share a template.
    env: Mapping[str, str]
    cwd: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    argv: Sequence[str]
    #: What the program reads; None: nothing.
    stdin: bytes | None = None
    #: Its standard input stays open for `write_input`.
    open_stdin: bool = False
    #: It has a terminal of so many rows and columns.
    terminal: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrder:
    """One unit to start."""

    unit: str
    cell: str
    program: PythonProgram | Command
    limits: CellLimits
    #: Complete: the holder adds only its own marks. An engine lays it over the environment of the image.
    env: Mapping[str, str]
    cwd: str
    log: Path
    log_bytes: int
    #: Bytes of output in a second; what is beyond is dropped and counted.
    log_rate: int
    nice: int = 0
    umask: int | None = None
    #: Options of the level: image, network, mounts, user, sandbox.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitExit:
    """The end of a unit: its main process ended and nothing it started is left, except what `left` names."""

    code: int | None = None
    signal: int | None = None
    #: The kernel killed the main process for memory; None: cannot be known here.
    oom: bool | None = None
    #: Who ended it: "" the unit itself, "stop", "lease", "memory", "pids", "lost" (the holder died; nothing else is
    #: known), "taken" (not ended: another manager has it now).
    by: str = ""
    why: str = ""
    ended: float | None = None  #: seconds since 1970
    lasted: float = 0.0
    #: Bytes of output that reached the log, and that did not.
    written: int = 0
    dropped: int = 0
    left: tuple[str, ...] = ()
    #: CPU seconds of the whole cell where this unit was its last, so that the counter went with it; else 0.
    cpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitStatus:
    unit: str
    cell: str
    #: Identifies the process across reuse of its number: pid, start_time, boot_id (keeper); container id (engine).
    identity: Mapping[str, Any] = field(default_factory=dict)
    #: Memory, cpu, pids: "enforced", "approximated" or "advisory".
    enforcement: Mapping[str, str] = field(default_factory=dict)
    #: The secret of the agent's channel; empty for commands.
    key: str = ""
    frozen: bool = False
    #: Rows and columns of its terminal; None: it has none.
    terminal: tuple[int, int] | None = None
    exit: UnitExit | None = None


OnExit = Callable[[UnitExit], None]


class Holder(ABC):
    """Holds the processes of one home. All methods raise `HolderError`; all take a bounded time.

    What survives the manager (units, exit records, logs) is with the holder; the manager's object is only a connection.
    """

    #: The home; a private directory where the manager has none.
    directory: Path
    #: What `hello` or `info` said: `enforcement`, and a `title` for `doctor`.
    about: Mapping[str, Any]
    #: `read_terminal`, `write_input` and `resize` work.
    has_terminals = False

    @property
    def identity(self) -> str | None:
        """Of the present holder, where one that follows it does not know the runs of this one; else None."""
        return None

    @abstractmethod
    async def open(self, *, start: bool = True) -> bool:
        """Connect, and start the holder where there is none; without `start` only if an earlier one left processes or
        exit records. Whether there is one now. Harmless when open.
        """

    @abstractmethod
    async def start(self, order: StartOrder, on_exit: OnExit) -> UnitStatus:
        """Start a unit; its cell is made with the first unit. `on_exit` is called once, also for an end that comes
        before this returns. Returns when a command was executed, or a Python process exists. Failing leaves nothing.
        """

    @abstractmethod
    async def attach(self, unit: str, on_exit: OnExit) -> UnitStatus:
        """Take over a unit that an earlier manager started. `exit` is set when it has ended; then `on_exit` is not
        called.
        """

    @abstractmethod
    async def units(self, cell: str | None = None) -> list[UnitStatus]:
        """Every unit, or every unit of one cell, that is not forgotten, living or ended."""

    @abstractmethod
    async def connect(self, status: UnitStatus) -> socket.socket:
        """A connected, non-blocking stream socket to the Python agent of this unit. The agent need not answer yet."""

    def last_output(self, unit: str) -> LastOutput | None:
        """What the holder has told of it, also of one that has ended and is not forgotten. Answered from memory."""
        del unit
        return None

    def read_unsent(self, unit: str) -> bytes:
        """Lines that a Python agent that has ended could not deliver, as far as it could keep them."""
        del unit
        return b""

    # The terminal and the standard input of the newest command of a unit, a cell or an instance: living, or ended a
    # moment ago. "unknown": there is none, or none any more.

    async def read_terminal(self, name: str, after: Screen | None) -> Screen:
        """What its terminal got after `after`; waits for it at most 10 s, and is then empty."""
        del name, after
        raise HolderError("request", NO_TERMINALS)

    async def write_input(self, name: str, data: Input) -> tuple[int, bool]:
        """How many bytes were taken, perhaps none after 10 s, and whether the program reads no more."""
        del name, data
        raise HolderError("request", NO_TERMINALS)

    async def resize(self, name: str, size: tuple[int, int] | None, *, redraw: bool) -> None:
        """None: the size it has. `redraw`: a program that sees the size it had is made to draw its screen again."""
        del name, size, redraw
        raise HolderError("request", NO_TERMINALS)

    @abstractmethod
    async def freeze(self, cell: str) -> None: ...

    @abstractmethod
    async def thaw(self, cell: str) -> None: ...

    @abstractmethod
    async def usage(self, cell: str) -> Usage: ...

    @abstractmethod
    async def stop(self, name: str, grace: float) -> list[str]:
        """End a cell or a unit: thaw, TERM, wait for `grace` seconds, KILL until nothing is left. Returns what is left.
        A second stop joins the first and can only shorten it. Of an unknown name, what an earlier holder left.
        """

    @abstractmethod
    async def forget(self, name: str) -> None:
        """The exit of this unit, or of all units of this cell, is committed: drop the record. Refused while alive."""

    async def answers(self) -> None:
        """Return when a holder that was late answers again or is gone; where that cannot be told, after a while."""
        await asyncio.sleep(5.0)

    @abstractmethod
    async def close(self, *, leave: bool) -> None:
        """`leave`: units live on under the lease. Else everything is ended, and the holder with it."""
