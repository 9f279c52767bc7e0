"""What the manager holds in memory of one living instance. The record is the truth; this is how it is acted on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from ostler.agents import AgentKind, AgentManifest
from ostler.isolation.base import Cell, Isolation, StartPlan
from ostler.lifecycle.slots import Slots
from ostler.model import (
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentSpawnOptions,
    AgentState,
    HealthCheckConfig,
    ResourceLimits,
    SuspendDepth,
    TerminationResult,
)
from ostler.seams import Timer

_HEARTBEAT = HealthCheckConfig()


@dataclass(slots=True, kw_only=True)
class Pulse:
    """Signs of life, by the monotonic clock. What the watch and `why` go by."""

    health: AgentHealthStatus = field(default_factory=AgentHealthStatus)
    started: float = 0.0
    heartbeat: float = 0.0
    output: float = 0.0
    cpu_change: float = 0.0
    #: None until the first look at one that was found again: what it used before is not of this interval.
    cpu_seconds: float | None = 0.0
    sampled: float = 0.0
    next_probe: float = 0.0
    #: A look that is still under way; the next waits for it.
    looking: bool = False
    stalled: bool = False
    #: Its probe cannot be made, and that was said.
    unable: bool = False
    #: When a new reason for the same health was last written down.
    reason_told: float = float("-inf")
    progress_told: float = float("-inf")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What it has done since its last start."""

    completed: int = 0
    failed: int = 0
    tokens: int = 0
    #: Tokens by the second they were told in; no more than a minute of them.
    recent_tokens: deque[tuple[int, int]] | None = None
    last_metrics: AgentMetrics | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One request that is being worked on, and the time it has left."""

    #: The name of the call, by which it is found again after the manager has died.
    call_id: UUID
    left: float
    since: float = 0.0
    #: The agent has been asked; before that nothing of it has happened.
    began: bool = False
    #: When its clock was last set going.
    armed: float = 0.0
    timer: Timer | None = None
    expired: bool = False
    frozen: bool = False
    #: How many things outside it waits for; while there are any it is not worked on.
    waits: int = 0
    task: asyncio.Task[object] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """A request with a name of its own: whoever asks for it again gets this one, not another."""

    run: Run
    task: asyncio.Task[object]
    #: Who waits for it; the last one to give up calls it off.
    askers: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    record: AgentInstance
    manifest: AgentManifest
    options: AgentSpawnOptions
    limits: ResourceLimits
    slots: Slots
    isolation: Isolation
    plan: StartPlan | None = None
    cell: Cell | None = None
    #: Cells that are proven to have ended, kept until that is written down: they know how.
    spent: list[Cell] | None = None
    #: Held while the state is moved, so that one move follows the other.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Requests that the agent works on now.
    calls: dict[asyncio.Task[object], Run] = field(default_factory=dict)
    #: Requests that were asked by name, under way or answered; the oldest answers are forgotten.
    orders: dict[UUID, Order] | None = None
    #: Open waits that the agent asked for, with the future that ends each.
    waits: dict[UUID, asyncio.Future[object]] | None = None
    #: Waits that it had opened under an earlier manager and has not asked for again yet, with the request that waits.
    unasked: dict[UUID, Run | None] | None = None
    #: Set once it is found again and all of it is in place; what it says before that waits. None: born here.
    adopted: asyncio.Event | None = None
    #: Writes what it has said; its end is not told before that.
    saying: asyncio.Task[None] | None = None
    #: It is left alone, alive: what becomes of it is the next manager's to tell.
    left: bool = False
    #: Found again, while its definition is not registered here; it lives, but cannot be started again.
    stranger: bool = False
    #: The start that is under way.
    starting: asyncio.Task[None] | None = None
    #: The termination that is under way; all who ask share it.
    ending: asyncio.Task[TerminationResult] | None = None
    #: It was asked to end before, in vain; so its end will not have been graceful.
    balked: bool = False
    #: When its end is tried again, of which something was left; and what it had asked to be kept of it.
    again: Timer | None = None
    last_words: Mapping[str, Any] | None = None
    #: The start whose death is being dealt with; whoever announces it again is late.
    mourned: int = 0
    #: The parking that is under way; a resume waits for it.
    parking: asyncio.Task[None] | None = None
    #: Set while it finishes its turn and takes no more.
    holding: bool = False
    suspension: UUID | None = None
    depth: SuspendDepth | None = None
    backoff: UUID | None = None
    #: Set when nothing is worked on any more; made for whoever waits for it.
    quiet: asyncio.Event | None = None
    #: Set when a suspension ends; made for answers that came meanwhile.
    resumed: asyncio.Event | None = None
    #: Numbers that the agent counts itself, by its own names.
    own_metrics: dict[str, float] | None = None
    #: When it came into its present state, by the monotonic clock; reports change the record without moving it.
    moved: float | None = None
    #: A move that the store refused for now; the watch tries again.
    unsettled: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    tally: Tally = field(default_factory=Tally)

    @property
    def instance_id(self) -> UUID:
        return self.record.instance_id

    @property
    def state(self) -> AgentState:
        return self.record.state

    @property
    def attempt(self) -> int:
        return self.record.attempt

    @property
    def is_riddle(self) -> bool:
        """A command of which nobody here knows what it runs, nor what the end of a run means."""
        return self.stranger and self.manifest.kind is AgentKind.COMMAND

    @property
    def check(self) -> HealthCheckConfig:
        return self.options.health_check or _HEARTBEAT

    @property
    def working(self) -> int:
        """Requests that are worked on and do not wait."""
        return sum(not run.waits for run in self.calls.values())

    def note_quiet(self) -> None:
        if self.quiet is not None:
            self.quiet.set()

    @property
    def oldest_call(self) -> float | None:
        return min((run.since for run in self.calls.values()), default=None)
