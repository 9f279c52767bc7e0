"""Makes agents by the name of their type."""

from __future__ import annotations

from ostler.agents.base import Agent
from ostler.agents.registry import AgentRegistry
from ostler.errors import AgentInitializationError, ValidationError
from ostler.model.faults import Fault, shown
from ostler.model.text import name_faults


class AgentFactory:
    """Needs nothing but the registry: what an agent wants to know it is told when it is initialised."""

    __slots__ = ("_registry",)

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry

    def new_agent(self, agent_id: str, agent_type: str) -> Agent:
        """A fresh object, which remembers nothing of an earlier one with the same id."""
        faults = tuple(name_faults("agent_id", agent_id))
        if faults:
            raise ValidationError(faults)
        manifest = self._registry.find(agent_type)
        try:
            made = self._registry.maker(manifest.id)()
        except Exception as error:
            raise AgentInitializationError(f"a {agent_type} could not be made: {error}") from error
        if not isinstance(made, Agent):
            fault = Fault(field=agent_type, bound="must make an Agent", value=shown(made))
            raise AgentInitializationError(fault.message)
        made.agent_id = agent_id
        return made
