from __future__ import annotations

import functools
import importlib.metadata
import logging
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import (
    Agent,
    AgentFactory,
    AgentKind,
    AgentManifest,
    AgentRegistry,
    CommandSpec,
    agent,
    definition_id,
)
from ostler.agents.base import FunctionAgent, FunctionMaker, maker_of_callable, takes_context
from ostler.errors import (
    AgentInitializationError,
    AgentNotFoundError,
    ConflictError,
    InvalidOperationError,
    ValidationError,
)
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import IsolationLevel

pytestmark = pytest.mark.anyio

ECHO = CommandSpec(argv=("echo", "{prompt}"))


class Fixer(Agent):
    """Fixes things."""

    def process(self, request: Any) -> Any:
        return request


class Named(Fixer):
    agent_name = "named"


class Child(Named):
    pass


class Needy(Fixer):
    def __init__(self, token: str) -> None:
        self.token = token


def make_needy() -> Needy:
    return Needy("secret")


async def greet(request: Any) -> str:
    return f"hello {request}"


async def polite(request: Any = "you") -> str:
    return f"good day, {request}"


def shout(request: Any, context: Any) -> str:
    return f"{request}!{context}"


def counting(request: int) -> Iterator[int]:
    yield from range(request)


def keyword(request: Any, *, tone: str) -> Any:
    return request, tone


# --- registering -------------------------------------------------------------------------------------


async def test_a_class_is_registered_found_and_made() -> None:
    registry = AgentRegistry()
    defaults = AgentSpawnOptions(initialization_timeout=timedelta(seconds=3))
    manifest = registry.register(
        Fixer, name="fixer", description="fixes", defaults=defaults, min_isolation=IsolationLevel.PROCESS,
        fail_on_error=True, version="7",
    )  # fmt: skip
    assert manifest == AgentManifest(
        id=definition_id(AgentKind.PYTHON, "fixer"), name="fixer", kind=AgentKind.PYTHON, description="fixes",
        version="7", defaults=defaults, min_isolation=IsolationLevel.PROCESS, fail_on_error=True,
        source=f"{__name__}:Fixer",
    )  # fmt: skip
    assert registry.find("fixer") == await registry.get_manifest(manifest.id) == manifest
    made = registry.maker(manifest.id)
    assert isinstance(made(), Fixer)
    assert made() is not made()


def test_ids_are_the_same_for_ever() -> None:
    """Records name them, so a change of this test is a migration."""
    assert definition_id(AgentKind.PYTHON, "fixer") == UUID("13ba5926-c1e4-5685-9c71-b5607da90798")
    assert definition_id(AgentKind.COMMAND, "fixer") == UUID("333546f5-83ad-5a39-9989-77b808e9d5c2")


def test_the_name_is_the_one_given_or_that_of_the_class() -> None:
    registry = AgentRegistry()
    assert registry.register(Fixer).name == f"{__name__}.Fixer"
    assert registry.register(Named).name == "named"
    assert registry.register(Named, name="other").name == "other"
    assert registry.register(Child).name == f"{__name__}.Child", "a subclass is another agent"


def test_a_command_and_a_lambda_need_a_name() -> None:
    registry = AgentRegistry()
    for nameless in (ECHO, lambda: Needy("x"), functools.partial(greet, "x")):
        with pytest.raises(ValidationError, match=r"must have a name: .* register it with name="):
            registry.register(nameless)
    echo = registry.register(ECHO, name="echo")
    assert (echo.kind, echo.command, echo.source) == (AgentKind.COMMAND, ECHO, None)
    with pytest.raises(InvalidOperationError, match="the command echo runs only at isolation level process"):
        registry.maker(echo.id)()
    needy = registry.register(make_needy, name="needy")
    assert needy.source == f"{__name__}:make_needy"
    assert isinstance(registry.maker(needy.id)(), Needy)
    assert [manifest.name for manifest in registry.list()] == ["echo", "needy"]


