"""What each package says it offers is what it offers; and naming it costs no more than it must."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ostler

CALLED = "import sys; sys.argv = ['ostler', '{}']\nfrom ostler.cli import main\ntry: main()\nexcept SystemExit: pass"
HEAVY = ("pydantic", "pydantic_core", "fastapi", "rich", "sqlite3", "psycopg", "prometheus_client", "ruamel")
#: What only the one who keeps agents has use for, or takes long to load.
MANAGERS_OWN = frozenset(
    {"annotated_types", "email", "importlib.metadata", "ostler.policy", "ostler.store", "ostler.lifecycle"}
    | {f"ostler.model.{name}" for name in ("audit", "events", "health", "instance", "ledger", "people", "spawn")}
    | {f"ostler.agents.{name}" for name in ("command", "factory", "manifest", "registry")}
    | {f"ostler.isolation.{name}" for name in ("base", "finding", "loopcell", "mailbox", "thread")}
)


def offering() -> list[str]:
    """Every package and module that declares `__all__`."""
    walked = pkgutil.walk_packages(ostler.__path__, prefix="ostler.")
    names = ["ostler", *(module.name for module in walked if not module.name.endswith("__main__"))]
    return [name for name in names if hasattr(importlib.import_module(name), "__all__")]


def kind_then_name(name: str) -> tuple[int, str]:
    """The order of ruff's RUF022: constants, then classes, then the rest."""
    if name.isupper():
        return 0, name
    return (1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("name", offering())
def test_all_is_true_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    missing = [one for one in module.__all__ if not hasattr(module, one)]
    assert not missing, f"{name} promises but does not have: {', '.join(missing)}"
    assert len(set(module.__all__)) == len(module.__all__), f"{name}.__all__ names something twice"
    assert module.__all__ == sorted(module.__all__, key=kind_then_name), f"{name}.__all__ is not sorted"


@pytest.mark.parametrize("package", ["model", "policy", "seams", "store", "store.commands", "testing", "cli"])
def test_every_room_declares_what_it_offers(package: str) -> None:
    assert importlib.import_module(f"ostler.{package}").__all__


def test_the_front_door_has_every_error() -> None:
    errors = importlib.import_module("ostler.errors")
    tree = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert tree <= set(ostler.__all__), f"not importable from ostler: {', '.join(tree - set(ostler.__all__))}"


def test_the_front_door_has_every_record() -> None:
    model = importlib.import_module("ostler.model")
    records = {name for name in model.__all__ if isinstance(getattr(model, name), type)}
    assert records <= set(ostler.__all__), f"not importable from ostler: {', '.join(records - set(ostler.__all__))}"


def test_the_front_door_tells_type_checkers_the_same_names() -> None:
    stub = ast.parse(Path(ostler.__file__).with_suffix(".pyi").read_text())
    told: list[str] = []
    for node in stub.body:
        match node:
            case ast.ImportFrom(names=names):  # only what is imported under its own name again is given on
                told += [one.asname for one in names if one.asname == one.name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                told.append(name)
    assert sorted(told) == sorted(ostler.__all__)


@pytest.mark.parametrize("name", ["agents", "isolation", "model"])
def test_a_room_that_loads_lazily_lists_and_refuses(name: str) -> None:
    code = (
        f"import ostler.{name} as room; assert set(room.__all__) <= set(dir(room)); assert not hasattr(room, 'Agents')"
    )
    loaded = {one for one in loaded_by(code) if one.startswith(f"ostler.{name}.")}
    assert not loaded, "to list them is not to load them"


@pytest.mark.parametrize("name", ["model.states", "agents.base", "isolation.base"])
def test_a_module_of_such_a_room_is_there_as_well(name: str) -> None:
    room, _, module = name.partition(".")
    assert f"ostler.{name}" in loaded_by(f"import ostler.{room}; ostler.{room}.{module}")


def test_the_front_door_lists_and_refuses() -> None:
    assert set(ostler.__all__) <= set(dir(ostler))
    with pytest.raises(AttributeError, match="no attribute 'AgentStates'"):
        getattr(ostler, "AgentStates")  # noqa: B009 - mypy would refuse the plain form, which is the point


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after running this."""
    script = f"{code}\nimport sys; sys.stderr.write(chr(10).join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def packages_loaded_by(code: str) -> set[str]:
    return {name.split(".")[0] for name in loaded_by(code)}


@pytest.mark.parametrize(
    "code",
    [
        "import ostler",
        "import ostler.cli",
        "import ostler; ostler.AgentState; ostler.InvalidOperationError; ostler.decide_restart",
        CALLED.format("--help"),
        CALLED.format("version"),
    ],
    ids=["import ostler", "import ostler.cli", "names", "ostler --help", "ostler version"],
)
def test_naming_things_loads_nothing_heavy(code: str) -> None:
    heavy = packages_loaded_by(code) & set(HEAVY)
    assert not heavy, f"`{code.splitlines()[0]}` also imports {', '.join(sorted(heavy))}; import it at its first use"


def test_the_weighing_itself_works() -> None:
    assert {"sqlite3", "ostler"} <= packages_loaded_by("import ostler; ostler.open_store")
    assert "ostler.model.events" in loaded_by("import ostler; ostler.AgentEvent")


@pytest.mark.parametrize(
    "code",
    ["import ostler.isolation.inside.template", "import ostler; ostler.Agent, ostler.AgentContext, ostler.WaitAnswer"],
    ids=["template", "what an agent's module names"],
)
def test_the_process_of_an_agent_loads_only_what_agents_need(code: str) -> None:
    """The first spawn in a home waits for every line of it."""
    needless = loaded_by(code) & MANAGERS_OWN
    assert not needless, f"`{code}` also imports {', '.join(sorted(needless))}; import it from where it stands"
