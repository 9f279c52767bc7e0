"""Asking everybody who is active: who lives here by threads and tasks, who lives elsewhere by the manager."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ostler.errors import InvalidOperationError, OstlerError
from ostler.simulation.answers import Again, Then, still_thinking
from ostler.simulation.asking import After, Answers, Asking, Failed, Question
from ostler.simulation.brains import Managed, caller, is_async
from ostler.simulation.engine import Decisions
from ostler.simulation.managed import Stable
from ostler.simulation.members import Member
from ostler.simulation.requests import Decision, unwrap
from ostler.simulation.view import AgentView, World

_PLAIN, _ASYNC, _ELSEWHERE = 0, 1, 2
#: Tells which decisions cannot be written down, by their place, and why.
Keepable = Callable[[Sequence[Member], Sequence[Any]], Sequence[tuple[int, str]]]
#: Answers of other types are decisions as they are, with nothing to unwrap.
_WRAPPED = frozenset({Failed, Decision, dict})


#: What the decisions do to the world.
Update = Callable[[Decisions], Any]


@dataclass(frozen=True, slots=True)
class Decided:
    decisions: Decisions
    failed: Sequence[tuple[Member, Failed]] = ()
    #: What came of the update; None when it was not made yet.
    after: After | None = None


class Room:
    """How one member is asked; kept as long as its brain is."""

    __slots__ = ("before", "call", "question", "view", "way")

    def __init__(self, member: Member, world: World) -> None:
        call: Callable[[AgentView], Any] | None = None
        self.way = _ELSEWHERE
        if not isinstance(member.agent, Managed):
            call = caller(member.agent)
            if call is None:
                raise InvalidOperationError(f"the agent of {member.name} has no `decide` any more; give it a brain")
            self.way = _ASYNC if is_async(call) else _PLAIN
        self.call = call
        #: The view with which it was given up on, while that call may still go on.
        self.before: AgentView | None = None
        self.renew(member, world)

    def show(self, state: Any) -> None:
        self.view.show(state)

    def renew(self, member: Member, world: World) -> None:
        """A view of its own for what comes next; what an earlier call still says through the old one is not heard."""
        self.view = AgentView(member, world)
        self.question: Question | None = None if self.call is None else (self.call, self.view)


class Rounds:
    """The questions of one population. Whom to ask, and how, is worked out again only when somebody came or went."""

    def __init__(
        self, world: World, asking: Asking, stable: Stable | None, timeout: timedelta, keepable: Keepable | None = None
    ) -> None:
        self._world = world
        self._asking = asking
        self._stable = stable
        self._timeout = timeout
        self._keepable = keepable
        self._members: list[Member] = []
        self._plain: list[Question] | None = None
        #: The numbers of those that were given up on and may still be at it.
        self._late: set[int] = set()
        self._at = -1

    def members(self) -> list[Member]:
        """Who is active, in the order of coming."""
        state = self._world.state
        if self._at != state.changes:
            self._members, self._at, self._plain = state.active_members(), state.changes, None
            self._late = {member.number for member in self._members if member.room and member.room.before}
            for member in self._members:
                if member.room is None:
                    member.room = Room(member, self._world)
        return self._members

    async def decide(self, retries: int, update: Update | None = None, goes_on: Again | None = None) -> Decided:
        """What everybody decided, and who did not, after being asked again as often as may be.

        Where all brains are plain and none fails, the update is made by the thread that has asked them. With
        `goes_on` it may play further turns there; what is returned is the last.
        """
        members = self.members()
        answers = await self._ask(members, update, goes_on)
        after = answers.after
        if after is not None and (made := after if after.error is not None else after.value) is not None:
            return Decided(Decisions(members, answers), after=made)
        failed = self._open(members, answers, range(len(members)))
        for _ in range(retries):
            if not failed:
                break
            again = [members[place] for place in failed]
            for place in failed:
                self._forget(members[place], answers[place])
            for place, answer in zip(failed, await self._ask(again), strict=True):
                answers[place] = answer
            answers.kinds = set(map(type, answers))
            failed = self._open(members, answers, failed)
        if not failed:
            return Decided(Decisions(members, answers))
        for place in failed:
            self._forget(members[place], answers[place])
        out = set(failed)
        kept = [place for place in range(len(members)) if place not in out]
        decided = Decisions([members[place] for place in kept], [answers[place] for place in kept])
        return Decided(decided, [(members[place], answers[place]) for place in failed])

    def _concluded(self, members: Sequence[Member], update: Update, answers: Answers) -> After | None:
        """In the thread that has asked; None where the answers have to be looked at first."""
        if not _WRAPPED.isdisjoint(answers.kinds) or (self._keepable is not None and self._keepable(members, answers)):
            return None
        return After(update(Decisions(members, answers)))

    def _open(self, members: Sequence[Member], answers: Answers, places: Sequence[int]) -> list[int]:
        """Take decisions out of what they came in; the places of those who failed."""
        failed: list[int] = []
        if not _WRAPPED.isdisjoint(answers.kinds):
            failed = [place for place in places if not self._unwrapped(members[place], answers, place)]
        if self._keepable is not None:
            out = set(failed)
            asked = [place for place in places if place not in out] if failed else places
            failed += self._unkept(self._keepable, members, answers, asked)
            failed.sort()
        return failed

    def _unkept(
        self, keepable: Keepable, members: Sequence[Member], answers: Answers, places: Sequence[int]
    ) -> list[int]:
        """Whose decisions cannot be written down."""
        if len(places) == len(members):
            wrong = keepable(members, answers)
        else:
            wrong = keepable([members[place] for place in places], [answers[place] for place in places])
        for index, why in wrong:
            answers[places[index]] = Failed(False, "UnkeptDecisionError", why)
            answers.kinds.add(Failed)
        return [places[index] for index, _ in wrong]

    def _unwrapped(self, member: Member, answers: list[Any], place: int) -> bool:
        answer = answers[place]
        if isinstance(answer, Failed):
            return False
        if type(answer) not in _WRAPPED:
            return True
        try:
            answers[place], wishes = unwrap(answer, member.name)
        except OstlerError as error:
            answers[place] = Failed(False, type(error).__name__, str(error))
            return False
        for wish in wishes:
            self._world.ask(member.room.view, wish)
        return True

    async def _ask(
        self,
        members: Sequence[Member],
        update: Update | None = None,
        goes_on: Again | None = None,
    ) -> Answers:
        """Answers in the order of the members; `Failed` in the place of one that gave none."""
        if members is self._members and not self._late:
            if self._plain is None and all(member.room.way == _PLAIN for member in members):
                self._plain = [member.room.question for member in members]
            if self._plain is not None:
                then: Then | None = None
                if update is not None:
                    then = functools.partial(self._concluded, members, update)
                return await self._asking.ask_plain(self._plain, then, goes_on)
        answers: list[Any] = [None] * len(members)
        groups: tuple[list[int], ...] = ([], [], [])
        for place, member in enumerate(members):
            if member.number in self._late and self._is_stuck(member):
                answers[place] = still_thinking()
            else:
                groups[member.room.way].append(place)
        found = await asyncio.gather(
            self._asking.ask_plain([members[place].room.question for place in groups[_PLAIN]]),
            self._asking.ask_async([members[place].room.question for place in groups[_ASYNC]]),
            self._elsewhere([members[place] for place in groups[_ELSEWHERE]]),
        )
        for places, some in zip(groups, found, strict=True):
            for place, answer in zip(places, some, strict=True):
                answers[place] = answer
        return Answers(answers)

    def _is_stuck(self, member: Member) -> bool:
        """One brain thinks about one thing at a time, also when nobody waits for it any more."""
        view = member.room.before
        if view is not None and self._asking.is_stuck(view):
            return True
        member.room.before = None
        self._late.discard(member.number)
        return False

    async def _elsewhere(self, members: Sequence[Member]) -> list[Any]:
        if not members:
            return []
        if self._stable is None:
            text = "it lives elsewhere, and this run has no lifecycle manager; pass one as `manager`"
            return [Failed(False, "InvalidOperationError", text) for _ in members]
        stable = self._stable
        lost = await stable.house(members)
        places = asyncio.Semaphore(self._asking.concurrency)

        async def one(member: Member) -> Any:
            if member.number in lost:
                return lost[member.number]
            async with places:
                return await stable.ask(member, member.room.view, self._timeout)

        answers = await asyncio.gather(*map(one, members))
        if any(isinstance(answer, Failed) for answer in answers):
            # Agents that their manager has lost must not be dealt with as if they had failed: this turn is not ours.
            await stable.require_owner()
        return answers

    def _forget(self, member: Member, why: Failed) -> None:
        """One that failed: nothing that it asked for counts, and it gets another view."""
        room = member.room
        room.view.closed = True
        if why.timed_out and room.before is None:
            room.before = room.view
            self._late.add(member.number)
        room.renew(member, self._world)
        self._plain = None