async def test_a_function_is_an_agent() -> None:
    registry = AgentRegistry()
    manifest = registry.register(greet)
    assert (manifest.name, manifest.source) == (f"{__name__}.greet", f"{__name__}:greet")
    made = registry.maker(manifest.id)()
    assert isinstance(made, FunctionAgent)
    assert await made.process("you") == "hello you"
    plain = registry.maker(registry.register(shout).id)()
    await plain.initialize("the context")  # type: ignore[arg-type]  # it is only passed on
    assert plain.process("you") == "you!the context"
    assert registry.register(make_needy).name == f"{__name__}.make_needy"
    assert isinstance(registry.maker(registry.find(f"{__name__}.make_needy").id)(), Needy)


@pytest.mark.parametrize(
    ("function", "is_agent", "with_context"),
    [
        (lambda: None, False, False),
        (lambda agent=None: agent, False, False),
        (lambda *words: words, False, False),
        (lambda request: request, True, False),
        (lambda request, context: (request, context), True, True),
        (lambda request, context=None: (request, context), True, True),
        (lambda request, count=1: request * count, True, False),
        (greet, True, False),
        (polite, True, False),
    ],
)
def test_a_function_that_takes_a_request_is_told_from_one_that_makes_an_agent(
    function: Any, is_agent: bool, with_context: bool
) -> None:
    assert isinstance(maker_of_callable(function), FunctionMaker) is is_agent
    if is_agent:
        assert takes_context(function) is with_context


@pytest.mark.parametrize(
    "wrong", [object(), "fixer", dict, Needy, make_needy(), lambda a, b, c: (a, b, c), counting, keyword]
)
def test_what_cannot_make_an_agent_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError, match="agent must "):
        AgentRegistry().register(wrong, name="x")


def test_a_broken_manifest_is_refused_and_not_kept() -> None:
    registry = AgentRegistry()
    several: list[Any] = [{"name": "a\nb"}, {"name": "a", "version": ""}, {"name": "a", "description": "x" * 3000}]
    for wrong in several:
        with pytest.raises(ValidationError):
            registry.register(Fixer, **wrong)
    with pytest.raises(ValidationError, match=r"command\.argv must begin with a program"):
        registry.register(CommandSpec(argv=()), name="a")
    misspelt: dict[str, Any] = {"nmae": "x"}
    with pytest.raises(TypeError, match="an agent has no nmae"):
        registry.register(Fixer, **misspelt)
    assert registry.list() == ()


async def test_the_same_source_again_takes_its_own_place() -> None:
    registry = AgentRegistry()
    first = registry.register(Fixer, name="fixer", version="1")
    second = registry.register(Fixer, name="fixer", version="2")
    assert first.id == second.id
    assert (await registry.get_manifest(first.id)).version == "2"
    registry.register(ECHO, name="echo")
    registry.register(ECHO, name="echo")


async def test_another_source_under_the_same_name_is_refused_unless_it_replaces() -> None:
    registry = AgentRegistry()
    old = registry.register(Fixer, name="fixer")
    for other in (Named, ECHO, make_needy):
        with pytest.raises(ConflictError, match=r"the agent name fixer is taken by .*:Fixer"):
            registry.register(other, name="fixer")
    assert registry.list() == (old,)
    new = registry.register(ECHO, name="fixer", replace=True)
    assert registry.list() == (new,)
    with pytest.raises(AgentNotFoundError):
        await registry.get_manifest(old.id)
    with pytest.raises(ConflictError, match="taken by the command echo"):
        registry.register(CommandSpec(argv=("cat",)), name="fixer")


def test_two_lambdas_are_two_sources() -> None:
    registry = AgentRegistry()
    first = lambda: Fixer()  # noqa: E731, PLW0108 - two lambdas are what is tried here
    second = lambda: Named()  # noqa: E731, PLW0108 - two lambdas are what is tried here
    registry.register(first, name="x")
    registry.register(first, name="x")
    with pytest.raises(ConflictError):
        registry.register(second, name="x")


