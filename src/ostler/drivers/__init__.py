"""The coding agents that people have: how each is started, and what its output says.

A driver is found by name and imported when it is first needed. `spec_for` makes the command of a definition.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ostler.agents.command import CommandMaker
from ostler.agents.commandspec import KIB, CommandSpec, HomeKind, PromptBy
from ostler.agents.registry import BUILT_IN, AgentKind, AgentManifest, AgentRegistry, definition_id
from ostler.errors import ValidationError
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits
from ostler.model.states import IsolationLevel
from ostler.model.validation import Fault, shown

if TYPE_CHECKING:
    from ostler.drivers.base import Driver

#: Where each driver is, and what its agent is.
_DRIVERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "claude": ("Claude", "Claude Code, unattended, in its workdir"),
        "codex": ("Codex", "Codex, unattended, in its workdir"),
        "pi": ("Pi", "pi, unattended, in its workdir"),
    }
)
NAMES = tuple(_DRIVERS)
#: What programs of developers look for in their environment.
_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LOGNAME",
    "SHELL",
    "TZ",
    "USER",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "NODE_EXTRA_CA_CERTS",
    "SSL_CERT_FILE",
    "SSH_AUTH_SOCK",
)
_MIB = KIB * KIB
#: An agent with its compilers and tests; less where the machine has less.
_MEMORY_MB = 4096
_LONGEST_RUN = timedelta(hours=4)
_OUTPUT_BYTES = 64 * KIB
#: How files of Claude Code say that they name no model.
_INHERIT = "inherit"


@cache
def driver_named(name: str) -> Driver:
    """Raises `ValidationError` with the known ones for a name that is none."""
    if name not in _DRIVERS:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        bound = f"must be one of {', '.join(NAMES)}, or the program must be named as a command{hint}"
        raise ValidationError([Fault(field="driver", bound=bound, value=shown(name))])
    driver_class: Any = getattr(import_module(f"ostler.drivers.{name}"), _DRIVERS[name][0])
    made: Driver = driver_class()
    return made


def command_of(manifest: AgentManifest) -> CommandSpec | None:
    """The command of a definition, also where its file names a driver; None for a Python agent."""
    driver = manifest.driver
    if manifest.command is not None or driver is None or manifest.kind is not AgentKind.COMMAND:
        return manifest.command
    model = (manifest.extra or {}).get("model")
    chosen = model if isinstance(model, str) and model != _INHERIT else None
    return spec_for(driver, model=chosen, home=manifest.home)


def driver_of(manifest: AgentManifest) -> Driver | None:
    """The driver of a definition; None for a plain command and for a Python agent."""
    spec = command_of(manifest)
    return None if spec is None or spec.driver is None else driver_named(spec.driver)


def options_of(manifest: AgentManifest) -> AgentSpawnOptions:
    """What a spawn of the definition gets unless it says otherwise.

    A command runs at the weakest level that can run it; a coding agent has more memory and time.
    """
    own = manifest.defaults or AgentSpawnOptions()
    if manifest.kind is not AgentKind.COMMAND:
        return own
    if driver_of(manifest) is None:
        return own.over(AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS))
    memory = min(_MEMORY_MB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB)
    limits = ResourceLimits(max_memory_mb=memory, execution_timeout=_LONGEST_RUN, max_concurrent_tasks=1)
    return own.over(AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS, resource_limits=limits))


def spec_for(
    name: str, *, arguments: Iterable[str] = (), model: str | None = None, home: HomeKind | str | None = None
) -> CommandSpec:
    """The command of a definition that names a driver. Whether the program is installed is seen at the start.

    `arguments` are further words for the program; they may hold the placeholders of a command.
    """
    driver = driver_named(name)
    kind = None if home is None else HomeKind(home)
    kept = driver.places if kind is HomeKind.PRIVATE else ()
    return CommandSpec(
        argv=(name, *arguments),
        env=(*_PASSED_ON, *(variable for variable in driver.variables if variable not in kept)),
        prompt_by=PromptBy.STDIN,
        max_output_bytes=_OUTPUT_BYTES,
        driver=name,
        model=model,
        home=kind,
    )


def register_built_in(registry: AgentRegistry) -> None:
    """Make `claude`, `codex` and `pi` known by their names, unless a name is taken. A later definition replaces one."""
    taken = {manifest.name for manifest in registry.list()}
    for name, (_, description) in _DRIVERS.items():
        if name not in taken:
            manifest = AgentManifest(
                id=definition_id(AgentKind.COMMAND, name),
                name=name,
                kind=AgentKind.COMMAND,
                description=description,
                min_isolation=IsolationLevel.PROCESS,
                source=BUILT_IN,
                command=spec_for(name),
            )
            registry.add(manifest, CommandMaker(name))
