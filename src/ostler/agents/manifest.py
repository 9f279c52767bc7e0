"""What an agent is: its name, where it comes from, and what it wants unless a spawn says otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any
from uuid import UUID

from ostler.agents.commandspec import CommandSpec
from ostler.model.context import json_faults
from ostler.model.faults import Fault
from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel
from ostler.model.text import name_faults, plain_text_faults

MAX_DESCRIPTION = 2000


class AgentKind(StrEnum):
    PYTHON = "python"
    COMMAND = "command"


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
    #: The body of a definition file: what the agent is told.
    prompt: str | None = None
    #: Keys of a definition file that are not ours; kept and passed on.
    extra: Mapping[str, Any] | None = None

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from name_faults("version", self.version)
        yield from plain_text_faults("description", self.description, MAX_DESCRIPTION)
        yield from json_faults("extra", self.extra)
