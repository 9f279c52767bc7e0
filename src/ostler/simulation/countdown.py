"""Counters that all go down together: one step costs as much as there are counters at their end, not as there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ostler.simulation.members import Member, Term

_SLACK = 16


class Countdown:
    """Who counts, and the steps that are left to each, at least one.

    What is kept is the step at which each is due. So a step changes one number, and looks only at those due then.
    Each member holds its own term: among very many, every further table is one more place in memory to wait for.
    """

    __slots__ = ("_count", "_members", "_terms", "tick")

    def __init__(self, members: Mapping[str, Member], tick: int = 0) -> None:
        #: Steps taken so far.
        self.tick = tick
        self._members = members
        self._terms: dict[int, Term] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        for term in list(self._terms.values()):
            for member in term.counting():
                yield member.name

    def __contains__(self, name: object) -> bool:
        member = self._members.get(name) if isinstance(name, str) else None
        return member is not None and member.term is not None

    def left(self, name: str) -> int:
        term = self._members[name].term
        if term is None:
            raise KeyError(name)
        return term.step - self.tick

    def due(self, name: str) -> int | None:
        """The step at which it is due; None when it does not count."""
        member = self._members.get(name)
        return None if member is None or member.term is None else member.term.step

    @property
    def next_is_due(self) -> bool:
        """Whether the next step gives anything out."""
        return self.tick + 1 in self._terms

    def begin(self, name: str, steps: int) -> None:
        self.set_due(name, self.tick + steps)

    def set_due(self, name: str, step: int) -> None:
        member = self._members[name]
        self.end(member)
        term = self._terms.get(step)
        if term is None:
            term = self._terms[step] = Term(step)
        term.members.append(member)
        term.live += 1
        member.term = term
        self._count += 1

    def end(self, member: Member) -> None:
        """Stop counting; harmless for one that does not."""
        term = member.term
        if term is None:
            return
        member.term = None
        self._count -= 1
        term.live -= 1
        if not term.live:
            del self._terms[term.step]
        elif len(term.members) > 2 * term.live + _SLACK:
            term.members = term.counting()

    def step(self) -> list[Member]:
        """One step for all; those that have none left are given out and forgotten."""
        self.tick += 1
        term = self._terms.pop(self.tick, None)
        if term is None:
            return []
        due = []
        for member in term.members:
            if member.term is term:
                member.term = None
                due.append(member)
        self._count -= len(due)
        return due

    def faults(self) -> Iterator[str]:
        """Where members and terms disagree, or a counter has nothing left."""
        held = {name: member.term for name, member in self._members.items() if member.term is not None}
        listed = {member.name: term for term in self._terms.values() for member in term.counting()}
        live = sum(term.live for term in self._terms.values())
        if held != listed or not len(held) == live == self._count:
            yield "the counters and their order of falling due disagree"
        for name, term in held.items():
            if term.step <= self.tick:
                yield f"the counter of {name!r} is {term.step - self.tick}, and must be at least 1"
