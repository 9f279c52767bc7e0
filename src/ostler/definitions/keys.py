"""The keys of definition files, as records. A key exists only where something acts on it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from ostler.agents.commandspec import CommandSpec, ExitMeaning, HomeKind, PromptBy, text_keys
from ostler.agents.registry import PYTHON_DRIVER, AgentKind, check_faults
from ostler.model.record import PartialRecord, Record, record
from ostler.model.spawn import (
    AgentSpawnOptions,
    CpuPercent,
    HealthCheckConfig,
    InitializationTimeout,
    ResourceLimits,
    RestartPolicy,
    parse_restart,
)
from ostler.model.states import AgentPriority
from ostler.model.text import environment_faults, tag_faults
from ostler.model.types import Parsed
from ostler.model.validation import Fault, as_written

#: The driver of an agent whose file names none; a file of Codex has its own.
CLAUDE = "claude"

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PERCENT = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*%")


# --- values that can be written in more than one way -------------------------------------------------


def _cores(value: Any) -> Any:
    """Percent of a core, from a number of cores or from "50%"."""
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        return round(float(match[1]))
    if isinstance(value, float) and math.isfinite(value * 100):
        return round(value * 100)
    return value * 100 if type(value) is int else value


def _words(value: Any) -> Any:
    """A text is split as a shell splits it; no shell ever sees it."""
    try:
        return shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"must be a command line that splits into words ({str(error).lower()})") from None


def _variables(value: Any) -> Any:
    """Names whose values are passed on, or names with values; a number stands for its digits."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return dict.fromkeys(value)
    if not isinstance(value, Mapping):
        raise ValueError("must be a list of names, or names with values")  # noqa: TRY004 - becomes a fault
    return {name: str(text) if type(text) is int else text for name, text in value.items()}


