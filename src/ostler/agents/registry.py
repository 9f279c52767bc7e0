"""Which agents there are: the manifest of each, how each is made, and the factory that makes them by name."""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Unpack
from uuid import UUID, uuid5

from ostler.agents.base import (
    Agent,
    AgentMaker,
    ManifestArguments,
    PythonMaker,
    decoration_of,
    maker_of_callable,
    process_fault,
    require_manifest_arguments,
)
from ostler.agents.command import CommandMaker
from ostler.agents.commandspec import CommandSpec, HomeKind
from ostler.agents.failures import error_text
from ostler.errors import AgentInitializationError, AgentNotFoundError, ConflictError, ValidationError
from ostler.model.context import json_faults
from ostler.model.record import Record, record
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel
from ostler.model.text import clean_text, clipped, environment_faults, name_faults, plain_text_faults
from ostler.model.validation import Fault, fault, shown

#: Ids of definitions are made within this; it must never change, for records name them.
NAMESPACE = UUID("8c1f3f0e-6f0b-5d53-9c8e-0b6f2d1a7e44")
ENTRY_POINTS = "ostler.agents"
#: The source of definitions that come with Ostler; another definition of the same name takes the place of one.
BUILT_IN = "ostler"
#: Definitions that were made for one command; they are not called by name.
COMMAND_PREFIX = "command/"
PYTHON_DRIVER = "python:"
MAX_DESCRIPTION = 2000
MAX_CHECK = 2000

Listener = Callable[["AgentManifest"], None]
#: Reads what stands under `lifecycle` in `@agent(...)`, and returns the fields of the manifest that follow from it.
LifecycleReader = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]

_log = logging.getLogger("ostler.agents")
_SHOWN_NAMES = 5


# --- the manifest ------------------------------------------------------------------------------------


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
    #: Whether a process of the agent may add tasks under its own; see `may-add-tasks` in definition files.
    may_add_tasks: bool = True
    #: "package.module:Class", or the path of a definition file.
    source: str | None = None
    #: The directory of the project whose files define it; None for the project of the home, and for what has no file.
    project: str | None = None
    command: CommandSpec | None = None
    #: What runs the agent of a definition file that is no command: "python:module:Class", or the name of a driver.
    driver: str | None = None
    #: Variables of its environment by name; None passes on the manager's. A spawn lays its own over them.
    env: Mapping[str, str | None] | None = None
    #: Command lines that must succeed before its work counts as done.
    checks: tuple[str, ...] = ()
    #: A command line that prepares the workdir of a task before the agent begins.
    setup: str | None = None
    #: None leaves it to the driver.
    home: HomeKind | None = None
    #: The body of a definition file: the instructions of the agent.
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
        yield from plain_text_faults("setup", self.setup, MAX_CHECK)


def check_faults(field: str, checks: tuple[str, ...]) -> Iterator[Fault]:
    for index, line in enumerate(checks):
        yield from plain_text_faults(f"{field}.{index}", line, MAX_CHECK)
        if not line.strip():
            yield Fault(field=f"{field}.{index}", bound="must be a command line")


def definition_id(kind: AgentKind, name: str, project: str | None = None) -> UUID:
    """The same in every run and, without a project beside that of the home, on every machine."""
    of_project = "" if project is None else f"@{project}"
    return uuid5(NAMESPACE, f"{kind}:{clean_text(name)}{of_project}")


def maker_of(manifest: AgentManifest) -> AgentMaker:
    """Of a definition with a command or a driver. Nothing is imported before the maker is called."""
    driver = manifest.driver or ""
    if manifest.kind is AgentKind.PYTHON:
        return PythonMaker(driver.removeprefix(PYTHON_DRIVER), manifest.project)
    return CommandMaker(manifest.command.argv[0] if manifest.command is not None else driver)


# --- the registry ------------------------------------------------------------------------------------


