from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ostler.agents.files import (
    DriverKind,
    Project,
    ProjectDriver,
    ProjectLimits,
    ProjectRetention,
    ProjectRun,
    find_project,
    load_project_file,
)
from ostler.errors import DefinitionError
from ostler.model import IsolationLevel, RestartPolicy

FULL = """\
[project]
default-isolation = "worktree"
base = "main"
[limits]
agents = 8
cost-per-day = 40.0
[retention]
finished = "14d"
workdirs = "3d"
[driver.codex]
acp = ["npx", "-y", "codex-acp"]
env = ["KEY"]
[run.web-review]
agent = "reviewer"
tasks = "github:label=review"
[agent.reviewer]
description = "Reads"
instructions = "Read."
driver = {command = ["reader", "{prompt}"]}
restart = "on-failure:2"
isolation = "thread"
[agent.other.loop]
timeout = "1h"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ostler.toml"


def faults(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(DefinitionError) as caught:
        load_project_file(path)
    return [fault.message.removeprefix(f"{path}:") for fault in caught.value.faults]


def test_a_full_project(path: Path) -> None:
    path.write_text(FULL)
    project = load_project_file(path)
    assert project.evolve(agents=()) == Project(
        path=str(path),
        default_isolation="worktree",
        base="main",
        limits=ProjectLimits(agents=8, cost_per_day=40.0),
        retention=ProjectRetention(finished=timedelta(days=14), workdirs=timedelta(days=3)),
        drivers={"codex": ProjectDriver(acp=("npx", "-y", "codex-acp"), env=("KEY",))},
        runs={"web-review": ProjectRun(agent="reviewer", tasks="github:label=review")},
    )
    assert Project.from_json(project.to_json()) == project


def test_agents_without_a_file_have_the_same_keys(path: Path) -> None:
    path.write_text(FULL)
    reviewer, other = load_project_file(path).agents
    assert (reviewer.manifest.name, reviewer.manifest.description) == ("reviewer", "Reads")
    assert (reviewer.manifest.prompt, reviewer.maker_source.kind) == ("Read.", DriverKind.COMMAND)
    assert reviewer.manifest.defaults is not None
    assert reviewer.manifest.defaults.restart_policy == RestartPolicy(max_retries=2)
    assert reviewer.manifest.defaults.isolation_level is IsolationLevel.THREAD
    assert reviewer.manifest.source == str(path)
    assert other.manifest.extra == {"lifecycle": {"loop": {"timeout": 3600.0}, "isolation": "worktree"}}
    assert other.manifest.defaults is not None
    assert other.manifest.defaults.isolation_level is IsolationLevel.PROCESS


def test_an_empty_project_is_one(path: Path) -> None:
    path.write_text("")
    assert load_project_file(path) == Project(path=str(path))


def test_all_faults_come_at_once_with_their_lines(path: Path) -> None:
    text = """\
[projct]
[limits]
agents = 0
cost-per-day = "much"
[retention]
finished = "14"
workdirs = "9999d"
[agent.one]
driver.command = [
  "a", # a remark
  "{foo}",
]
restart = {policy = "always", delay = "20m"}
[agent.two.limits]
memory = "1M"
[agent." x"]
[driver.x]
acp = ["a"]
command = ["b"]
[driver.y]
[run.x]
"""
    said = faults(path, text)
    assert said[0] == "1: projct is not known; did you mean project?"
    assert said[1] == "3: limits.agents must be 1 to 10000, was 0"
    assert said[2] == "4: limits.cost-per-day must be an amount such as 5.00, was 'much'"
    assert said[3].startswith("6: retention.finished must be a duration with its unit")
    assert said[4] == "7: retention.workdirs must be 0 s to 87600 h, was '9999d'"
    assert said[5].startswith("11: agent.one.driver.command.1 must use only {attempt}")
    assert said[6:] == [
        "13: agent.one.restart.delay must be 0 s to 5 min, was '20m'",
        "15: agent.two.limits.memory must be 64 to 8192 MB, was '1M'",
        "16: agent. x must not begin or end with a space, was ' x'",
        "17: driver.x must have exactly one of acp, command, has ['acp', 'command']",
        "20: driver.y must have exactly one of acp, command",
        "21: run.x must name its agent",
    ]


def test_what_is_not_toml_has_a_line(path: Path) -> None:
    assert faults(path, "[limits]\nagents = \n") == ["2: this is not TOML: Invalid value"]


@pytest.mark.parametrize("text", ["agent = 3", "agent.x = 3", "run = []", "limits = 'x'"])
def test_a_value_where_keys_belong_is_a_fault(path: Path, text: str) -> None:
    assert len(faults(path, text)) == 1


def test_the_project_is_found_upwards(tmp_path: Path, path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_project(deep) is None
    path.write_text("")
    assert find_project(deep) == find_project(tmp_path) == path
    (tmp_path / "a" / "ostler.toml").mkdir()  # a folder of that name is none
    assert find_project(deep) == path
