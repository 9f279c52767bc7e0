"""The book as the mappings and the set that its users know. Each reads and writes the one truth behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSet
from collections.abc import Set as AbstractSet
from typing import Any

from ostler.errors import InvalidOperationError, ValidationError
from ostler.model import Fault, shown
from ostler.simulation.book import Book, label_faults, turns_faults


class Agents(MutableMapping[str, Any]):
    """Names and brains. To put one in is to admit it with an empty state; to delete one is to let it go."""

    __slots__ = ("_book",)

    def __init__(self, book: Book) -> None:
        self._book = book

    def __getitem__(self, name: str) -> Any:
        return self._book.members[name].agent

    def __setitem__(self, name: str, agent: Any) -> None:
        if name in self._book.members:
            self._book.exchange(name, agent)
            return
        wrong = tuple(label_faults("the name of an agent", name))
        state, faults = self._book.form.make({}, f"agents.{name}")
        if wrong or faults:
            raise ValidationError((*wrong, *faults))
        self._book.admit(name, agent, state)

    def __delitem__(self, name: str) -> None:
        if name not in self._book.members:
            raise KeyError(name)
        self._book.dismiss(name)

    def clear(self) -> None:
        """All at once: the inherited way looks for the first of them each time, past all that went before it."""
        for name in list(self):
            self._book.dismiss(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._book.members)

    def __len__(self) -> int:
        return len(self._book.members)

    def __contains__(self, name: object) -> bool:
        return name in self._book.members

    def __repr__(self) -> str:
        return repr(dict(self))


class States(Mapping[str, Any]):
    """Names and states; what stands there may be changed by the engine, who stands there only by `agents`."""

    __slots__ = ("_book",)

    def __init__(self, book: Book) -> None:
        self._book = book

    def __getitem__(self, name: str) -> Any:
        return self._book.members[name].state

    def __setitem__(self, name: str, state: Any) -> None:
        """Another state for one who is there; it must fit."""
        made, faults = self._book.form.make(state, f"states.{name}")
        if faults:
            raise ValidationError(faults)
        self._book.member(name).state = made

    def __iter__(self) -> Iterator[str]:
        return iter(self._book.members)

    def __len__(self) -> int:
        return len(self._book.members)

    def __repr__(self) -> str:
        return repr(dict(self))


class PausedAgents(MutableSet[str]):
    """Who is paused. To put a name in is to pause it with no term; to take it out is to let it go on."""

    __slots__ = ("_book",)

    def __init__(self, book: Book) -> None:
        self._book = book

    @classmethod
    def _from_iterable(cls, names: Iterable[str]) -> AbstractSet[str]:  # type: ignore[override]  # typeshed wants a set of the same class
        """What `&`, `|` and `-` give is a set of its own, not a sight."""
        return set(names)

    def __contains__(self, name: object) -> bool:
        return name in self._book.paused

    def __iter__(self) -> Iterator[str]:
        """In the order of coming: a set's own differs from program to program."""
        return iter(self._book.in_order(self._book.paused))

    def __len__(self) -> int:
        return len(self._book.paused)

    def add(self, value: str) -> None:
        if value not in self._book.paused:
            self._book.pause(value, None)

    def discard(self, value: str) -> None:
        self._book.resume(value)

    def clear(self) -> None:
        for name in list(self):
            self._book.resume(name)

    def replace(self, names: Iterable[str]) -> None:
        wanted = dict.fromkeys(names)
        faults = tuple(paused_fault(name) for name in wanted if name not in self._book.members)
        if faults:
            raise ValidationError(faults)
        for name in self:
            if name not in wanted:
                self._book.resume(name)
        for name in wanted:
            self.add(name)

    def __repr__(self) -> str:
        return repr(set(self._book.paused))


class AutoResume(MutableMapping[str, int]):
    """Who goes on by itself, and in how many turns."""

    __slots__ = ("_book",)

    def __init__(self, book: Book) -> None:
        self._book = book

    def __getitem__(self, name: str) -> int:
        return self._book.countdown.left(name)

    def __setitem__(self, name: str, turns: int) -> None:
        faults = tuple(turns_faults(f"auto_resume.{name}", turns))
        if faults:
            raise ValidationError(faults)
        if name not in self._book.paused:
            raise InvalidOperationError(f"{shown(name)} is not paused, so it cannot go on by itself; pause it first")
        self._book.pause(name, turns)

    def __delitem__(self, name: str) -> None:
        if name not in self._book.countdown:
            raise KeyError(name)
        self._book.pause(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._book.in_order(self._book.countdown))

    def __len__(self) -> int:
        return len(self._book.countdown)

    def __contains__(self, name: object) -> bool:
        return name in self._book.countdown

    def replace(self, counters: Mapping[str, int]) -> None:
        wanted = dict(counters)  # what was given may be this very sight
        faults = tuple(fault for name, turns in wanted.items() for fault in self._faults(name, turns))
        if faults:
            raise ValidationError(faults)
        self.clear()
        self.update(wanted)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def _faults(self, name: str, turns: int) -> Iterator[Fault]:
        if name not in self._book.paused:
            yield Fault(field="auto_resume", bound="must name only paused agents", value=shown(name))
        yield from turns_faults(f"auto_resume.{name}", turns)

    def __repr__(self) -> str:
        return repr(dict(self))


def paused_fault(name: object) -> Fault:
    return Fault(field="paused_agents", bound="must name only agents", value=shown(name))
