"""The active brains of a population, and how they are asked in a turn."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ostler.errors import InvalidOperationError
from ostler.simulation.ask import Asker, Failed, Question, discard, run_all
from ostler.simulation.brains import Managed, call_of, is_async
from ostler.simulation.managed import ManagedBrains
from ostler.simulation.state import Member
from ostler.simulation.view import AgentView, World

_STILL_RUNS = Failed(True, "TimeoutError", "not asked: it still works on what it was asked in an earlier turn")


@dataclass(slots=True)
class ActiveSet:
    """The active members and how they are asked. Kept until an agent joins, leaves, pauses or resumes."""

    version: int
    paused: set[str]
    members: list[Member]
    #: Places among the members and their questions: of plain brains, and of async and managed ones.
    plain_places: list[int] = field(default_factory=list)
    plain: list[Question] = field(default_factory=list)
    async_places: list[int] = field(default_factory=list)
    tasks: list[Question] = field(default_factory=list)
    #: Agents that cannot be asked, by place.
    unasked: dict[int, Failed] = field(default_factory=dict)
    #: Whether all of them are asked by the worker thread.
    all_plain: bool = False


class ActiveBrains:
    def __init__(self, world: World, asker: Asker, managed: ManagedBrains | None) -> None:
        self._world = world
        self._asker = asker
        self._managed = managed
        self._current: ActiveSet | None = None
        #: Views of agents that were given up and whose brain could not be replaced, by number.
        self._late: dict[int, AgentView] = {}

    def current(self) -> ActiveSet:
        state, current = self._world.state, self._current
        if current is None or current.version != state.version or current.paused != state.paused_agents:
            return self._renewed()
        return current

    def _renewed(self) -> ActiveSet:
        state = self._world.state
        active = ActiveSet(state.version, set(state.paused_agents), state.active_members())
        for place, member in enumerate(active.members):
            view = self.view_of(member)
            late = self._late.get(member.number)
            if late is not None and late.agent is member.agent and self._asker.still_runs(late):
                active.unasked[place] = _STILL_RUNS
            elif view.is_async:
                active.async_places.append(place)
                active.tasks.append((view.call, view))
            else:
                active.plain_places.append(place)
                active.plain.append((view.call, view))
        active.all_plain = len(active.plain) == len(active.members)
        # An agent whose call still runs may be free in the next turn.
        self._current = None if active.unasked else active
        return active

    def view_of(self, member: Member) -> AgentView:
        """Raises `InvalidOperationError` for a brain that cannot be asked here."""
        view: AgentView | None = member.view
        if view is not None and view.agent is member.agent and view.world is self._world and not view.closed:
            return view
        call = call_of(member.agent)
        if isinstance(member.agent, Managed):
            if self._managed is None:
                raise InvalidOperationError(
                    f"the brain of {member.name} is managed, and there is no lifecycle manager; pass it as manager="
                )
            return AgentView(member, self._world, partial(self._managed.ask, member), is_async=True)
        if call is None:
            raise InvalidOperationError(f"the agent of {member.name} is no brain; it needs a method `decide`")
        return AgentView(member, self._world, call, is_async=is_async(call))

    async def ask(self, active: ActiveSet) -> list[Any]:
        """The answers in the order of joining."""
        answers: dict[int, Any] = dict(active.unasked)

        async def ask(places: list[int], asking: Coroutine[Any, Any, list[Any]]) -> None:
            answers.update(zip(places, await asking, strict=True))

        plain = ask(active.plain_places, self._asker.ask_plain(active.plain))
        await run_all([plain, ask(active.async_places, self._asker.ask_async(active.tasks))])
        return [answers[place] for place in range(len(active.members))]

    def give_up(self, member: Member, *, is_late: bool) -> None:
        """Its time was over. Where it is late, it has the same brain, and is not asked while the old call runs."""
        self._current = None
        if is_late:
            self._late[member.number] = member.view


def failures_by_place(answers: list[Any]) -> dict[int, Failed]:
    return {place: failed for place, answer in enumerate(answers) if (failed := _failure(answer)) is not None}


def _failure(answer: Any) -> Failed | None:
    if isinstance(answer, Failed):
        return answer
    if not hasattr(type(answer), "__await__"):
        return None
    discard(answer)
    return Failed(False, "TypeError", "a plain brain returned something to await; define its decide as `async def`")
