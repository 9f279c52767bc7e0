"""What an agent is: its name, where it comes from, and what it wants unless a spawn says otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.agents.commandspec import CommandSpec
from ostler.model.context import json_faults
from ostler.model.faults import Fault, named
from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel
from ostler.model.text import name_faults, plain_text_faults, unkeepable_faults, variable_faults

MAX_DESCRIPTION = 2000
MAX_CHECK = 2000
PYTHON_DRIVER = "python:"


class AgentKind(StrEnum):
    PYTHON = "python"
    COMMAND = "command"


class HomeKind(StrEnum):
    """Which home directory an agent sees."""

    PRIVATE = "private"
    OWN = "own"  #: the user's own, with the settings and the sign-in of the programs there


@record
class AgentManifest(Record):
    #: Made from kind and name, so that it is the same in every run and on every machine.
    id: UUID
    name: str
    kind: AgentKind
    description: str | None = None
    version: str = "1"
    #: What a spawn without options gets.
    defaults: AgentSpawnOptions | None = None
    #: A spawn at a lower level is refused.
    min_isolation: IsolationLevel = IsolationLevel.NONE
    #: Whether an exception out of `process` ends the instance, or only the request.
    fail_on_error: bool = False
    #: "package.module:Class", or the path of a definition file.
    source: str | None = None
    command: CommandSpec | None = None
    #: What runs the agent of a definition file that is no command: "python:module:Class", or the name of a driver.
    driver: str | None = None
    #: Variables of its environment by name; None passes on the manager's. A spawn lays its own over them.
    env: Mapping[str, str | None] | None = None
    #: Command lines that must succeed before its work counts as done.
    checks: tuple[str, ...] = ()
    #: None leaves it to the driver.
    home: HomeKind | None = None
    #: The body of a definition file: what the agent is told.
    prompt: str | None = None
    #: Keys of a definition file that are not ours; kept and passed on.
    extra: Mapping[str, Any] | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from name_faults("version", self.version)
        yield from plain_text_faults("description", self.description, MAX_DESCRIPTION)
        yield from json_faults("extra", self.extra)
        yield from environment_faults("env", self.env or {})
        yield from check_faults("checks", self.checks)


def environment_faults(field: str, env: Mapping[str, str | None]) -> Iterator[Fault]:
    yield from variable_faults(field, env)
    for name, value in env.items():
        yield from unkeepable_faults(f"{field}.{named(name)}", value or "")


def check_faults(field: str, checks: tuple[str, ...]) -> Iterator[Fault]:
    for index, line in enumerate(checks):
        yield from plain_text_faults(f"{field}.{index}", line, MAX_CHECK)
        if not line.strip():
            yield Fault(field=f"{field}.{index}", bound="must be a command line")
