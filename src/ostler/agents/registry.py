"""Which agents there are, and how each is made."""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack
from uuid import UUID, uuid5

from ostler.agents.base import Agent, AgentMaker, maker_of_callable, process_fault
from ostler.agents.command import CommandMaker
from ostler.agents.commandspec import CommandSpec
from ostler.agents.failures import error_text
from ostler.agents.manifest import AgentKind, AgentManifest
from ostler.agents.marks import A, About, mark_of, require_known
from ostler.errors import AgentNotFoundError, ConflictError, ValidationError
from ostler.model.faults import Fault, shown
from ostler.model.text import clipped, unkeepable_faults

#: Ids of definitions are made within this; it must never change, for records name them.
NAMESPACE = UUID("8c1f3f0e-6f0b-5d53-9c8e-0b6f2d1a7e44")
ENTRY_POINTS = "ostler.agents"
#: Definitions that were made for one command and that nobody calls by name.
COMMAND_PREFIX = "command/"

Listener = Callable[[AgentManifest], None]
#: Reads what stands under `lifecycle` in `@agent(...)`, and answers the fields of the manifest that follow from it.
LifecycleReader = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]

_log = logging.getLogger("ostler.agents")
_SHOWN_NAMES = 5


def definition_id(kind: AgentKind, name: str) -> UUID:
    """The same in every run and on every machine."""
    return uuid5(NAMESPACE, f"{kind}:{name}")