class Idle(Agent):
    pass


class Yielding(Agent):
    def process(self, request: Any) -> Any:
        yield request


class Streaming(Agent):
    async def process(self, request: Any) -> Any:
        yield request


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Idle, "must have a process"), (Yielding, "must return its answer"), (Streaming, "must return its answer")],
)
def test_one_that_can_never_answer_is_refused(kind: type[Agent], said: str) -> None:
    registry = AgentRegistry()
    with pytest.raises(ValidationError, match=said):
        registry.register(kind)
    assert registry.list() == ()


@pytest.mark.parametrize("name", ["\ud800", "a\ud800b"])
def test_a_name_that_no_id_can_be_made_of_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name must be printable text on one line"):
        AgentRegistry().register(Fixer, name=name)


@pytest.mark.parametrize("name", [None, 5, [], {}, b"x"])
def test_only_a_text_is_looked_up(name: Any) -> None:
    with pytest.raises(ValidationError, match="name must be text"):
        AgentRegistry().find(name)


def test_a_partial_and_a_local_class_can_be_registered() -> None:
    class Local(Agent):
        def process(self, request: Any) -> Any:
            return request

    registry = AgentRegistry()
    assert "<locals>.Local" in (registry.register(Local, name="local").source or "")
    manifest = registry.register(functools.partial(Needy, "x"), name="partial")
    assert isinstance(registry.maker(manifest.id)(), Needy)


def test_many_threads_may_register() -> None:
    registry = AgentRegistry()
    threads = [threading.Thread(target=registry.register, args=(Fixer,), kwargs={"name": f"a{n}"}) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.list()) == 20


# --- the mark ----------------------------------------------------------------------------------------


def test_a_marked_class_is_registered_as_marked() -> None:
    @agent(name="marked", description="a mark", fail_on_error=True)
    class Marked(Agent):
        def process(self, request: Any) -> Any:
            return request

    class Heir(Marked):
        pass

    registry = AgentRegistry()
    manifest = registry.register(Marked)
    assert (manifest.name, manifest.description, manifest.fail_on_error) == ("marked", "a mark", True)
    assert registry.register(Marked, name="twin").description == "a mark"
    assert registry.register(Heir).description is None
    with pytest.raises(TypeError, match="an agent has no colour"):
        agent(colour="red")  # type: ignore[call-arg]  # wrong on purpose


def test_a_lifecycle_is_read_by_the_reader_that_the_registry_was_given() -> None:
    @agent(name="looped", lifecycle={"restart": "on-failure:3"})
    class Looped(Agent):
        def process(self, request: Any) -> Any:
            return request

    with pytest.raises(ValidationError, match="lifecycle can be read only by"):
        AgentRegistry().register(Looped)
    read: list[Any] = []

    def reader(source: str, lifecycle: Any) -> dict[str, Any]:
        read.append((source.rpartition(".")[2], lifecycle))
        return {"extra": {"lifecycle": dict(lifecycle)}, "name": "not this", "version": "4"}

    manifest = AgentRegistry(read_lifecycle=reader).register(Looped)
    assert read == [("Looped", {"restart": "on-failure:3"})]
    assert (manifest.name, manifest.version) == ("looped", "4")
    assert manifest.extra == {"lifecycle": {"restart": "on-failure:3"}}


def test_a_class_of_a_script_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ostler.agents import Agent, AgentRegistry, agent\n"
        "@agent(name='scripted')\nclass Mine(Agent):\n    def process(self, request): return request\n"
        "registry = AgentRegistry(); manifest = registry.register(Mine)\n"
        "assert isinstance(registry.maker(manifest.id)(), Mine)\n"
        "source = manifest.source\n"
    )
    assert runpy.run_path(str(script), run_name="__main__")["source"] == "__main__:Mine"


# --- looking up --------------------------------------------------------------------------------------


