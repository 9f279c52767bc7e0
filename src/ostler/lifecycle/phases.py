"""What the owner of an instance is doing: one of nine phases, each with the data that only it needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid5

from ostler.agents.messages import WaitAnswer, WaitAsked
from ostler.clock import Timer
from ostler.isolation.base import Exit
from ostler.lifecycle.messages import Call, Join, Operation, Phase, Reported, Suspend, Terminate, Verb
from ostler.model.access import SYSTEM, Actor
from ostler.model.instance import AgentInstance
from ostler.model.states import SuspendDepth
from ostler.model.wait import Wait
from ostler.store.moves import Move


@dataclass(slots=True, eq=False, kw_only=True)
class Starting(Phase):
    """The isolation level starts the agent and initialises it."""

    operation: Operation | None = None
    #: Callers that wait until it is ready: spawns, or the restart or resumption that began this attempt.
    callers: list[Verb] = field(default_factory=list)
    #: Terminations that arrived meanwhile, and the intent where it could not be written.
    intent: Move | None = None
    terminations: list[Terminate] = field(default_factory=list)
    #: Why the start was called off.
    cancelled_because: str | None = None
    by: Actor = SYSTEM

    @property
    def waiting(self) -> list[Verb]:
        return [*self.callers, *self.terminations]


@dataclass(slots=True, eq=False, kw_only=True)
class Adopting(Phase):
    """An agent of an earlier manager lives; what it works on is not known yet."""


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(Phase):
    """It answers requests."""

    #: Spawns that were answered with this readiness; a caller that gives up now ends the instance.
    spawned_by: list[Join] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Pausing(Phase):
    """A suspension was asked for; its work ends first, or the freeze is under way."""

    request: Suspend
    operation: Operation | None = None

    @property
    def waiting(self) -> list[Verb]:
        return [self.request]


@dataclass(slots=True, eq=False, kw_only=True)
class Suspended(Phase):
    depth: SuspendDepth
    #: The row that says how deep it is and when it ends.
    wait: Wait | None = None
    #: Answers that arrived meanwhile; the agent gets them when it is resumed.
    undelivered: list[tuple[UUID, WaitAnswer]] = field(default_factory=list)
    #: An adopted agent has reported what it works on, or will when it is thawed.
    reported: Reported | None = None
    adopted: bool = False
    #: It is due, but its definition is not registered.
    held_because: str | None = None


class Goal(StrEnum):
    """What follows when nothing of the attempt lives."""

    TERMINATE = "terminate"
    FAIL = "fail"
    RESTART = "restart"
    PARK = "park"


@dataclass(slots=True, eq=False, kw_only=True)
class Leaving(Phase):
    """The attempt is being ended: by grace, then by force, until it is proven that nothing of it lives."""

    goal: Goal
    operation: Operation | None = None
    grace: timedelta = timedelta(0)
    #: Whether force may be used when the grace is over.
    force: bool = True
    keep_final_state: bool = False
    #: The intent to terminate, where it could not be written.
    intent: Move | None = None
    reason: str | None = None
    by: Actor = SYSTEM
    began: float = 0.0
    #: How it ended, where it ended by itself.
    exit: Exit | None = None
    terminations: list[Terminate] = field(default_factory=list)
    #: The restart, the suspension or the spawn that this belongs to.
    callers: list[Verb] = field(default_factory=list)
    #: What the callers of a start that failed are told.
    caller_error: BaseException | None = None
    #: A first start that failed is final: its caller was told.
    final: bool = False
    forced: bool = False
    #: What could not be ended, and why the end could not be written; shown by `why`.
    left_behind: str | None = None
    unwritten: str | None = None
    writes_while_closing: int = 0
    final_state: dict[str, Any] | None = None
    #: Nothing of it lives; only the writing is left.
    empty: bool = False

    @property
    def waiting(self) -> list[Verb]:
        return [*self.callers, *self.terminations]


@dataclass(slots=True, eq=False, kw_only=True)
class Backoff(Phase):
    """Failed. With a wait it is restarted when that is due; without one only a verb brings it back or closes it."""

    wait: Wait | None = None
    #: It is due, but its definition is not registered, or the plan has no room.
    held_because: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Ended(Phase):
    """Terminated, or failed for good."""


@dataclass(slots=True, eq=False, kw_only=True)
class Detached(Phase):
    """It may live on; this manager has let go of it."""


PHASES: tuple[type[Phase], ...] = (
    Starting,
    Adopting,
    Serving,
    Pausing,
    Suspended,
    Leaving,
    Backoff,
    Ended,
    Detached,
)


@dataclass(slots=True, eq=False, kw_only=True)
class OpenWait:
    """A wait of the agent: its row, and the agent's question where it has asked it of this manager."""

    wait: Wait
    reply: asyncio.Future[WaitAnswer] | None = None
    call: Call | None = None
    timer: Timer | None = None


def wait_id_for(record: AgentInstance, wait: WaitAsked) -> UUID:
    """The same question of the same attempt has the same id, so an agent that asks again joins its wait."""
    return uuid5(record.instance_id, f"{record.attempt}:{wait.ask_id or id(wait)}")
