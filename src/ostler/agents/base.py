"""What a user writes: an agent as a Python class or as one function. Each may be plain or async."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from ostler.agents.context import AgentContext
from ostler.agents.failures import error_text
from ostler.errors import AgentInitializationError, ValidationError
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel
from ostler.model.validation import Fault, fault, shown

MaybeAsync = Awaitable[Any] | Any
#: The attribute of a decorated class; looked up on the class itself, for a subclass is another agent.
_DECORATION = "__ostler_agent__"


class Agent:
    """Subclass it and override what you need. An object lives as long as one start: a restart makes a new one.

    The methods may be `async def` or plain `def`; all but `process` have a default that does nothing.
    """

    #: The name for `registry.register(cls)` without `name`; None means the qualified class name.
    agent_name: ClassVar[str | None] = None

    #: The id under which a crew keeps it; set by `AgentFactory`.
    agent_id: str | None = None

    def initialize(self, context: AgentContext) -> MaybeAsync:
        """Get ready. Raising here fails the spawn; taking longer than `initialization_timeout` too."""

    def process(self, request: Any) -> MaybeAsync:
        """Do one piece of work and return its result. Raising fails this request, not the agent."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to process a request")

    def health(self) -> MaybeAsync:
        """Called by a `custom` probe: None or True is healthy; False, a text or an exception is not."""

    def final_state(self) -> MaybeAsync:
        """What to keep of it when it is terminated with `persist_final_state`: a mapping of JSON values."""

    def shutdown(self) -> MaybeAsync:
        """Let go of everything. Called once, on an orderly stop, after the clean-up hooks."""


A = TypeVar("A", bound=Agent)
#: Makes one agent object. Called once per start, in the place where the agent will live.
AgentMaker = Callable[[], Agent]


# --- the decorator -----------------------------------------------------------------------------------


class ManifestArguments(TypedDict, total=False):
    """The fields of `AgentManifest` that a registration may set; the others are found out."""

    name: str
    description: str | None
    version: str
    defaults: AgentSpawnOptions | None
    min_isolation: IsolationLevel
    fail_on_error: bool
    may_add_tasks: bool


def agent(
    *, lifecycle: Mapping[str, Any] | None = None, **arguments: Unpack[ManifestArguments]
) -> Callable[[type[A]], type[A]]:
    """Describe a class; `lifecycle` is as in a definition file.

    It is not registered yet: `registry.register(cls)` reads what stands here.
    """
    require_manifest_arguments(arguments)

    def decorate(cls: type[A]) -> type[A]:
        setattr(cls, _DECORATION, (arguments, lifecycle))
        return cls

    return decorate


def decoration_of(source: object) -> tuple[ManifestArguments, Mapping[str, Any] | None]:
    """The arguments of the decorator and the lifecycle."""
    nothing = ManifestArguments(), None
    return vars(source).get(_DECORATION, nothing) if isinstance(source, type) else nothing


def require_manifest_arguments(arguments: Mapping[str, Any]) -> None:
    """Python does not check keywords against a TypedDict, so a misspelt one would pass."""
    allowed = ManifestArguments.__annotations__
    unknown = arguments.keys() - allowed.keys()
    if unknown:
        raise TypeError(
            f"an agent has no {', '.join(sorted(unknown))}; what can be said of it is: {', '.join(allowed)}"
        )


# --- an agent that is a function ---------------------------------------------------------------------


