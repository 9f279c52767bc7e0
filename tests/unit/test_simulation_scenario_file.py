"""Scenario files: everything they say, and every fault of them at once with its line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ostler.agent_process.import_source import Source, load, maker_of
from ostler.errors import DefinitionError, InvalidOperationError
from ostler.isolation.process.sources import source_of
from ostler.simulation import (
    AgentGroup,
    Managed,
    MergeEngine,
    OnFailure,
    OnIdle,
    SimulationRun,
    SimulationSettings,
    load_scenario,
    scenario_of_run,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

CODE = """\
from pydantic import BaseModel
from ostler import Agent

class Purse(BaseModel):
    wealth: int

class Trader:
    def __init__(self, greed=1):
        self.greed = greed
    def decide(self, view):
        return {}

class Market:
    def update(self, state, decisions, world):
        pass

class RemoteTrader(Agent):
    def process(self, request):
        return {}

def made(greed):
    return Trader(greed)
"""

SCENARIO = """\
name = "economy"
turns = 100
seed = 7
engine = "economy:Market"
state = "economy:Purse"

[settings]
max_agents = 50
decision_timeout = "500ms"
on_error = "remove"
on_idle = "wait"

[parameters]
tax = 0.1

[global_state]
treasury = 3

[brains]
trader = "economy:Trader"
remote = { agent = "economy:RemoteTrader", isolation = "thread" }
made = "economy:made"

[[agents]]
name = "trader"
kind = "trader"
count = 20
params = { greed = 2 }
state = { wealth = 10 }

[[agents]]
name = "far"
kind = "remote"
state = { wealth = 1 }
"""

SAME_IN_YAML = """\
name: economy
turns: 100
seed: 7
engine: economy:Market
state: economy:Purse
settings: {max_agents: 50, decision_timeout: 500ms, on_error: remove, on_idle: wait}
parameters: {tax: 0.1}
global_state: {treasury: 3}
brains:
  trader: economy:Trader
  remote: {agent: economy:RemoteTrader, isolation: thread}
  made: economy:made
agents:
  - {name: trader, kind: trader, count: 20, params: {greed: 2}, state: {wealth: 10}}
  - {name: far, kind: remote, state: {wealth: 1}}
