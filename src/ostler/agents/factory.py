"""Makes agents: by the name of their type, and from a definition alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostler.agents.base import Agent, AgentMaker, PythonMaker
from ostler.agents.command import CommandMaker
from ostler.agents.manifest import PYTHON_DRIVER, AgentKind, AgentManifest
from ostler.agents.registry import AgentRegistry
from ostler.errors import AgentInitializationError, ValidationError
from ostler.model.faults import Fault, shown
from ostler.model.text import name_faults


def maker_of(manifest: AgentManifest) -> AgentMaker:
    """Of a definition that says itself what runs it. Nothing is imported before the maker is called."""
    driver = manifest.driver or ""
    if manifest.kind is AgentKind.PYTHON:
        return PythonMaker(driver.removeprefix(PYTHON_DRIVER))
    return CommandMaker(manifest.command.argv[0] if manifest.command is not None else driver)


class AgentFactory:
    """Needs nothing but the registry: what an agent wants to know it is told when it is initialised.

    With `get_config` the settings of the project must be good before an agent is made.
    """

    __slots__ = ("_get_config", "_registry")

    def __init__(self, registry: AgentRegistry, get_config: Callable[[], Any] | None = None) -> None:
        self._registry = registry
        self._get_config = get_config

    def new_agent(self, agent_id: str, agent_type: str) -> Agent:
        """A fresh object, which remembers nothing of an earlier one with the same id."""
        faults = tuple(name_faults("agent_id", agent_id))
        if faults:
            raise ValidationError(faults)
        if self._get_config is not None:
            self._get_config()
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