class AgentRegistry:
    """Holds definitions by id and by name; a name belongs to one of them. Safe to use from several threads."""

    def __init__(self, *, read_lifecycle: LifecycleReader | None = None) -> None:
        self._read_lifecycle = read_lifecycle
        self._lock = threading.Lock()
        self._held: Mapping[str, tuple[AgentManifest, AgentMaker]] = {}
        self._listeners: tuple[Listener, ...] = ()
        self._problems: tuple[Fault, ...] = ()

    # --- putting in ----------------------------------------------------------------------------------

    def register(
        self,
        agent: type[Agent] | CommandSpec | Callable[..., Any],
        *,
        replace: bool = False,
        **about: Unpack[About],
    ) -> AgentManifest:
        """Take in a class, a command, or a function.

        A function without parameters makes an agent. One that takes a request, or a request and a context, is the
        agent: it is called for each request, and may be plain or async.

        The same source again takes the place of its earlier self. Another one under the same name is refused with
        `ConflictError`, unless it is to `replace` it.
        """
        require_known(about)
        mark = mark_of(agent)
        said: dict[str, Any] = {"name": _name(agent), **mark.about, **about}
        maker: AgentMaker
        if isinstance(agent, CommandSpec):
            kind, source, maker = AgentKind.COMMAND, None, CommandMaker("".join(agent.argv[:1]))
            said["command"] = agent
        else:
            kind, source, maker = AgentKind.PYTHON, _source(agent), _maker(agent)
        name = _required(said["name"])
        if mark.lifecycle is not None:
            said = {**self._lifecycle(source or name, mark.lifecycle), **said}
        manifest = AgentManifest(id=definition_id(kind, name), kind=kind, source=source, **said)
        return self.add(manifest, maker, replace=replace)

    def agent(self, *, replace: bool = False, **about: Unpack[About]) -> Callable[[type[A]], type[A]]:
        """`register` as a decorator of a class."""

        def take(cls: type[A]) -> type[A]:
            self.register(cls, replace=replace, **about)
            return cls

        return take

    def add(self, manifest: AgentManifest, maker: AgentMaker, *, replace: bool = False) -> AgentManifest:
        """Take in a definition that was read elsewhere."""
        manifest = manifest.checked()
        with self._lock:
            held, _ = self._held.get(manifest.name, (None, None))
            if held is not None and not replace and not _same_source(held, manifest):
                taken = f"the agent name {manifest.name} is taken by {_whence(held)}"
                raise ConflictError(f"{taken}; choose another name for {_whence(manifest)}, or replace it")
            self._held = {**self._held, manifest.name: (manifest, maker)}
            listeners = self._listeners
        for listener in listeners:
            try:
                listener(manifest)
            except Exception:  # noqa: BLE001 - the registration has happened, whatever a listener makes of it
                _log.exception("a listener failed on the registration of %s", manifest.name)
        return manifest

    def load_entry_points(self, group: str = ENTRY_POINTS) -> tuple[AgentManifest, ...]:
        """Take in what installed packages offer under this group. One that fails is in `problems`; the others load."""
        from importlib.metadata import entry_points  # noqa: PLC0415 - reads mail headers, which few programs need

        loaded = []
        for point in sorted(entry_points(group=group), key=lambda one: one.name):
            try:
                loaded.append(self.register(point.load(), name=point.name))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - importing runs foreign code
                bound = clipped(f"({point.value}) cannot be loaded: {error_text(error)}", 500)
                self._problems = (*self._problems, Fault(field=point.name, bound=bound))
                _log.warning("the agent %s %s", point.name, bound)
        return tuple(loaded)

    @property
    def problems(self) -> tuple[Fault, ...]:
        """What could not be loaded, and why."""
        return self._problems

    def on_change(self, listener: Listener) -> Callable[[], None]:
        """Call it with the manifest after each registration. The function that comes back ends that."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    # --- looking up ----------------------------------------------------------------------------------

    async def get_manifest(self, definition_id: UUID) -> AgentManifest:
        return self.manifest(definition_id)

    def manifest(self, definition_id: UUID) -> AgentManifest:
        return self._by_id(definition_id)[0]

    def find(self, name: str) -> AgentManifest:
        if not isinstance(name, str):
            raise ValidationError([Fault(field="name", bound="must be text", value=shown(name))])
        try:
            return self._held[name][0]
        except KeyError:
            raise AgentNotFoundError(_unknown(f"named {shown(name)}", self._held, near=name)) from None

    def maker(self, definition_id: UUID) -> AgentMaker:
        return self._by_id(definition_id)[1]

    def list(self) -> tuple[AgentManifest, ...]:
        """All of them, by name."""
        return tuple(self._held[name][0] for name in sorted(self._held))

    def _by_id(self, wanted: UUID) -> tuple[AgentManifest, AgentMaker]:
        for manifest, maker in self._held.values():
            if manifest.id == wanted:
                return manifest, maker
        raise AgentNotFoundError(_unknown(f"with the id {wanted}", self._held))

    def _lifecycle(self, source: str, lifecycle: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._read_lifecycle is None:
            bound = "can be read only by a registry that was given a reader for it; pass defaults instead"
            raise ValidationError([Fault(field="lifecycle", bound=bound)])
        return self._read_lifecycle(source, lifecycle)


def _maker(agent: Any) -> AgentMaker:
    if not callable(agent) or (isinstance(agent, type) and not issubclass(agent, Agent)):
        bound = "must be a subclass of Agent, a CommandSpec, or a function"
        raise ValidationError([Fault(field="agent", bound=bound, value=shown(agent))])
    if not isinstance(agent, type):
        return maker_of_callable(agent)
    try:
        inspect.signature(agent).bind()
    except TypeError:
        bound = "must be made without arguments; register a function that makes it, such as a lambda"
        raise ValidationError([Fault(field="agent", bound=bound, value=shown(agent))]) from None
    if (fault := process_fault(agent)) is not None:
        raise ValidationError([fault])
    made: AgentMaker = agent
    return made


def _name(agent: Any) -> str | None:
    qualname = getattr(agent, "__qualname__", None)
    if isinstance(agent, CommandSpec) or not isinstance(qualname, str) or qualname.endswith("<lambda>"):
        return None
    given = vars(agent).get("agent_name") if isinstance(agent, type) else None
    return given or f"{agent.__module__}.{qualname}"


def _required(name: Any) -> str:
    if name is None:
        bound = "must have a name: write it as a class or as a function with `def`, or register it with name="
        raise ValidationError([Fault(field="agent", bound=bound)])
    if not isinstance(name, str):
        raise ValidationError([Fault(field="name", bound="must be text", value=shown(name))])
    faults = tuple(unkeepable_faults("name", name))
    if faults:  # the rest is looked at in the manifest, for which an id is made of it first
        raise ValidationError(faults)
    return name


def _source(agent: Any) -> str:
    owner = agent if hasattr(agent, "__qualname__") else type(agent)
    source = f"{owner.__module__}:{owner.__qualname__}"
    code = getattr(agent, "__code__", None)
    # Two lambdas of one module have the same name, but not the same line.
    return f"{source}:{code.co_firstlineno}" if code is not None and "<" in source else source


def _same_source(one: AgentManifest, other: AgentManifest) -> bool:
    return one.kind is other.kind and one.source == other.source and (one.source is not None or one == other)


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
