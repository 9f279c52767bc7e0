from __future__ import annotations

import json
import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ostler import Agent
from ostler.errors import DefinitionError
from ostler.isolation.inside.finding_source import Source, load, maker_of
from ostler.isolation.process.sources import source_of
from ostler.model import IsolationLevel
from ostler.simulation.brains import Managed
from ostler.simulation.engine import MergeEngine
from ostler.simulation.scenario import AgentGroup
from ostler.simulation.scenariofile import load_scenario, load_scenario_text
from ostler.simulation.scenariokeys import SETTINGS
from ostler.simulation.settings import OnFailure, OnIdle, SimulationSettings

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

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
agents:
  - {name: trader, kind: trader, count: 20, params: {greed: 2}, state: {wealth: 10}}
  - {name: far, kind: remote, state: {wealth: 1}}
"""


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
    return [fault.message.removeprefix(f"{path}:") for fault in caught.value.faults]


@pytest.mark.parametrize(("name", "text"), [("scenario.toml", SCENARIO), ("scenario.yml", SAME_IN_YAML)])
def test_a_file_says_all_of_a_scenario(folder: Path, name: str, text: str) -> None:
    found = load_scenario(written(folder, text, name))

    assert (found.name, found.turns, found.seed) == ("economy", 100, 7)
    assert found.settings == SimulationSettings(
        max_agents=50,
        decision_timeout=timedelta(milliseconds=500),
        on_error=OnFailure.REMOVE,
        on_idle=OnIdle.WAIT,
    )
    assert isinstance(found.settings.on_error, OnFailure)
    assert found.parameters == {"tax": 0.1}
    assert found.global_state == {"treasury": 3}
    assert found.agents == (
        AgentGroup(name="trader", kind="trader", count=20, params={"greed": 2}, initial_state={"wealth": 10}),
        AgentGroup(name="far", kind="remote", initial_state={"wealth": 1}),
    )
    assert found.schema is not None
    assert found.schema(wealth=4).model_dump() == {"wealth": 4}
    assert type(found.engine()).__name__ == "Market"
    assert found.brains.make("trader", {"greed": 5}).greed == 5
    managed = found.brains.make("remote", {"city": "Bern"})
    assert isinstance(managed, Managed)
    assert managed.isolation is IsolationLevel.THREAD
    assert managed.context == {"city": "Bern"}
    assert found.validate()


def test_little_is_needed(folder: Path) -> None:
    found = load_scenario(written(folder, 'name = "small"'))

    assert found.settings == SimulationSettings()
    assert found.engine is MergeEngine
    assert found.schema is None
    assert (found.turns, found.agents) == (10, ())


def test_every_setting_can_be_written() -> None:
    elsewhere = {"seed", "parameters"}  # these two stand at the top
    assert {key.name for key in SETTINGS.keys} | elsewhere == {field.name for field in fields(SimulationSettings)}


@pytest.mark.parametrize("name", ["economy/scenario.toml", "rumour/scenario.yaml"])
def test_the_examples_can_be_loaded(name: str) -> None:
    found = load_scenario(EXAMPLES / name)

    assert found.agents
    assert found.schema is not None


# --- where it came from -------------------------------------------------------------------------------


def test_what_was_kept_makes_the_same_scenario_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, SCENARIO)
    monkeypatch.chdir(folder)
    first = load_scenario("scenario.toml", overrides={"parameters.tax": 0.5})
    assert first.source is not None
    kept = json.loads(json.dumps(dict(first.source)))
    assert kept == {
        "path": str(folder / "scenario.toml"),
        "kind": "toml",
        "text": SCENARIO,
        "overrides": {"parameters.tax": 0.5},
    }

    (folder / "scenario.toml").unlink()
    again = load_scenario_text(
        kept["text"],
        path_label=kept["path"],
        kind=kept["kind"],
        directory=Path(kept["path"]).parent,
        overrides=kept["overrides"],
    )

    assert again.source == first.source
    assert again.parameters == {"tax": 0.5}
    assert (again.agents, again.settings) == (first.agents, first.settings)
    assert again.schema is first.schema, "the code did not change"


# --- overrides ----------------------------------------------------------------------------------------


def test_overrides_take_the_place_of_what_is_written(folder: Path) -> None:
    given: dict[str, Any] = {
        "seed": 3,
        "turns": 5,
        "settings.max_agents": 30,
        "settings.concurrency": 2,
        "settings.decision_timeout": "2s",
        "parameters.tax": 0.3,
        "global_state.list": [1],
        "agents.0.count": 4,
    }
    found = load_scenario(written(folder, SCENARIO), overrides=given)
    given["global_state.list"].append(2)

    assert (found.seed, found.turns) == (3, 5)
    assert found.settings.max_agents == 30
    assert found.settings.concurrency == 2
    assert found.settings.decision_timeout == timedelta(seconds=2)
    assert found.parameters == {"tax": 0.3}
    assert found.global_state == {"treasury": 3, "list": [1]}
    assert [group.count for group in found.agents] == [4, 1]


def test_a_wrong_override_is_not_blamed_on_a_line_of_the_file(folder: Path) -> None:
    given = {"seed": "much", "paramters.tax": 1, "settings.max_agents": 0, "name.first": "x", "agents.7.count": 1}

    assert sorted(faults(written(folder, SCENARIO), overrides=given)) == [
        "override: agents.7.count cannot be set: what it stands in has no such place",
        "override: name.first cannot be set: what it stands in has no such place",
        "override: paramters is not known; did you mean parameters?",
        "override: seed must be a whole number such as 3, 500k or 2M, was 'much'",
        "override: settings.max_agents must be 1 to 2147483647, was 0",
    ]


def test_an_override_that_json_does_not_have_is_refused(folder: Path) -> None:
    (sentence,) = faults(written(folder, SCENARIO), overrides={"parameters.tax": timedelta(1)})
    assert "overrides.parameters.tax must be a JSON value" in sentence


# --- mistakes -----------------------------------------------------------------------------------------


def test_every_fault_comes_at_once_with_its_line(folder: Path) -> None:
    text = """\