async def test_an_unknown_one_names_those_that_are_near() -> None:
    registry = AgentRegistry()
    with pytest.raises(AgentNotFoundError, match="nor any other; register one first"):
        registry.find("fixer")
    for name in ("fixer", "writer", "reviewer", "tester", "planner", "architect"):
        registry.register(Fixer, name=name)
    with pytest.raises(AgentNotFoundError, match=r"no agent named 'fxer' is registered; did you mean fixer\?"):
        registry.find("fxer")
    with pytest.raises(AgentNotFoundError, match="there are architect, fixer, planner, reviewer, tester and 1 more"):
        await registry.get_manifest(UUID(int=9))
    with pytest.raises(AgentNotFoundError):
        registry.maker(UUID(int=9))


def test_listeners_hear_of_what_was_registered(caplog: pytest.LogCaptureFixture) -> None:
    registry, heard = AgentRegistry(), list[str]()

    def broken(_manifest: AgentManifest) -> None:
        raise ValueError("no")

    registry.on_change(broken)
    stop = registry.on_change(lambda manifest: heard.append(registry.find(manifest.name).name))
    with caplog.at_level(logging.ERROR):
        registry.register(Fixer, name="a")
    assert "a listener failed on the registration of a" in caplog.text
    stop()
    stop()
    registry.register(Fixer, name="b")
    assert heard == ["a"]


# --- entry points ------------------------------------------------------------------------------------


def test_entry_points_are_loaded_and_broken_ones_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        importlib.metadata.EntryPoint(name, value, "ostler.agents")
        for name, value in (
            ("good", "good_agents:Good"),
            ("missing", "no_such_module_at_all:X"),
            ("exits", "good_agents:exits"),
            ("wrong", "good_agents:NUMBER"),
            ("echo", "good_agents:ECHO"),
        )
    ]
    module: Any = type(sys)("good_agents")
    module.Good, module.NUMBER, module.ECHO = Fixer, 3, ECHO
    module.__getattr__ = sys.exit
    monkeypatch.setitem(sys.modules, "good_agents", module)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points if group == "ostler.agents" else ())
    registry = AgentRegistry()
    assert [manifest.name for manifest in registry.load_entry_points()] == ["echo", "good"]
    assert [record.getMessage().split()[2] for record in caplog.records] == ["exits", "missing", "wrong"]
    assert "missing (no_such_module_at_all:X) cannot be loaded: ModuleNotFoundError" in caplog.text
    assert AgentRegistry().load_entry_points("ostler.nothing") == ()


# --- the factory -------------------------------------------------------------------------------------


def test_the_factory_makes_fresh_agents_by_type() -> None:
    registry = AgentRegistry()
    registry.register(Fixer, name="coder")
    factory = AgentFactory(registry)
    one, again = factory.new_agent("coder-1", "coder"), factory.new_agent("coder-1", "coder")
    assert isinstance(one, Fixer)
    assert one is not again
    assert (one.agent_id, Fixer().agent_id) == ("coder-1", None)


def test_the_factory_says_what_is_wrong() -> None:
    registry = AgentRegistry()
    registry.register(lambda: 3, name="three")
    registry.register(lambda: Needy(*[]), name="needy")
    factory = AgentFactory(registry)
    with pytest.raises(AgentNotFoundError, match="did you mean needy"):
        factory.new_agent("a", "nedy")
    with pytest.raises(AgentInitializationError, match="three must make an Agent, was 3"):
        factory.new_agent("a", "three")
    with pytest.raises(AgentInitializationError, match="a needy could not be made"):
        factory.new_agent("a", "needy")
    with pytest.raises(ValidationError, match="agent_id must have 1 to 200"):
        factory.new_agent("", "needy")


def test_naming_agents_loads_no_validation_library() -> None:
    code = (
        "import sys, ostler.agents as a; m = a.agent(name='x')(type('X', (a.Agent,), {}));"
        "sys.exit('pydantic' in sys.modules or 'importlib.metadata' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