"""


def forget_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in {"economy", "tools", "town"}:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a program of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget_modules()
    yield
    forget_modules()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "economy.py").write_text(CODE)
    return tmp_path


def written(folder: Path, text: str, name: str = "scenario.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def faults(path: Path, **more: Any) -> list[str]:
    with pytest.raises(DefinitionError) as caught:
        load_scenario(path, **more)
    return [one.message.removeprefix(f"{path}:") for one in caught.value.faults]


@pytest.mark.parametrize(("name", "text"), [("scenario.toml", SCENARIO), ("scenario.yml", SAME_IN_YAML)])
def test_a_file_says_all_of_a_scenario(folder: Path, name: str, text: str) -> None:
    found = load_scenario(written(folder, text, name))
    assert (found.name, found.turns) == ("economy", 100)
    assert found.settings == SimulationSettings(
        seed=7,
        parameters={"tax": 0.1},
        max_agents=50,
        decision_timeout=timedelta(milliseconds=500),
        on_error=OnFailure.REMOVE,
        on_idle=OnIdle.WAIT,
    )
    assert found.global_state == {"treasury": 3}
    assert found.agents == (
        AgentGroup(name="trader", kind="trader", count=20, params={"greed": 2}, initial_state={"wealth": 10}),
        AgentGroup(name="far", kind="remote", initial_state={"wealth": 1}),
    )
    assert found.schema is not None
    assert found.schema(wealth=4).model_dump() == {"wealth": 4}
    assert type(found.engine()).__name__ == "Market"
    assert found.brains.make("made", {"greed": 5}).greed == 5
    assert found.brains.make("remote", {"city": "Bern"}) == Managed(
        found.brains.make("remote", {}).definition, "thread", {"city": "Bern"}
    )
    assert found.brains.needs_manager
    assert found.checked().agents == found.agents


def test_little_is_needed(folder: Path) -> None:
    found = load_scenario(written(folder, 'name = "small"'))
    assert (found.settings, found.engine, found.schema) == (SimulationSettings(), MergeEngine, None)
    assert (found.turns, found.agents, found.brains.needs_manager) == (10, (), False)


def test_the_example_can_be_loaded() -> None:
    found = load_scenario(EXAMPLES / "economy" / "scenario.toml")
    assert found.agents
    assert found.schema is not None


# --- where it came from ------------------------------------------------------------------------------


def run_of(source: Any) -> SimulationRun:
    now = datetime.now(UTC)
    return SimulationRun(run_id=uuid4(), name="x", digest="", scenario=source, created_at=now, updated_at=now)


def test_what_was_kept_makes_the_same_scenario_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, SCENARIO)
    monkeypatch.chdir(folder)
    first = load_scenario("scenario.toml", overrides={"parameters.tax": 0.5})
    path = str(folder / "scenario.toml")
    assert first.source == {"path": path, "kind": "toml", "text": SCENARIO, "overrides": {"parameters.tax": 0.5}}
    (folder / "scenario.toml").unlink()
    again = scenario_of_run(run_of(first.source), overrides={"turns": 7})
    assert (again.settings, again.agents, again.turns) == (first.settings, first.agents, 7)
    assert again.schema is first.schema, "the code did not change"
    moved = written(folder, SAME_IN_YAML.replace("turns: 100", "turns: 90"), "moved.yaml")
    other = scenario_of_run(run_of(first.source), file=moved)
    assert (other.turns, other.settings.parameters) == (90, {"tax": 0.5})
    with pytest.raises(InvalidOperationError, match="was begun by a program"):
        scenario_of_run(run_of(None))


def test_a_run_that_has_a_history_may_have_a_cap_below_the_agents_of_its_file(folder: Path) -> None:
    source = load_scenario(written(folder, SCENARIO)).source
    assert scenario_of_run(run_of(source), overrides={"settings.max_agents": 2}).settings.max_agents == 2


# --- overrides ---------------------------------------------------------------------------------------


def test_overrides_take_the_place_of_what_is_written(folder: Path) -> None:
    given: dict[str, Any] = {
        "seed": 3,
        "turns": 5,
        "settings.max_agents": 30,
        "settings.decision_timeout": "2s",
        "parameters.tax": 0.3,
        "global_state.list": [1],
        "agents.0.count": 4,
    }
    found = load_scenario(written(folder, SCENARIO), overrides=given)
    given["global_state.list"].append(2)
    assert (found.settings.seed, found.turns, found.settings.max_agents) == (3, 5, 30)
    assert found.settings.decision_timeout == timedelta(seconds=2)
    assert (found.settings.parameters, found.global_state) == ({"tax": 0.3}, {"treasury": 3, "list": [1]})
    assert [group.count for group in found.agents] == [4, 1]


def test_a_wrong_override_is_not_blamed_on_a_line_of_the_file(folder: Path) -> None:
    given = {
        "seed": "much",
        "paramters.tax": 1,
        "parameters.tux": 1,
        "settings.max_agents": 0,
        "name.first": "x",
        "agents.7.count": 1,
    }
    assert sorted(faults(written(folder, SCENARIO), overrides=given)) == [
        "override: agents.7.count cannot be set: what it stands in has no such place",
        "override: name.first cannot be set: what it stands in has no such place",
        (
            "override: parameters.tux is not among the parameters; did you mean parameters.tax? If not, write it into "
            "the file first"
        ),
        "override: paramters is not a known field; did you mean parameters?",
        "override: seed must be a whole number, was 'much'",
        "override: settings.max_agents must be 1 to 2147483647, was 0",
    ]
    (sentence,) = faults(written(folder, SCENARIO), overrides={"parameters.tax": timedelta(1)})
    assert "overrides.parameters.tax must be a JSON value" in sentence


# --- mistakes ----------------------------------------------------------------------------------------


def test_every_fault_comes_at_once_with_its_line(folder: Path) -> None:
    text = """\
turns = 0
sead = 1
engine = "economy:Markt"
state = "economy:Trader"
parameters = 3

[settings]
max_agent = 5
decision_timeout = "soon"
on_error = "explode"
seed = 3

[brains]
trader = "economy:Trader"
purse = "economy:Purse"
remote = { agent = "economy:Trader", isolation = "cloud", city = "Bern" }
lost = "nowhere:Trader"
nobody = { isolation = "process" }
words = "economy"

[[agents]]
kind = "trader"
params = { zeal = 2 }

[[agents]]
name = "ghost"
kind = "spirit"
count = 2.5

