"""Makes the agents of definition files known to a registry. What a file names is imported when it is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ostler.agents.base import Agent, AgentMaker, maker_of_callable
from ostler.agents.command import CommandMaker
from ostler.agents.failures import error_text
from ostler.agents.files.building import DriverKind, MakerSource
from ostler.agents.files.discovery import Discovery, discover
from ostler.agents.files.loading import load_agent_file
from ostler.agents.files.page import FileFault
from ostler.agents.manifest import AgentManifest
from ostler.agents.registry import AgentRegistry
from ostler.errors import AgentInitializationError, ConflictError, ValidationError


@dataclass(frozen=True, slots=True)
class PythonMaker:
    """Imports "module:Class" or "module:function" when it is called.

    A plain record, so that it can be sent to where the agent lives.
    """

    target: str

    def __call__(self) -> Agent:
        module, _, path = self.target.partition(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:  # importing runs foreign code
            raise AgentInitializationError(
                f"{self.target} cannot be imported ({error_text(error)}); "
                f"check lifecycle.driver, and that the module is installed"
            ) from error
        if not callable(found) or (isinstance(found, type) and not issubclass(found, Agent)):
            raise AgentInitializationError(f"{self.target} is neither a subclass of ostler.Agent nor a function")
        try:
            return maker_of_callable(found)()
        except ValidationError as error:
            raise AgentInitializationError(f"{self.target}: {error}") from error


@dataclass(frozen=True, slots=True)
class AcpMaker:
    name: str

    def __call__(self) -> Agent:
        raise AgentInitializationError(
            f"the ACP driver {self.name} is not installed yet; name a command or a Python class under lifecycle.driver"
        )


def maker_for(source: MakerSource) -> AgentMaker:
    if source.command is not None:
        return CommandMaker(source.target)
    return PythonMaker(source.target) if source.kind is DriverKind.PYTHON else AcpMaker(source.target)


def register_file(registry: AgentRegistry, path: str | Path) -> AgentManifest:
    """Add the definition of one file; it takes the place of its earlier self."""
    found = load_agent_file(path)
    return registry.add(found.manifest, maker_for(found.maker_source), replace=True)


def register_files(registry: AgentRegistry, root: str | Path, *, user: str | Path | None = None) -> Discovery:
    """Add every definition under a root. A name that code has registered stays with the code and is a fault here."""
    found = discover(root, user=user)
    added = []
    faults = list(found.faults)
    for definition in found.definitions:
        try:
            registry.add(definition.manifest, maker_for(definition.maker_source))
        except ConflictError as error:
            faults.append(FileFault(path=definition.path, line=0, bound=str(error)))
        else:
            added.append(definition)
    return replace(found, definitions=tuple(added), faults=tuple(faults))