class FunctionAgent(Agent):
    """An agent that is one function: of the request, or of the request and the context."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._context: AgentContext | None = None
        self._takes_context = takes_context(function)
        if inspect.iscoroutinefunction(function):  # the method must be async too, or it would begin in a worker thread
            self.process = self._process_async  # type: ignore[method-assign]  # the same, but async

    async def initialize(self, context: AgentContext) -> None:
        self._context = context

    def process(self, request: Any) -> Any:
        return self.function(request, self._context) if self._takes_context else self.function(request)

    async def _process_async(self, request: Any) -> Any:
        return await FunctionAgent.process(self, request)


@dataclass(frozen=True, slots=True)
class FunctionMaker:
    """Makes the agent of a function; level process finds the function itself by its name."""

    function: Callable[..., Any]

    def __call__(self) -> Agent:
        return FunctionAgent(self.function)


@dataclass(frozen=True, slots=True)
class PythonMaker:
    """Imports "module:Class" or "module:function" when it is called, or where a level starts the agent."""

    target: str
    #: The directory of a project beside that of the home, which its module must come from.
    project: str | None = None

    def __call__(self) -> Agent:
        try:
            value = import_target(self.target)
        except (Exception, SystemExit) as error:  # importing runs foreign code
            raise AgentInitializationError(
                f"{self.target} cannot be imported ({error_text(error)}); "
                "check lifecycle.driver, and that the module is installed"
            ) from error
        if not callable(value) or (isinstance(value, type) and not issubclass(value, Agent)):
            raise AgentInitializationError(f"{self.target} is neither a subclass of ostler.Agent nor a function")
        self._require_own_module()
        try:
            return maker_of_callable(value)()
        except ValidationError as error:
            raise AgentInitializationError(f"{self.target}: {error}") from error

    @property
    def file(self) -> str | None:
        """Of its module in the project; None where it is imported like any other."""
        if self.project is None:
            return None
        base = os.path.join(self.project, *self.target.partition(":")[0].split("."))  # noqa: PTH118 - agents load this
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if os.path.isfile(path)), None)  # noqa: PTH113

    def _require_own_module(self) -> None:
        """In this program a module of one name is imported once; that of another project must not run in its place."""
        name, file = self.target.partition(":")[0], self.file
        imported = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and imported is not None and os.path.realpath(file) != os.path.realpath(imported):
            raise AgentInitializationError(
                f"the module {name} of {self.project} cannot be used beside {imported}, which has the same name; "
                "run the agent with isolation: process, or rename the module"
            )


def import_target(target: str) -> Any:
    """What "module:name" or "module:outer.inner" names. Raises whatever the import raises."""
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), import_module(module))


def maker_of_callable(source: Callable[..., Any]) -> AgentMaker:
    """What makes the agent: `source` itself or, where it takes a request, a maker of a `FunctionAgent`.

    Raises `ValidationError` for a function that can be neither.
    """
    if isinstance(source, type):
        return source
    try:
        signature = inspect.signature(source)
    except ValueError:  # there is none, as of some functions written in C
        return source
    if _takes(signature, 0) and not (inspect.iscoroutinefunction(source) and _positional(source)):
        return source
    if not (_takes(signature, 1) or _takes(signature, 2)):
        raise fault(
            "agent", "must take nothing and make an Agent, or take a request, or a request and a context", source
        )
    if (broken := yielding_fault(source)) is not None:
        raise ValidationError([broken])
    return FunctionMaker(source)


def takes_context(function: Callable[..., Any]) -> bool:
    """Whether its second parameter is for the context: it has no default, or is called so."""
    second = _positional(function)[1:2]
    return any(parameter.default is parameter.empty or parameter.name == "context" for parameter in second)


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether it can be called with so many arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def process_fault(agent: type[Agent]) -> Fault | None:
    """What keeps its objects from ever answering a request; better reported now than with the first request."""
    if agent.process is Agent.process:
        bound = "must have a process(request) of its own; where it is given one only when it is made, register a "
        return Fault(field="agent", bound=f"{bound}function that makes it", value=shown(agent))
    return yielding_fault(agent)


def yielding_fault(agent: type[Agent] | Agent | Callable[..., Any]) -> Fault | None:
    """A generator is no answer: some levels would return it unchanged, others could not return it at all."""
    process = getattr(agent, "process", agent)
    if inspect.isgeneratorfunction(process) or inspect.isasyncgenfunction(process):
        bound = "must return its answer from process, not yield it; return a list, or tell of the parts with "
        return Fault(field="agent", bound=f"{bound}context.report and context.signal", value=shown(agent))
    return None
