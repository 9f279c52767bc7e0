"""One crew while a supervisor runs it, and its members."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from datetime import datetime

from ostler.crews.factory import MemberPlan
from ostler.crews.scope import Scope
from ostler.model.crew import CrewSettings, CrewView, MemberState, MemberView
from ostler.model.task import Task
from ostler.store.crews import Claim

_NUMBER = re.compile(r".*-([0-9]{1,9})")
#: Errors that are remembered; more than any policy counts.
_MAX_ERRORS = 10_001


@dataclass(frozen=True, slots=True)
class Work:
    """A task that was claimed for a member, and what its generation is made of."""

    claim: Claim
    plan: MemberPlan


@dataclass(eq=False)
class Member:
    """An agent id that is kept at work. Each task gets a fresh instance of it."""

    agent_id: str
    number: int
    scope: Scope
    since: datetime
    state: MemberState = MemberState.IDLE
    generation: int = 0
    work: Work | None = None
    cost_usd: float | None = None
    error: str | None = None
    errors_in_a_row: int = 0
    #: Resolved with the next work, or with None when it has to leave.
    offer: asyncio.Future[Work | None] | None = None
    #: While a task is being claimed for it.
    is_chosen: bool = False
    runner: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self.offer is not None and not self.offer.done() and not self.is_chosen

    @property
    def is_live(self) -> bool:
        return self.state is not MemberState.STOPPED

    def become(self, state: MemberState, now: datetime) -> None:
        if state is not self.state:
            self.state, self.since = state, now

    def give(self, work: Work | None) -> None:
        if self.offer is not None and not self.offer.done():
            self.offer.set_result(work)

    def view(self) -> MemberView:
        stopping = self.work is not None and self.scope.is_cancelled
        return MemberView(
            member=self.agent_id,
            state=MemberState.STOPPING if stopping else self.state,
            generation=self.generation,
            task=None if self.work is None else self.work.claim.task.key,
            since=self.since,
            cost_usd=self.cost_usd,
            error=self.error,
        )


@dataclass(eq=False)
class Crew:
    name: str
    settings: CrewSettings
    count: int
    is_up: bool = False
    members: dict[str, Member] = field(default_factory=dict)
    #: When its members erred.
    errors: list[datetime] = field(default_factory=list)
    reason: str | None = None
    #: Why no member can be begun at present.
    trouble: str | None = None

    def id_of(self, number: int) -> str:
        return f"{self.name}-{number}"

    def number_of(self, agent_id: str) -> int:
        match = _NUMBER.fullmatch(agent_id)
        return int(match[1]) if match and self.id_of(int(match[1])) == agent_id else 0

    def has_place_for(self, member: Member) -> bool:
        return self.is_up and member.number <= self.count

    def waiting(self) -> list[Member]:
        """Members that a task can be given to, the first ones first."""
        members = (member for member in self.members.values() if member.is_waiting and self.has_place_for(member))
        return sorted(members, key=lambda member: member.number)

    def choose(self, task: Task, *, can_wait: bool) -> Member | None:
        """Who takes it. A retried task prefers another member than the one that failed it, and waits a while."""
        waiting = self.waiting()
        if not task.failures or task.crew != self.name or task.member not in self.members:
            return waiting[0] if waiting else None
        others = [member for member in waiting if member.agent_id != task.member]
        if others:
            return others[0]
        may_come = any(member.is_live and member.agent_id != task.member for member in self.members.values())
        return None if not waiting or (may_come and can_wait) else waiting[0]

    def note_error(self, now: datetime) -> None:
        self.errors = [*self.errors, now][-_MAX_ERRORS:]

    def view(self, trouble: str | None, project: str | None = None) -> CrewView:
        members = sorted(self.members.values(), key=lambda member: member.number)
        return CrewView(
            name=self.name,
            project=project,
            agent=self.settings.agent,
            count=self.count,
            is_up=self.is_up,
            on_done=self.settings.on_done,
            on_error=self.settings.on_error,
            strategy=self.settings.strategy,
            reason=self.reason,
            trouble=self.trouble or trouble,
            members=tuple(member.view() for member in members),
        )