[[agents]]
name = "lost"
kind = "lost"
state = 4
"""
    known = "lost, nobody, purse, remote, trader, words"
    assert faults(written(folder, text)) == [
        "1: name is required",
        "1: turns must be 1 to 2147483647, was 0",
        "2: sead is not a known field; did you mean seed?",
        "3: engine names economy:Markt, but there is no Markt in economy; did you mean Market?",
        "4: state must be a Pydantic model class, or None for plain dicts, was <class 'economy.Trader'>",
        "5: parameters must be a mapping, was 3",
        "8: settings.max_agent is not a known field; did you mean max_agents?",
        "9: settings.decision_timeout must be a duration such as 30s, was 'soon'",
        "10: settings.on_error must be one of pause, remove, keep, was 'explode'",
        "11: settings.seed must stand at the top of the file: seed = …",
        "15: brains.purse must name a class with a method `decide`; write one, was 'economy:Purse'",
        "16: brains.remote.isolation must be one of none, thread, process, was 'cloud'",
        "16: brains.remote.city is not a known field",
        "16: brains.remote.agent must name a subclass of ostler.Agent, was 'economy:Trader'",
        (
            f"17: brains.lost names nowhere:Trader, but there is no nowhere.py in {folder}, "
            "and no module nowhere is installed"
        ),
        "18: brains.nobody.agent is required",
        '19: brains.words names economy, but it must be written as "module:Name"',
        "21: agents.0.name is required",
        "23: agents.0.params do not fit the brain trader: got an unexpected keyword argument 'zeal'",
        f"27: agents.1.kind must be one of the brains ({known}), was 'spirit'",
        "28: agents.1.count must be a whole number, was 2.5",
        "33: agents.2.state must be a mapping, was 4",
    ]


def test_what_only_shows_together_is_told_too(folder: Path) -> None:
    text = SCENARIO.replace("wealth = 10", 'wealth = "much"').replace("wealth = 1 ", "poverty = 1 ")
    said = faults(written(folder, text))
    assert said[0].startswith("29: agents.0.state.wealth does not fit: input should be a valid integer")
    assert said[1] == "34: agents.1.state.wealth does not fit: field required"
    (sentence,) = faults(written(folder, SCENARIO.replace("count = 20", "count = 50")))
    assert "agents are 51, but there may be 50 at a time; raise settings.max_agents" in sentence
    (sentence,) = faults(written(folder, SCENARIO.replace("economy:Market", "economy:Trader")))
    assert "engine must be a class with a method `update`" in sentence


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("s.toml", "name = ", "1: this is not TOML"),
        ("s.yaml", "- a\n- b\n", "1: the file must be keys with values"),
        ("s.yaml", "name: a\n\tb: 1\n", "2: a tab stands where YAML wants spaces"),
        ("s.json", "{}", "is not taken for a scenario; give a file whose name ends in .toml, .yaml, .yml"),
    ],
)
def test_what_is_no_scenario_is_told_why(folder: Path, name: str, text: str, sentence: str) -> None:
    (said,) = faults(written(folder, text, name))
    assert sentence in said
    (said,) = faults(folder / "nothing.toml")
    assert "cannot be read" in said


# --- code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (economy.py, line 1)"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero (economy.py, line 2)"),
        ("x = 1\n\nclass", "SyntaxError: invalid syntax (economy.py, line 3)"),
        ("raise SystemExit(3)", "SystemExit: 3 (economy.py, line 1)"),
    ],
)
def test_code_that_fails_is_named_once_with_its_line(folder: Path, code: str, said: str) -> None:
    (folder / "economy.py").write_text(code)
    (sentence,) = faults(written(folder, SCENARIO))
    assert sentence == f"4: engine names economy:Market, but the module economy cannot be imported: {said}"


def test_a_module_of_the_same_name_beside_another_scenario_is_not_mistaken_for_it(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "economy.py").write_text(CODE)
        written(folder, SCENARIO)
    load_scenario(tmp_path / "1" / "scenario.toml")
    (sentence,) = faults(tmp_path / "2" / "scenario.toml")
    loaded = tmp_path / "1" / "economy.py"
    assert sentence == (
        f"4: engine names economy:Market, but this program has loaded economy from {loaded} before; load this scenario "
        "in another program"
    )


def test_code_may_import_what_stands_beside_it(folder: Path) -> None:
    (folder / "tools").mkdir()
    (folder / "tools" / "__init__.py").write_text("GREED = 9\n")
    (folder / "economy.py").write_text(f"import tools\n{CODE.replace('greed=1', 'greed=tools.GREED')}")
    assert load_scenario(written(folder, SCENARIO)).brains.make("trader", {}).greed == 9


def test_code_may_stand_in_a_package_beside_the_file_or_be_installed(tmp_path: Path) -> None:
    (tmp_path / "town" / "people").mkdir(parents=True)
    for place in ("town", "town/people"):
        (tmp_path / place / "__init__.py").write_text("")
    (tmp_path / "town" / "people" / "trader.py").write_text("class Trader:\n    def decide(self, view): ...\n")
    text = 'name = "x"\nengine = "ostler.simulation.view:MergeEngine"\n[brains]\nt = "town.people.trader:Trader"\n'
    found = load_scenario(written(tmp_path, text))
    assert found.engine is MergeEngine
    assert type(found.brains.make("t", {})).__name__ == "Trader"


def test_a_managed_class_is_found_again_by_another_process(folder: Path) -> None:
    text = SCENARIO.replace(', isolation = "thread"', "")
    managed = load_scenario(written(folder, text)).brains.make("remote", {})
    source = dict(source_of(managed.definition))
    sys.modules.pop(source["module"])
    again = maker_of(load(Source.read(source)), source["qualname"])
    assert again.__qualname__ == "RemoteTrader"
