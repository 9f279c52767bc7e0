"""One agent of a population: its brain and its state in one place, so that neither outlives the other."""

from __future__ import annotations

from typing import Any


class Term:
    """Those that go on at the same step."""

    __slots__ = ("live", "members", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        #: Also some that have another term by now, or none: only those count that hold this one.
        self.members: list[Member] = []
        #: How many do.
        self.live = 0

    def counting(self) -> list[Member]:
        return [member for member in dict.fromkeys(self.members) if member.term is self]


class Member:
    """What the population holds of one agent. Names are labels and may be given again; the number never is."""

    __slots__ = ("_params", "agent", "kind", "name", "number", "room", "state", "term")

    def __init__(self, name: str, number: int, agent: Any, state: Any) -> None:
        #: What the orchestrator keeps of it while it runs turns; not part of the state.
        self.room: Any = None
        self.name = name
        self.number = number
        #: The brain, as it was given.
        self.agent = agent
        #: A Pydantic model where the population has a schema, else a plain dict.
        self.state = state
        #: When it goes on by itself; None when it does not. The countdown of the population writes it.
        self.term: Term | None = None
        #: By which entry of the brains' table it can be made again; None where nobody knows.
        self.kind: str | None = None
        self._params: dict[str, Any] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """With what it is made again. Write a whole dict; most have none, and none is held for them."""
        return self._params or {}

    @params.setter
    def params(self, params: dict[str, Any]) -> None:
        self._params = params or None

    def __setattr__(self, name: str, value: Any) -> None:
        """Brains look at their states far more often than these are exchanged: whoever exchanges one pays for it."""
        if name == "name" or name == "number":  # noqa: PLR1714 - asked for every attribute, and a set is slower
            if hasattr(self, name):
                raise AttributeError(f"the {name} of an agent is given once")
            object.__setattr__(self, name, value)
            return
        object.__setattr__(self, name, value)
        if name == "state" and self.room is not None:
            self.room.show(value)

    def __repr__(self) -> str:
        return f"<{self.name} #{self.number} {self.state!r}>"
