from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from ostler.agents import Agent, AgentKind, AgentRegistry, agent
from ostler.agents.files import load_agent_file, maker_for, read_lifecycle, register_files
from ostler.errors import AgentInitializationError, DefinitionError, InvalidOperationError
from ostler.model import IsolationLevel, RestartPolicy

MODULE = """
from ostler.agents import Agent


class Fixer(Agent):
    class Inner(Agent):
        pass


class Stranger:
    pass
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".ostler" / "agents").mkdir(parents=True)
    (tmp_path / "made_by_a_test.py").write_text(MODULE)
    (tmp_path / "broken_by_a_test.py").write_text("raise SystemExit('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_by_a_test", raising=False)
    return tmp_path


def put(root: Path, name: str, driver: str) -> Path:
    path = root / ".ostler" / "agents" / f"{name}.md"
    path.write_text(f"---\nlifecycle:\n  driver: {driver}\n---\nGo.\n")
    return path


def make(registry: AgentRegistry, name: str) -> Agent:
    return registry.maker(registry.find(name).id)()


def test_every_definition_is_added_with_its_maker(root: Path) -> None:
    put(root, "by-class", "python:made_by_a_test:Fixer")
    put(root, "by-command", "{command: [cat, '{prompt_file}']}")
    put(root, "by-acp", "acp:claude")
    registry = AgentRegistry()
    found = register_files(registry, root)
    assert [manifest.name for manifest in registry.list()] == ["by-acp", "by-class", "by-command"]
    assert not found.faults
    assert "made_by_a_test" not in sys.modules
    assert type(make(registry, "by-class")).__qualname__ == "Fixer"
    with pytest.raises(InvalidOperationError, match="runs only at isolation level process"):
        make(registry, "by-command")
    with pytest.raises(AgentInitializationError, match="the ACP driver claude is not installed yet"):
        make(registry, "by-acp")
    assert registry.find("by-class").kind is AgentKind.PYTHON


def test_reading_again_takes_the_place_of_what_was_read_before(root: Path) -> None:
    registry = AgentRegistry()
    put(root, "a", "{command: one}")
    register_files(registry, root)
    put(root, "a", "{command: two}")
    assert not register_files(registry, root).faults
    command = registry.find("a").command
    assert command is not None
    assert command.argv == ("two",)


def test_a_name_that_code_has_taken_stays_with_the_code(root: Path) -> None:
    class Mine(Agent):
        def process(self, request: Any) -> Any:
            return request

    registry = AgentRegistry()
    registry.register(Mine, name="a")
    path = put(root, "a", "acp:x")
    put(root, "b", "acp:x")
    found = register_files(registry, root)
    assert isinstance(make(registry, "a"), Mine)
    assert [one.manifest.name for one in found.definitions] == ["b"]
    (fault,) = found.faults
    assert fault.message.startswith(f"{path}: the agent name a is taken by ")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_module_of_a_test:Fixer", "cannot be imported (ModuleNotFoundError: No module named"),
        ("made_by_a_test:Missing", "cannot be imported (AttributeError:"),
        ("broken_by_a_test:Fixer", "cannot be imported (SystemExit: no)"),
        ("made_by_a_test:Stranger", "made_by_a_test:Stranger is neither a subclass of ostler.Agent nor a function"),
    ],
)
def test_a_class_that_cannot_be_had_fails_the_start(root: Path, target: str, sentence: str) -> None:
    make = maker_for(load_agent_file(put(root, "a", f"python:{target}")).maker_source)
    with pytest.raises(AgentInitializationError) as caught:
        make()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("driver", ["python:made_by_a_test:Fixer.Inner", "{command: [cat]}", "acp:x"])
def test_a_maker_can_be_sent_to_another_process(root: Path, driver: str) -> None:
    make = maker_for(load_agent_file(put(root, "a", driver)).maker_source)
    assert pickle.loads(pickle.dumps(make)) == make  # noqa: S301 - our own bytes


def test_the_same_keys_on_a_class() -> None:
    @agent(name="x", lifecycle={"restart": "on-failure:2", "isolation": "worktree", "loop": {"gates": ("a", "b")}})
    class Marked(Agent):
        def process(self, request: Any) -> Any:
            return request

    manifest = AgentRegistry(read_lifecycle=read_lifecycle).register(Marked)
    assert manifest.defaults is not None
    assert manifest.defaults.restart_policy == RestartPolicy(max_retries=2)
    assert manifest.defaults.isolation_level is IsolationLevel.PROCESS
    assert manifest.extra == {"lifecycle": {"isolation": "worktree", "loop": {"gates": ["a", "b"]}}}


@pytest.mark.parametrize(
    ("lifecycle", "said"),
    [
        ({"restrat": 1}, "mod:A: lifecycle.restrat is not known; did you mean restart?"),
        ({"limits": {"memory": "1M"}}, "mod:A: lifecycle.limits.memory must be 64 to 8192 MB, was '1M'"),
        ({"driver": "acp:x"}, "mod:A: lifecycle.driver is not for a class, which runs itself"),
        ({"pty": True}, "mod:A: lifecycle.pty is only for a driver that is a command"),
    ],
)
def test_mistakes_on_a_class_are_said_too(lifecycle: dict[str, Any], said: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        read_lifecycle("mod:A", lifecycle)
    assert str(caught.value) == said
