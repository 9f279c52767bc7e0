"""What `import ostler` offers is there, and naming it costs no more than it must."""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ostler

#: The stub for type checkers has no such list.
EXPORTED: list[str] = vars(ostler)["__all__"]
CALLED = "import sys; sys.argv = ['ostler', '{}']\nfrom ostler.cli import main\ntry: main()\nexcept SystemExit: pass"
HEAVY = (
    "pydantic",
    "pydantic_core",
    "fastapi",
    "rich",
    "textual",
    "sqlite3",
    "psycopg",
    "prometheus_client",
    "ruamel",
    "asyncio",
)
#: What only a manager has use for, or takes long to load.
MANAGERS_OWN = frozenset(
    {"annotated_types", "email", "importlib.metadata", "ostler.policy", "ostler.store", "ostler.lifecycle"}
    | {f"ostler.model.{name}" for name in ("attempt", "audit", "events", "instance")}
    | {f"ostler.agents.{name}" for name in ("command", "registry")}
    | {f"ostler.isolation.{name}" for name in ("base", "in_process", "mailbox", "registry", "thread")}
)


def test_every_name_is_there_and_no_other() -> None:
    assert [name for name in EXPORTED if not hasattr(ostler, name)] == []
    assert set(EXPORTED) <= set(dir(ostler))
    with pytest.raises(AttributeError, match="no attribute 'AgentStates'"):
        getattr(ostler, "AgentStates")  # noqa: B009 - mypy would refuse the plain form, which is the point


def test_every_error_is_among_them() -> None:
    errors = importlib.import_module("ostler.errors")
    tree = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert tree - set(EXPORTED) == set()


def test_type_checkers_see_the_same_names() -> None:
    script = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "stub"))
    text = Path(ostler.__file__).with_suffix(".pyi").read_text()
    assert text == script["stub"](), "run scripts/stub"
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname for node in imports for alias in node.names}
    assert (names - {"open_manager"}) | {"open"} == set(EXPORTED)


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after running this."""
    script = f"{code}\nimport sys; sys.stderr.write(chr(10).join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    ["import ostler", "import ostler.cli", "import ostler; ostler.AgentState", CALLED.format("--help")],
    ids=["import ostler", "import ostler.cli", "names", "ostler --help"],
)
def test_naming_things_loads_nothing_heavy(code: str) -> None:
    heavy = {name.split(".")[0] for name in loaded_by(code)} & set(HEAVY)
    assert not heavy, f"`{code.splitlines()[0]}` also imports {', '.join(sorted(heavy))}; import it at its first use"


@pytest.mark.parametrize(
    "code",
    ["import ostler.agent_process.template", "import ostler; ostler.Agent, ostler.AgentContext, ostler.WaitAnswer"],
    ids=["template", "what an agent's module names"],
)
def test_the_process_of_an_agent_loads_only_what_agents_need(code: str) -> None:
    """The first spawn in a home waits for every line of it."""
    needless = loaded_by(code) & MANAGERS_OWN
    assert not needless, f"`{code}` also imports {', '.join(sorted(needless))}; import it from where it stands"


#: The names of the documents that Ostler was built after, in the packages where a reader looks for them.
SOURCE_NAMES = {
    "crews": "AgentFactory CrewPolicy Supervisor",
    "loop": "AgentLifecycleLoop ContextBuilder ContextSnapshot LoopResult LoopResultType",
    "simulation": "LifecycleManager LifecycleValidator PauseTracker",
    "tasks": "TaskOrchestrator TaskSettings TaskState",
}


@pytest.mark.parametrize("package", SOURCE_NAMES)
def test_names_are_in_their_package_and_in_ostler_itself(package: str) -> None:
    module = importlib.import_module(f"ostler.{package}")
    for name in SOURCE_NAMES[package].split():
        assert getattr(module, name) is getattr(ostler, name)
        assert name in dir(module)


@pytest.mark.parametrize("package", ["crews", "loop", "tasks"])
def test_naming_a_package_loads_none_of_its_modules(package: str) -> None:
    modules = loaded_by(f"import ostler.{package}")
    assert not [name for name in modules if name.startswith(f"ostler.{package}.")]
    assert not {name.split(".")[0] for name in modules} & set(HEAVY)