class AgentRegistry:
    """Holds definitions by id and by name; in a project a name belongs to one of them. Safe to use from several
    threads.

    What belongs to no other project (that of the home, what was registered in Python, what comes with Ostler) can be
    found from all of them, where they have no definition of that name themselves.
    """

    def __init__(self, *, read_lifecycle: LifecycleReader | None = None) -> None:
        self._read_lifecycle = read_lifecycle
        self._lock = threading.Lock()
        #: By project and name.
        self._held: Mapping[tuple[str | None, str], tuple[AgentManifest, AgentMaker]] = {}
        self._listeners: tuple[Listener, ...] = ()

    # --- putting in ----------------------------------------------------------------------------------

    def register(
        self,
        agent: type[Agent] | CommandSpec | Callable[..., Any],
        *,
        replace: bool = False,
        **arguments: Unpack[ManifestArguments],
    ) -> AgentManifest:
        """Take in a class, a command, or a function.

        A function without parameters makes an agent. One that takes a request, or a request and a context, is the
        agent: it is called for each request, and may be plain or async.

        The same source again takes the place of its earlier self. Another one under the same name is refused with
        `ConflictError`, unless it is to `replace` it.
        """
        require_manifest_arguments(arguments)
        decorated, lifecycle = decoration_of(agent)
        fields: dict[str, Any] = {"name": _name(agent), **decorated, **arguments}
        maker: AgentMaker
        if isinstance(agent, CommandSpec):
            kind, source, maker = AgentKind.COMMAND, None, CommandMaker("".join(agent.argv[:1]))
            fields["command"] = agent
        else:
            kind, source, maker = AgentKind.PYTHON, _source(agent), _maker(agent)
        name = fields["name"]
        if name is None:
            bound = "must have a name: write it as a class or as a function with `def`, or register it with name="
            raise fault("agent", bound)
        if lifecycle is not None:
            fields = {**self._lifecycle(source or name, lifecycle), **fields}
        manifest = AgentManifest(id=definition_id(kind, str(name)), kind=kind, source=source, **fields)
        return self.add(manifest, maker, replace=replace)

    def add(self, manifest: AgentManifest, maker: AgentMaker, *, replace: bool = False) -> AgentManifest:
        """Take in a definition that was read elsewhere."""
        manifest = manifest.checked()
        with self._lock:
            key = (manifest.project, manifest.name)
            held, _ = self._held.get(key, (None, None))
            if held is not None and not (replace or held.source == BUILT_IN or _same_source(held, manifest)):
                taken = f"the agent name {manifest.name} is taken by {_whence(held)}"
                raise ConflictError(f"{taken}; choose another name for {_whence(manifest)}, or replace it")
            self._held = {**self._held, key: (manifest, maker)}
            listeners = self._listeners
        for listener in listeners:
            try:
                listener(manifest)
            except Exception:  # noqa: BLE001 - the registration has happened, whatever a listener makes of it
                _log.exception("a listener failed on the registration of %s", manifest.name)
        return manifest

    def load_entry_points(self, group: str = ENTRY_POINTS) -> tuple[AgentManifest, ...]:
        """Register the agents of installed packages. One that fails is in the log; the others load."""
        from importlib.metadata import entry_points  # noqa: PLC0415 - reads mail headers, which few programs need

        loaded = []
        for point in sorted(entry_points(group=group), key=lambda point: point.name):
            try:
                loaded.append(self.register(point.load(), name=point.name))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - importing runs foreign code
                reason = clipped(error_text(error), 500)
                _log.warning("the agent %s (%s) cannot be loaded: %s", point.name, point.value, reason)
        return tuple(loaded)

    def on_change(self, listener: Listener) -> Callable[[], None]:
        """Call it with the manifest after each registration. The function that comes back ends that."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return unsubscribe

    # --- looking up ----------------------------------------------------------------------------------

    async def get_manifest(self, definition_id: UUID) -> AgentManifest:
        return self.manifest(definition_id)

    def manifest(self, definition_id: UUID) -> AgentManifest:
        return self._by_id(definition_id)[0]

    def find(self, name: str, project: str | None = None) -> AgentManifest:
        if not isinstance(name, str):
            raise fault("name", "must be text", name)
        try:
            return self._in_project(project)[name]
        except KeyError:
            names = self._in_project(project)
            raise AgentNotFoundError(_unknown(f"named {shown(name)}", names, near=name)) from None

    def maker(self, definition_id: UUID) -> AgentMaker:
        return self._by_id(definition_id)[1]

    def list(self, project: str | None = None) -> tuple[AgentManifest, ...]:
        """All that can be found from a project, by name."""
        manifests = self._in_project(project)
        return tuple(manifests[name] for name in sorted(manifests))

    def _in_project(self, project: str | None) -> dict[str, AgentManifest]:
        held = self._held
        return {
            name: manifest
            for place in dict.fromkeys((None, project))
            for (owner, name), (manifest, _) in held.items()
            if owner == place
        }

    def _by_id(self, definition_id: UUID) -> tuple[AgentManifest, AgentMaker]:
        for manifest, maker in self._held.values():
            if manifest.id == definition_id:
                return manifest, maker
        raise AgentNotFoundError(_unknown(f"with the id {definition_id}", (name for _, name in self._held)))

    def _lifecycle(self, source: str, lifecycle: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._read_lifecycle is None:
            bound = "can be read only by a registry that was given a reader for it; pass defaults instead"
            raise fault("lifecycle", bound)
        return self._read_lifecycle(source, lifecycle)


class AgentFactory:
    """Needs nothing but the registry: an agent gets its context when it is initialised.

    With `get_config` the settings of the project must be good before an agent is made.
    """

    __slots__ = ("_get_config", "_project", "_registry")

    def __init__(
        self, registry: AgentRegistry, get_config: Callable[[], Any] | None = None, *, project: str | None = None
    ) -> None:
        self._registry = registry
        self._get_config = get_config
        self._project = project

    def new_agent(self, agent_id: str, agent_type: str) -> Agent:
        """A fresh object, which remembers nothing of an earlier one with the same id."""
        faults = tuple(name_faults("agent_id", agent_id))
        if faults:
            raise ValidationError(faults)
        if self._get_config is not None:
            self._get_config()
        manifest = self._registry.find(agent_type, self._project)
        try:
            made = self._registry.maker(manifest.id)()
        except Exception as error:
            raise AgentInitializationError(f"a {agent_type} could not be made: {error}") from error
        if not isinstance(made, Agent):
            raise AgentInitializationError(f"{agent_type} must make an Agent, was {shown(made)}")
        made.agent_id = agent_id
        return made


# --- what is registered ------------------------------------------------------------------------------


def _maker(agent: Any) -> AgentMaker:
    if not callable(agent) or (isinstance(agent, type) and not issubclass(agent, Agent)):
        bound = "must be a subclass of Agent, a CommandSpec, or a function"
        raise fault("agent", bound, agent)
    if not isinstance(agent, type):
        return maker_of_callable(agent)
    try:
        inspect.signature(agent).bind()
    except TypeError:
        bound = "must be made without arguments; register a function that makes it, such as a lambda"
        raise fault("agent", bound, agent) from None
    if (broken := process_fault(agent)) is not None:
        raise ValidationError([broken])
    made: AgentMaker = agent
    return made


def _name(agent: Any) -> str | None:
    qualname = getattr(agent, "__qualname__", None)
    if isinstance(agent, CommandSpec) or not isinstance(qualname, str) or qualname.endswith("<lambda>"):
        return None
    own_name = vars(agent).get("agent_name") if isinstance(agent, type) else None
    return own_name or f"{agent.__module__}.{qualname}"


def _source(agent: Any) -> str:
    owner = agent if hasattr(agent, "__qualname__") else type(agent)
    source = f"{owner.__module__}:{owner.__qualname__}"
    code = getattr(agent, "__code__", None)
    # Two lambdas of one module have the same name, but not the same line.
    return f"{source}:{code.co_firstlineno}" if code is not None and "<" in source else source


def _same_source(first: AgentManifest, second: AgentManifest) -> bool:
    return first.kind is second.kind and first.source == second.source and (first.source is not None or first == second)


def _whence(manifest: AgentManifest) -> str:
    if manifest.source is not None:
        return manifest.source
    return f"the command {manifest.command.argv[0]}" if manifest.command else f"a {manifest.kind} agent"


def _unknown(what: str, held: Iterable[str], near: str | None = None) -> str:
    names = sorted(name for name in held if not name.startswith(COMMAND_PREFIX))
    close = difflib.get_close_matches(near, names, n=3) if near is not None else []
    if close:
        return f"no agent {what} is registered; did you mean {' or '.join(close)}?"
    if not names:
        return f"no agent {what} is registered, nor any other; register one first"
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"no agent {what} is registered; there are {', '.join(names[:_SHOWN_NAMES])}{more}"