turns = 0
sead = 1
engine = "economy:Markt"
state = "economy:Trader"
parameters = 3

[settings]
max_agent = 5
decision_timeout = 30
on_error = "explode"

[brains]
trader = "economy:Trader"
purse = "economy:Purse"
remote = { agent = "economy:Trader" }
lost = "nowhere:Trader"
nobody = { isolation = "process" }

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
    assert faults(written(folder, text)) == [
        "1: name is missing; a scenario has one",
        "1: turns must be a whole number from 1 to 2147483647, was 0",
        "2: sead is not known; did you mean seed?",
        "3: engine names economy:Markt, but there is no Markt in economy; did you mean Market?",
        "4: state must name a Pydantic model class, was 'economy:Trader'",
        "5: parameters must be keys with values; write some, or remove the key, was 3",
        "8: settings.max_agent is not known; did you mean max_agents?",
        "9: settings.decision_timeout must be a duration with its unit, such as 500ms, 20s, 45m, 1h30m or 3d, was 30",
        "10: settings.on_error must be one of pause, remove, keep, was 'explode'",
        "14: brains.purse names economy:Purse, which has no method `decide`; write one",
        "15: brains.remote.agent must name a subclass of ostler.Agent, was 'economy:Trader'",
        (
            f"16: brains.lost names nowhere:Trader, but there is no nowhere.py in {folder}, "
            "and no module nowhere is installed"
        ),
        '17: brains.nobody must name its class: agent = "module:Class"',
        "19: agents.0.name is missing; every entry of agents has one",
        "21: agents.0.params do not fit the brain trader: got an unexpected keyword argument 'zeal'",
        "25: agents.1.kind must be one of the brains (lost, nobody, purse, remote, trader), was 'spirit'",
        "26: agents.1.count must be a whole number such as 3, 500k or 2M, was 2.5",
        "31: agents.2.state must be keys with values; write some, or remove the key, was 4",
    ]


def test_a_first_state_must_fit_the_model(folder: Path) -> None:
    text = SCENARIO.replace("wealth = 10", 'wealth = "much"').replace("wealth = 1 ", "poverty = 1 ")
    assert faults(written(folder, text)) == [
        (
            "28: agents.0.state.wealth does not fit: input should be a valid integer, unable to parse string as an "
            "integer, was 'much'"
        ),
        "33: agents.1.state.wealth does not fit: field required",
    ]


def test_more_agents_than_there_may_be(folder: Path) -> None:
    text = SCENARIO.replace("count = 20", "count = 50")
    (sentence,) = faults(written(folder, text))
    assert "agents are 51, but there may be 50 at a time; raise settings.max_agents" in sentence


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("s.toml", "name = ", "1: this is not TOML"),
        ("s.yaml", "- a\n- b\n", "1: the file must be keys with values"),
        ("s.yaml", "name: a\n\tb: 1\n", "2: a tab stands where YAML wants spaces"),
        ("s.json", "{}", "is not taken for a scenario; give a file whose name ends in .toml, .yaml, .yml"),
        ("s.toml", 'name = "a"\nagents = 3\n', "2: agents must be a list; in TOML each entry begins with [[agents]]"),
        ("s.toml", 'name = "a"\nagents = [3]\n', "2: agents.0 must be keys with values, was 3"),
        ("s.toml", 'name = "a"\nengine = "economy"\n', "2: engine must be a class such as my.module:Fixer"),
        ("s.toml", 'name = "a"\n[parameters]\nx = inf\n', "3: parameters.x must be a finite number"),
    ],
)
def test_what_is_no_scenario_is_told_why(folder: Path, name: str, text: str, sentence: str) -> None:
    assert any(sentence in one for one in faults(written(folder, text, name)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="No such file"):
        load_scenario(tmp_path / "none.toml")


# --- the code -----------------------------------------------------------------------------------------

ONE = 'name = "one"\nengine = "model:Rules"\n[brains]\na = "model:Rules"\n'


def loaded_by_us() -> set[str]:
    return {name for name in sys.modules if name.startswith("ostler_scenario_") or name == "model"}


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "def f():\n    return 1 / 0\n\nf()\n",
            (
                "2: engine names model:Rules, but the module model cannot be imported: "
                "ZeroDivisionError: division by zero (model.py, line 2)"
            ),
        ),
        ("x = 1\ndef (\n", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (model.py, line 2)"),
        ("import no_such_thing\n", "No module named 'no_such_thing' (model.py, line 1)"),
    ],
)
def test_code_that_fails_is_named_once_with_its_line(tmp_path: Path, code: str, sentence: str) -> None:
    (tmp_path / "model.py").write_text(code)

    before = loaded_by_us()

    (found,) = faults(written(tmp_path, ONE))

    assert sentence in found
    assert loaded_by_us() == before


