"""What a user writes: an agent as a Python class. Every method may be plain or async."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from ostler.agents.context import AgentContext
from ostler.model import Fault, shown

MaybeAsync = Awaitable[Any] | Any


class Agent:
    """Subclass it and override what you need. An object lives as long as one start: a restart makes a new one.

    The methods may be `async def` or plain `def`; all but `process` have a default that does nothing.
    """

    #: What `registry.register(cls)` takes where it is not told otherwise; None means the qualified class name.
    agent_name: ClassVar[str | None] = None

    #: The id under which a crew keeps it; set by `AgentFactory`.
    agent_id: str | None = None

    def initialize(self, context: AgentContext) -> MaybeAsync:
        """Get ready. Raising here fails the spawn; taking longer than `initialization_timeout` too."""

    def process(self, request: Any) -> MaybeAsync:
        """Do one piece of work and return its result. Raising fails this request, not the agent."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to process a request")

    def health(self) -> MaybeAsync:
        """Asked by a `custom` probe: None or True is well, False or a text is not, raising is not."""

    def final_state(self) -> MaybeAsync:
        """What to keep of it when it is terminated with `persist_final_state`: a mapping of JSON values."""

    def shutdown(self) -> MaybeAsync:
        """Let go of everything. Called once, on an orderly stop, after the clean-up hooks."""


def process_fault(agent: type[Agent]) -> Fault | None:
    """What keeps its objects from ever answering a request; better said now than when the first one comes."""
    if agent.process is Agent.process:
        bound = "must have a process(request) of its own; where it is given one only when it is made, register a "
        return Fault(field="agent", bound=f"{bound}function that makes it", value=shown(agent))
    return yielding_fault(agent)


def yielding_fault(agent: type[Agent] | Agent) -> Fault | None:
    """A generator is no answer: at some levels it would come back as it is, and at others not at all."""
    if inspect.isgeneratorfunction(agent.process) or inspect.isasyncgenfunction(agent.process):
        bound = "must return its answer from process, not yield it; return a list, or tell of the parts with "
        return Fault(field="agent", bound=f"{bound}context.report and context.signal", value=shown(agent))
    return None


FinalState = Mapping[str, Any]
#: Makes one agent object. Called once per start, in the place where the agent will live.
AgentMaker = Callable[[], Agent]