def _driver(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    kind, colon, rest = value.partition(":")
    if colon and kind in {"command", "python"}:
        return {kind: rest.strip()}
    if not _NAME.fullmatch(value):
        raise ValueError("must be the name of a driver, python:module:Class, or {command: [...]}")
    return {"name": value}


def _restart(value: Any) -> Any:
    """The long form of "on-failure:3"; its words are also those of `type`."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        return {**_restart(kind), **value, "type": _restart(kind)["type"]} if isinstance(kind, str) else value
    policy = parse_restart("none" if value is False else value)
    if not isinstance(policy, RestartPolicy):
        return value
    return {"type": policy.type, "max-retries": policy.max_retries, "initial-delay": policy.initial_delay}


# --- the keys ----------------------------------------------------------------------------------------


class FileRecord(Record):
    """A record that people write in a file: the keys are its fields in kebab-case, or as `KEYS` calls them.

    It is only read, by `from_dict`; its faults are told in the words of the file.
    """

    __slots__ = ()
    KEYS: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        cls.__pydantic_config__ = {**Record.__pydantic_config__, "alias_generator": cls.spelled}

    @classmethod
    def spelled(cls, field: str) -> str:
        return cls.KEYS.get(field, field.replace("_", "-"))


@record
class LimitKeys(FileRecord, ResourceLimits):
    KEYS: ClassVar[Mapping[str, str]] = {
        "max_memory_mb": "memory",
        "max_cpu_percent": "cpu",
        "execution_timeout": "time",
        "max_worker_threads": "threads",
        "max_concurrent_tasks": "tasks",
        "max_tokens_per_minute": "tokens-per-minute",
    }
    max_cpu_percent: Annotated[
        CpuPercent,
        Parsed(
            _cores,
            expects="a number of cores such as 1.5, or a percentage such as 50%",
            write=lambda percent: f"{percent / 100:g}",
            schema={"type": ["number", "string"], "examples": [1.5, "50%"]},
        ),
    ] = 0


@record
class RestartKeys(FileRecord, RestartPolicy):
    """The long form of `restart`."""


@record
class HealthKeys(FileRecord, HealthCheckConfig):
    KEYS: ClassVar[Mapping[str, str]] = {"failure_threshold": "retries", "success_threshold": "successes"}


@record
class DriverKeys(FileRecord):
    """What runs the agent: one of `command`, `python` and `name`. The other keys are for a command."""

    command: Annotated[tuple[str, ...] | None, Parsed(_words, schema={"type": "string"})] = None
    #: "module:Class" or "module:function"; imported when the agent is started.
    python: str | None = None
    #: Of a driver that is looked up when the agent is started.
    name: str | None = None
    prompt: PromptBy = PromptBy.FILE
    exit_codes: Annotated[Mapping[str, ExitMeaning] | None, Parsed(text_keys)] = None
    pty: bool = False

    @property
    def spec(self) -> CommandSpec | None:
        if self.command is None:
            return None
        return CommandSpec(argv=self.command, prompt_by=self.prompt, exit_codes=self.exit_codes, pty=self.pty)

    @property
    def kind(self) -> AgentKind:
        return AgentKind.COMMAND if self.python is None else AgentKind.PYTHON

    @property
    def text(self) -> str | None:
        """As the manifest keeps it."""
        return self.name if self.python is None else f"{PYTHON_DRIVER}{self.python}"

    def rules(self) -> Iterator[Fault]:
        spec = self.spec
        if [self.command, self.python, self.name].count(None) != 2:
            yield Fault(field="", bound="must have exactly one of command, python, name")
        elif spec is not None:
            for fault in spec.rules():
                key = self.spelled(fault.field.replace("argv", "command"))
                yield Fault(field=key, bound=fault.bound, value=fault.value)
        elif self.pty or self.exit_codes or self.prompt is not PromptBy.FILE:
            yield Fault(field="", bound="must be a command to have the keys prompt, exit-codes or pty")
        elif self.python is not None and not _CLASS.fullmatch(self.python):
            yield Fault(field="python", bound="must be a class such as my.mod:Fixer", value=as_written(self.python))


@record
class LifecycleKeys(FileRecord, PartialRecord):
    """Everything about an agent that is Ostler's."""

    #: What runs it: the name of a coding agent, `python:module:Class`, or a command.
    driver: Annotated[DriverKeys, Parsed(_driver, schema={"type": "string"})] = field(
        default_factory=lambda: DriverKeys(name=CLAUDE)
    )
    isolation: Literal["none", "thread", "process"] = "thread"
    #: Variables that it sees: names whose values are passed on, or names with values.
    env: Annotated[
        Mapping[str, str | None], Parsed(_variables, schema={"type": "array", "items": {"type": "string"}})
    ] = field(default_factory=dict)
    limits: LimitKeys = field(default_factory=LimitKeys)
    #: Such as `no`, `always`, `on-failure:3`; or a table.
    restart: Annotated[
        RestartKeys, Parsed(_restart, schema={"type": ["string", "boolean"], "examples": ["on-failure:3", "no"]})
    ] = field(default_factory=RestartKeys)
    healthcheck: HealthKeys = field(default_factory=HealthKeys)
    priority: AgentPriority = AgentPriority.NORMAL
    tags: tuple[str, ...] = ()
    initialization_timeout: InitializationTimeout = timedelta(seconds=30)
    #: Whether an exception of its code ends it.
    fail_on_error: bool = False
    #: Whether the agent may add tasks under the one that it works on.
    may_add_tasks: bool = True
    #: Command lines that must pass on the work of each of its tasks.
    checks: tuple[str, ...] = ()
    #: A command line that prepares the workdir of a task, once, before the agent begins.
    setup: str | None = None
    #: `private` gives a coding agent a home directory of its own.
    home: HomeKind = HomeKind.OWN

    #: Keys that a spawn may overrule, by the option that each of them fills.
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "isolation": "isolation_level",
        "limits": "resource_limits",
        "restart": "restart_policy",
        "healthcheck": "health_check",
        "priority": "priority",
        "tags": "tags",
        "initialization_timeout": "initialization_timeout",
    }

    def manifest_fields(self) -> dict[str, Any]:
        """What was written, as fields of `AgentManifest`; what runs the agent is left out."""
        options = {option: getattr(self, key) for key, option in self.OPTIONS.items() if key in self.fields_set}
        kept = {"env", "fail_on_error", "may_add_tasks", "checks", "setup", "home"} & self.fields_set
        return {**{key: getattr(self, key) for key in kept}, "defaults": AgentSpawnOptions(**options)}

    def rules(self) -> Iterator[Fault]:
        yield from tag_faults("tags", self.tags)
        yield from environment_faults("env", self.env)
        yield from check_faults("checks", self.checks)
        if self.setup is not None and not self.setup.strip():
            yield Fault(field="setup", bound="must be a command line, not empty text")
        if {"driver", "isolation"} <= self.fields_set and self.driver.python is None and self.isolation != "process":
            yield Fault(field="isolation", bound="must be process where the driver is a program", value=self.isolation)


@record
class AgentFile(FileRecord):
    """The keys of a definition file that are read; those of other tools are kept and passed on."""

    name: str = ""
    description: str = ""
    lifecycle: LifecycleKeys = field(default_factory=LifecycleKeys)


@record
class InlineAgent(LifecycleKeys):
    """An agent without a file of its own: the keys of `lifecycle`, a description and the instructions."""

    description: str = ""
    instructions: str = ""
