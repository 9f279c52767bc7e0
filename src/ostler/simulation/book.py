"""The book of a population: who there is, who is paused, and for how long. Every change is made by a method here."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from ostler.errors import AgentNotFoundError, InvalidOperationError, ValidationError
from ostler.model import Fault, shown
from ostler.model.record import MAX_COUNT
from ostler.model.text import name_faults
from ostler.simulation.active import LateDict
from ostler.simulation.countdown import Countdown
from ostler.simulation.members import Member
from ostler.simulation.naming import NameBook
from ostler.simulation.schema import StateForm

_number = attrgetter("number")
#: So many dicts may wait to be read before it is worth looking which of them still do.
_MANY_UNREAD = 16


class Book:
    """Keeps the rules by itself: an agent that goes takes its pause with it, and nobody is paused who is not there."""

    def __init__(self, form: StateForm) -> None:
        self.form = form
        #: In the order of coming; do not write here.
        self.members: dict[str, Member] = {}
        self.paused: set[str] = set()
        self.countdown = Countdown(self.members)
        #: The number of the newest agent; a number is never given twice.
        self.last_number = 0
        #: Rises whenever somebody comes, goes, is paused or goes on.
        self.changes = 0
        self._names = NameBook()
        self._unread: list[weakref.ref[LateDict]] = []
        self._many_unread = _MANY_UNREAD

    # --- looking --------------------------------------------------------------------------------

    def member(self, name: str) -> Member:
        found = self.members.get(name)
        if found is None:
            raise AgentNotFoundError(f"there is no agent {shown(name)} in this population; look at state.agents")
        return found

    def active_members(self) -> list[Member]:
        """Those that are not paused, in the order of coming."""
        if not self.paused:
            return list(self.members.values())
        return [member for name, member in self.members.items() if name not in self.paused]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Some names in the order of coming."""
        members = self.members
        return sorted(names, key=lambda name: members[name].number)

    @property
    def active_count(self) -> int:
        return len(self.members) - len(self.paused)

    def active_agents(self) -> dict[str, Any]:
        """A dict of their brains for the caller to keep; it costs nothing before it is looked at."""
        if len(self._unread) >= self._many_unread:
            self._unread = [one for one in self._unread if (waiting := one()) is not None and waiting.source]
            self._many_unread = max(_MANY_UNREAD, 2 * len(self._unread))
        found = LateDict.reading(self._read_active)
        self._unread.append(weakref.ref(found))
        return found

    def free_name(self, name: str) -> str:
        """The name itself, or the first of `name_1`, `name_2`, … that nobody has."""
        return self._names.numbered(name) if name in self.members else name

    # --- changing -------------------------------------------------------------------------------

    def admit(self, name: str, agent: Any, state: Any, number: int | None = None) -> Member:
        """Let one in under a name that is free, with a state that fits. With a number: one that was here before."""
        if name in self.members:
            raise InvalidOperationError(f"there is an agent {shown(name)} already; free_name finds another name")
        self._changing()
        if number is None:
            number = self.last_number + 1
        self.last_number = max(number, self.last_number)
        member = self.members[name] = Member(name, number, agent, state)
        self._names.take(name)
        return member

    def exchange(self, name: str, agent: Any) -> None:
        """Another brain for one who is there; its state and its pause stay."""
        member = self.member(name)
        self._changing()
        member.agent = agent
        member.room, member.kind, member.params = None, None, {}

    def dismiss(self, name: str) -> Member:
        """Let one go, and its pause with it."""
        member = self.member(name)
        self._changing()
        del self.members[name]
        self._names.free(name)
        self.paused.discard(name)
        self.countdown.end(member)
        return member

    def pause(self, name: str, turns: int | None) -> None:
        """Paused until somebody says otherwise, or for so many turns. One that is paused gets the new term."""
        member = self.member(name)
        if turns is not None and (faults := tuple(turns_faults("turns", turns))):
            raise ValidationError(faults)
        self._changing()
        self.paused.add(name)
        if turns is None:
            self.countdown.end(member)
        else:
            self.countdown.begin(name, turns)

    def resume(self, name: str) -> None:
        """Harmless for one that is active."""
        if name in self.paused:
            self._changing()
            self.paused.remove(name)
            self.countdown.end(self.members[name])

    def count_down(self) -> list[str]:
        """One turn less for all that count; those whose time has come go on, in the order of coming."""
        due = self.countdown.step()
        if not due:
            return []
        self._changing()
        due.sort(key=_number)
        names = [member.name for member in due]
        self.paused.difference_update(names)
        return names

    def _changing(self) -> None:
        self.changes += 1
        if self._unread:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Who was promised the agents of this moment, and has not looked yet, gets them before they change."""
        for one in self._unread:
            waiting = one()
            if waiting is not None:
                waiting.fill()
        self._unread.clear()

    def _read_active(self) -> dict[str, Any]:
        paused = self.paused
        return {name: member.agent for name, member in self.members.items() if name not in paused}


def label_faults(field: str, name: Any) -> Iterator[Fault]:
    """The name of an agent is one printable line, for it stands in logs and tables."""
    if not isinstance(name, str):
        yield Fault(field=field, bound="must be text", value=shown(name))
    elif not name.strip():
        yield Fault(field=field, bound="must not be empty")
    else:
        yield from name_faults(field, name)


def turns_faults(field: str, turns: Any) -> Iterator[Fault]:
    """A term is a whole number of turns, at least one."""
    if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= MAX_COUNT:
        yield Fault(field=field, bound=f"must be a whole number of turns, 1 to {MAX_COUNT}", value=shown(turns))
