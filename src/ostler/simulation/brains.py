"""What thinks for an agent: a plain object, an async one, a function, or an instance that Ostler keeps elsewhere."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from ostler.agents import Agent
from ostler.agents.failures import error_text
from ostler.errors import ValidationError
from ostler.model import AgentSpawnOptions, Fault, IsolationLevel, shown
from ostler.simulation.foreign import is_call_off
from ostler.simulation.view import AgentView


class Brain(Protocol):
    """Any object with this method; it may be `async def`. It may also have `save` and `restore`, see `Brains`."""

    def decide(self, view: AgentView) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Managed:
    """A brain that lives as an instance of Ostler: spawned when it joins, retired when it leaves.

    Its `process` gets `AgentView.as_request()` and answers with the decision, as JSON.
    """

    #: An agent class, which is registered under its name, or the id of a definition that is registered already.
    definition: type[Agent] | UUID
    isolation: IsolationLevel = IsolationLevel.PROCESS
    #: Everything else about the spawn; its isolation level gives way to the one above.
    options: AgentSpawnOptions = field(default_factory=AgentSpawnOptions)
    context: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedMaker:
    """Makes brains that live as instances of Ostler; an instance gets the params of its agent as context."""

    definition: type[Agent]
    isolation: IsolationLevel = IsolationLevel.PROCESS

    def __call__(self, **params: Any) -> Managed:
        return Managed(definition=self.definition, isolation=self.isolation, context=params)


def caller(agent: Any) -> Callable[[AgentView], Any] | None:
    """How to ask a brain that lives here; None for one that lives elsewhere, or is no brain."""
    if isinstance(agent, type):
        return None  # its `decide` has no self to be called with
    duck: Callable[[AgentView], Any] | None = getattr(agent, "decide", None)
    if callable(duck):
        return duck
    if isinstance(agent, Agent):
        return _by_process(agent)
    if callable(agent) and not isinstance(agent, Managed):
        function: Callable[[AgentView], Any] = agent
        return function
    return None


def is_async(call: Callable[[AgentView], Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 - a callable object may be async


def _by_process(agent: Agent) -> Callable[[AgentView], Any]:
    """An Ostler agent that nobody manages is asked as its manager would ask it."""
    if inspect.iscoroutinefunction(agent.process):

        async def ask_async(view: AgentView) -> Any:
            return await agent.process(view.as_request())

        return ask_async
    return lambda view: agent.process(view.as_request())


def brain_faults(agent: Any) -> Iterator[Fault]:
    if not isinstance(agent, Managed) and caller(agent) is None:
        bound = "must be an object with a method `decide`, a function, an ostler.Agent or Managed(...)"
        yield Fault(field="agent", bound=bound, value=shown(agent))


class Brains:
    """The kinds of brain that a run can make again after a crash, by name.

    A factory is called with the params of the agent. What a brain learns belongs into the agent's state; one that
    keeps something itself has `save()`, which returns JSON values, and `restore(saved)`.
    """

    def __init__(self, factories: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._factories: dict[str, Any] = dict(factories or {})
        faults = [
            Fault(field=f"brains.{kind}", bound="must be a class or a function that makes a brain", value=shown(one))
            for kind, one in self._factories.items()
            if not callable(one)
        ]
        if faults:
            raise ValidationError(faults)
        self._kinds = {factory: kind for kind, factory in self._factories.items() if isinstance(factory, type)}

    def __contains__(self, kind: object) -> bool:
        return kind in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    @property
    def needs_manager(self) -> bool:
        """Whether some of them live elsewhere."""
        return any(isinstance(factory, ManagedMaker) for factory in self._factories.values())

    def kind_of(self, agent: Any) -> str | None:
        """The kind of a brain that was made elsewhere: by its class."""
        return self._kinds.get(type(agent))

    def make(self, kind: Any, params: Mapping[str, Any]) -> Any:
        factory = self._factories.get(kind) if isinstance(kind, str) else None
        if factory is None:
            known = ", ".join(sorted(self._factories)) or "none"
            raise ValidationError(
                [Fault(field="kind", bound=f"must be one of the run's brains ({known})", value=shown(kind))]
            )
        try:
            # Copied, or agents made with the same params would share what is in them.
            agent = factory(**copy.deepcopy(dict(params)))
        except BaseException as error:
            if is_call_off(error):
                raise
            bound = f"cannot be made with these params: {error_text(error)}"
            raise ValidationError([Fault(field=f"brain {kind}", bound=bound)]) from error
        faults = tuple(brain_faults(agent))
        if faults:
            raise ValidationError(faults)
        return agent