def test_scenarios_have_modules_of_the_same_name_each_with_its_neighbours(tmp_path: Path) -> None:
    path, before = list(sys.path), loaded_by_us()
    loaded = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "prices.py").write_text(f"PRICE = {number}\n")
        (folder / "model.py").write_text("from prices import PRICE\nclass Rules:\n    def update(self, *a): ...\n")
        loaded.append(load_scenario(written(folder, 'name = "one"\nengine = "model:Rules"')))

    first, second = (sys.modules[one.engine.__module__] for one in loaded)

    assert (first.PRICE, second.PRICE) == (1, 2)
    assert sys.path == path
    assert "prices" not in sys.modules
    assert len(loaded_by_us() - before) == 2


def test_all_names_of_one_file_mean_one_module_and_an_edit_is_seen(folder: Path) -> None:
    path = written(folder, SCENARIO)
    first = load_scenario(path)
    assert first.schema is not None
    assert first.schema.__module__ == type(first.brains.make("trader", {})).__module__

    (folder / "economy.py").write_text(CODE.replace("wealth: int", "wealth: str"))
    second = load_scenario(path, overrides={"agents.0.state.wealth": "x", "agents.1.state.wealth": "y"})

    assert second.schema is not None
    assert second.schema(wealth="x").model_dump() == {"wealth": "x"}
    assert first.schema(wealth=1).model_dump() == {"wealth": 1}


def test_a_module_that_the_program_imports_itself_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "shared_by_both.py").write_text("class Rules:\n    def update(self, *a): ...\n")
    monkeypatch.syspath_prepend(folder)
    found = load_scenario(written(folder, 'name = "one"\nengine = "shared_by_both:Rules"'))

    held = sys.modules["shared_by_both"]
    monkeypatch.delitem(sys.modules, "shared_by_both")
    assert found.engine is held.Rules


def test_code_may_be_installed_or_stand_in_a_package_beside(tmp_path: Path) -> None:
    package = tmp_path / "parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rules.py").write_text("from . import more\nclass Rules:\n    price = more.PRICE\n    update = print\n")
    (package / "more.py").write_text("PRICE = 4\n")
    found = load_scenario(written(tmp_path, 'name = "one"\nengine = "parts.rules:Rules"'))
    plain = load_scenario(written(tmp_path, 'name = "one"\nengine = "ostler.simulation.engine:MergeEngine"'))

    assert found.engine.price == 4  # type: ignore[attr-defined]  # it is Rules
    assert plain.engine is MergeEngine


def test_a_managed_class_is_found_again_by_another_process(folder: Path) -> None:
    text = SCENARIO.replace('isolation = "thread"', 'isolation = "process"')
    scenario = load_scenario(written(folder, text))
    definition = scenario.brains.make("remote", {}).definition
    assert isinstance(definition, type)
    assert issubclass(definition, Agent)

    source = source_of(definition)
    held = sys.modules.pop(str(source["module"]))
    try:  # as a process does that never saw this module
        again = maker_of(load(Source.read(source)), str(source["qualname"]))
    finally:
        sys.modules[str(source["module"])] = held

    assert source["path"] == str(folder / "economy.py")
    assert getattr(again, "__qualname__", "") == "RemoteTrader"
    assert again is not definition


def test_a_managed_class_of_a_neighbour_is_to_be_named_where_it_stands(folder: Path) -> None:
    (folder / "front.py").write_text("from economy import RemoteTrader\n")
    text = 'name = "one"\n[brains]\nfar = { agent = "front:RemoteTrader" }\n'

    (sentence,) = faults(written(folder, text))

    assert "brains.far.agent stands in another module; name it there: economy:RemoteTrader" in sentence
