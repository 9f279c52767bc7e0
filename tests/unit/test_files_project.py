"""`ostler.toml`: the settings of a project, agents without a file of their own, and the schemas for editors."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from ostler.agents import AgentKind, CommandSpec
from ostler.definitions import (
    DaemonSettings,
    ProjectSettings,
    RetentionSettings,
    discover,
    json_schema,
    load_settings,
)
from ostler.definitions.project import _config_file, get_config
from ostler.drivers import options_of
from ostler.errors import DefinitionError
from ostler.model.spawn import RestartPolicy
from ostler.model.states import IsolationLevel

FULL = """\
[daemon]
listen = "127.0.0.1:7177"
on-wait = "notify-send 'an agent waits'"
on-failed = "notify-send failed"
on-idle = "poweroff"
notify = false
environment = ["PATH", "HOME"]
[retention]
finished = "14d"
events = "90d"
audit = "365d"
[agent.reviewer]
description = "Reads"
instructions = "Read."
driver = {command = ["reader", "{prompt}"]}
restart = "on-failure:2"
[agent.other.limits]
time = "1h"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ostler.toml"


def faults(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(DefinitionError) as caught:
        load_settings(path.parent)
    return [fault.message.removeprefix(f"{path}:") for fault in caught.value.faults]


def test_without_a_file_there_are_the_defaults(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == ProjectSettings(daemon=DaemonSettings(), retention=RetentionSettings(), agent={})


def test_a_full_project(path: Path) -> None:
    path.write_text(FULL)
    settings = load_settings(path.parent)
    assert settings.daemon == DaemonSettings(
        listen="127.0.0.1:7177",
        on_wait="notify-send 'an agent waits'",
        on_failed="notify-send failed",
        on_idle="poweroff",
        notify=False,
        environment=("PATH", "HOME"),
    )
    assert settings.retention == RetentionSettings(
        finished=timedelta(days=14), events=timedelta(days=90), audit=timedelta(days=365)
    )
    assert list(settings.agent) == ["reviewer", "other"]


def test_agents_without_a_file_have_the_same_keys(path: Path) -> None:
    path.write_text(FULL)
    reviewer, other = (one.manifest for one in discover(path.parent).definitions)
    assert (reviewer.name, reviewer.description, reviewer.prompt) == ("reviewer", "Reads", "Read.")
    assert reviewer.command == CommandSpec(argv=("reader", "{prompt}"))
    assert reviewer.source == str(path)
    assert reviewer.defaults is not None
    assert reviewer.defaults.restart_policy == RestartPolicy(max_retries=2)
    assert options_of(reviewer).isolation_level is IsolationLevel.PROCESS
    assert (other.kind, other.driver) == (AgentKind.COMMAND, "claude")
    assert other.defaults is not None
    assert options_of(other).isolation_level is IsolationLevel.PROCESS


def test_the_settings_are_found_upwards(tmp_path: Path, path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    path.write_text('[retention]\nfinished = "1h"\n')
    (tmp_path / "a" / "ostler.toml").mkdir()  # a folder of that name is none
    assert load_settings(deep).retention.finished == timedelta(hours=1)
    (deep / "ostler.toml").write_text("")
    assert load_settings(deep) == ProjectSettings()


def test_all_faults_come_at_once_with_their_lines(path: Path) -> None:
    text = """\
[deamon]
[daemon]
listen = "here"
on-wait = "say 'it"
environment = ["A=b"]
wait = 3
[retention]
finished = "14s"
events = "9999d"
audit = "1s"
[agent.one]
driver.command = [
  "a", # a remark
  "{foo}",
]
restart = {type = "linear", initial-delay = "20m"}
restrat = "no"
[agent.two.limits]
memory = "1M"
[agent." x"]
"""
    said = faults(path, text)
    assert said.pop(8).startswith("12: agent.one.driver.command.1 must use only {attempt}")
    assert said == [
        "1: deamon is not known; did you mean daemon?",
        "3: daemon.listen must be host:port, was here",
        '4: daemon.on-wait must be a command line that splits into words (no closing quotation), was "say \'it"',
        "5: daemon.environment must name variables by letters, digits and _, was 'A=b'",
        "6: daemon.wait is not known; did you mean on-wait?",
        "8: retention.finished must be at least 1m, was 14s",
        "9: retention.events must be at most 3650d, was 9999d",
        "10: retention.audit must be at least 1m, was 1s",
        "16: agent.one.restart.initial-delay must be at most 5m, was 20m",
        "17: agent.one.restrat is not known; did you mean restart?",
        "19: agent.two.limits.memory must be at least 64M, was 1M",
        "20: agent. x must not begin or end with a space, was ' x'",
    ]


def test_a_wrong_key_does_not_hide_that_a_required_one_is_there(path: Path) -> None:
    assert faults(path, '[crew.a]\nagent = "x"\ncount = -1\ntasks = "mine"\n') == [
        "3: crew.a.count must be at least 0, was -1",
        "4: crew.a.tasks must be `tag:NAME`, `agent:NAME` or `*`, was 'mine'",
    ]
    assert faults(path, "[crew.a]\ncount = 1\n") == ["1: crew.a.agent is required"]


@pytest.mark.parametrize("name", ["KEYS", "phases", "__pydantic_config__"])
def test_a_table_that_nothing_reads_is_a_fault(path: Path, name: str) -> None:
    assert faults(path, f"[{name}]\nx = 1\n") == [f"1: {name} is not known"]


def test_what_is_not_toml_has_a_line(path: Path) -> None:
    assert faults(path, "[daemon]\nlisten = \n") == ["2: this is not TOML: Invalid value"]


@pytest.mark.parametrize("text", ["agent = 3", "agent.x = 3", "daemon = []", "retention = 'x'"])
def test_a_value_where_a_table_belongs_is_a_fault(path: Path, text: str) -> None:
    (said,) = faults(path, text)
    assert "must be a mapping" in said


# --- for editors -------------------------------------------------------------------------------------


def test_the_schema_of_an_agent_has_the_keys_and_leaves_room_for_those_of_other_tools() -> None:
    schema = json_schema()
    assert "additionalProperties" not in schema
    lifecycle = schema["$defs"]["LifecycleKeys"]
    assert lifecycle["additionalProperties"] is False
    assert set(lifecycle["properties"]) == {
        *("driver", "isolation", "env", "limits", "restart", "healthcheck", "priority", "tags"),
        *("initialization-timeout", "fail-on-error", "may-add-tasks", "checks", "setup", "home"),
    }
    assert set(schema["$defs"]["LimitKeys"]["properties"]) == {
        *("memory", "cpu", "time", "tasks", "threads", "tokens-per-minute"),
    }
    assert json.loads(json.dumps(schema)) == schema


def test_the_schema_of_a_project_has_its_tables() -> None:
    schema = json_schema("project")
    assert set(schema["properties"]) == {"daemon", "retention", "tasks", "loop", "orchestrator", "crew", "agent"}
    assert "on-wait" in schema["$defs"]["DaemonSettings"]["properties"]
    assert "instructions" in schema["$defs"]["InlineAgent"]["properties"]


@pytest.mark.parametrize("code", ["import ostler.definitions", "import ostler; ostler.register_files"])
def test_naming_the_readers_loads_nothing_heavy(code: str) -> None:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"pydantic", "ruamel", "annotated_types", "sqlite3"} & {
        name.split(".")[0] for name in done.stdout.split()
    }


# --- the settings in force ---------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a home and good settings, which one program has read."""
    (tmp_path / ".ostler").mkdir()
    (tmp_path / "ostler.toml").write_text("[tasks]\nat-once = 3\n")
    assert get_config(tmp_path).tasks.at_once == 3
    return tmp_path


def test_a_broken_file_leaves_the_last_good_settings(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    (project / "ostler.toml").write_text("[tasks]\nat-once = much\n")
    assert get_config(project).tasks.at_once == 3
    assert "the last good settings stay in force: " in caplog.text
    assert "ostler.toml:2: this is not TOML" in caplog.text


def test_a_program_that_starts_while_the_file_is_broken_has_the_last_good_settings_too(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "ostler.toml").write_text("[tasks]\nat-once = much\n")
    another_program()
    assert get_config(project).tasks.at_once == 3
    assert "the last good settings stay in force: " in caplog.text
    (project / "ostler.toml").write_text("[tasks]\nat-once = 4\n")
    assert get_config(project).tasks.at_once == 4
    another_program()
    (project / "ostler.toml").write_text("[tasks\n")
    assert get_config(project).tasks.at_once == 4


def test_without_good_settings_a_broken_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / ".ostler").mkdir()
    (tmp_path / "ostler.toml").write_text("[tasks]\nat-once = much\n")
    with pytest.raises(DefinitionError, match=r"ostler\.toml:2: this is not TOML"):
        get_config(tmp_path)


def another_program() -> None:
    """It remembers nothing of what this one has read."""
    _config_file.cache_clear()
