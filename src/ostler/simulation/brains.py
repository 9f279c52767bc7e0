"""What decides for an agent: an object or a function, plain or async, or an instance that Ostler manages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ostler.agents.base import Agent
from ostler.agents.failures import error_text
from ostler.errors import ValidationError
from ostler.model.states import IsolationLevel
from ostler.model.validation import Fault, fault, shown

if TYPE_CHECKING:
    from ostler.simulation.view import AgentView

Call = Callable[["AgentView"], Any]


class Brain(Protocol):
    """Any object with `decide`, which may be `async def`.

    A brain that keeps something between turns has `save()`, which returns JSON values, and `restore(saved)`.
    """

    def decide(self, view: AgentView) -> Any: ...


@dataclass(frozen=True)
class Managed:
    """A brain that is an instance of Ostler: spawned before it is first asked, ended when its agent leaves.

    Its `process` gets `AgentView.as_request()` and answers with the decision, as JSON.
    """

    #: What `manager.start` takes: an agent class, a function, a command, the name of a definition.
    definition: Any
    isolation: IsolationLevel | str = IsolationLevel.PROCESS
    context: Mapping[str, Any] = field(default_factory=dict)
    #: More keywords of `manager.start`, such as memory="256M".
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ManagedKind:
    """Makes managed brains; the params of an agent become the context of its instance."""

    definition: Any
    isolation: IsolationLevel | str = IsolationLevel.PROCESS

    def __call__(self, **params: Any) -> Managed:
        return Managed(self.definition, self.isolation, params)


def call_of(agent: Any) -> Call | None:
    """How a brain inside this program is called; None for a managed brain, and for what is no brain."""
    if isinstance(agent, type | Managed):
        return None
    decide: Call | None = getattr(agent, "decide", None)
    if callable(decide):
        return decide
    if isinstance(agent, Agent):
        return _call_by_request(agent)
    return agent if callable(agent) else None


def is_async(call: Call) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 - a callable object may be async


def _call_by_request(agent: Agent) -> Call:
    """An `ostler.Agent` that is not managed is asked as its manager would ask it."""
    if inspect.iscoroutinefunction(agent.process):

        async def ask(view: AgentView) -> Any:
            return view.take_answer(await agent.process(view.as_request()))

        return ask
    return lambda view: view.take_answer(agent.process(view.as_request()))


def brain_faults(agent: Any) -> Iterator[Fault]:
    if not isinstance(agent, Managed) and call_of(agent) is None:
        bound = "must be an object with a method `decide`, a function, an ostler.Agent or Managed(...)"
        yield Fault(field="agent", bound=bound, value=shown(agent))


class Brains:
    """The kinds of brain that a run can make again, by name. A factory is called with the params of the agent."""

    def __init__(self, factories: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._factories: dict[str, Any] = dict(factories or {})
        faults = [
            Fault(
                field=f"brains.{kind}", bound="must be a class or a function that makes a brain", value=shown(factory)
            )
            for kind, factory in self._factories.items()
            if not callable(factory)
        ]
        if faults:
            raise ValidationError(faults)
        self._kinds = {factory: kind for kind, factory in self._factories.items() if isinstance(factory, type)}

    def __contains__(self, kind: object) -> bool:
        return isinstance(kind, str) and kind in self._factories

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    @property
    def needs_manager(self) -> bool:
        """Whether a kind makes managed brains, as far as that shows without making a brain."""
        return any(isinstance(factory, ManagedKind) for factory in self._factories.values())

    @property
    def listed(self) -> str:
        return ", ".join(sorted(self._factories)) or "none"

    def kind_of(self, agent: Any) -> tuple[str | None, Mapping[str, Any]]:
        """The kind of a brain that came as an object, by its class, and the params: the fields of a dataclass."""
        kind = self._kinds.get(type(agent))
        if kind is None or not dataclasses.is_dataclass(agent):
            return kind, {}
        return kind, {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent) if field.init}

    def make(self, kind: Any, params: Mapping[str, Any]) -> Any:
        """Raises `ValidationError` for a kind that is not known, or that makes no brain with these params."""
        if kind not in self:
            raise fault("kind", f"must be one of the brains of the run ({self.listed})", kind)
        try:
            # Copied, or agents made with the same params would share what is in them.
            agent = self._factories[kind](**copy.deepcopy(dict(params)))
        except (Exception, SystemExit) as error:
            bound = f"cannot be made with these params: {error_text(error)}"
            raise ValidationError([Fault(field=f"brain {kind}", bound=bound)]) from error
        faults = tuple(brain_faults(agent))
        if faults:
            raise ValidationError(faults)
        return agent
