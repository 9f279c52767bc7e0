"""The mark that `@agent(...)` leaves on a class, for whichever registry takes it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, Unpack

from ostler.agents.base import Agent
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel

A = TypeVar("A", bound=Agent)

#: Looked up on the class itself: a subclass is another agent.
_MARK = "__ostler_agent__"


class About(TypedDict, total=False):
    """What may be said of an agent when it is registered; the fields of `AgentManifest` that are not found out."""

    name: str
    description: str | None
    version: str
    defaults: AgentSpawnOptions | None
    min_isolation: IsolationLevel
    fail_on_error: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMark:
    about: About = field(default_factory=About)
    #: As under the key `lifecycle` of a definition file.
    lifecycle: Mapping[str, Any] | None = None


def agent(*, lifecycle: Mapping[str, Any] | None = None, **about: Unpack[About]) -> Callable[[type[A]], type[A]]:
    """Say on a class what it is. It is not registered yet: `registry.register(cls)` reads what stands here."""
    require_known(about)

    def mark(cls: type[A]) -> type[A]:
        setattr(cls, _MARK, AgentMark(about=about, lifecycle=lifecycle))
        return cls

    return mark


def mark_of(source: object) -> AgentMark:
    found = vars(source).get(_MARK) if isinstance(source, type) else None
    return found if isinstance(found, AgentMark) else AgentMark()


def require_known(about: Mapping[str, Any]) -> None:
    """Python does not check what is spread over keywords, so a misspelt one would pass."""
    unknown = about.keys() - About.__annotations__.keys()
    if unknown:
        known = ", ".join(About.__annotations__)
        raise TypeError(f"an agent has no {', '.join(sorted(unknown))}; what can be said of it is: {known}")
