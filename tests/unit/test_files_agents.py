"""One agent from one file: what it becomes, and every fault with its line."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostler import drivers
from ostler.agents import Agent, AgentKind, AgentRegistry, CommandSpec, ExitMeaning, PromptBy, agent, definition_id
from ostler.agents.base import PythonMaker
from ostler.agents.command import CommandMaker
from ostler.agents.commandspec import HomeKind
from ostler.agents.registry import MAX_DESCRIPTION, AgentManifest
from ostler.definitions import LoadedDefinition, load_agent_file, read_lifecycle
from ostler.definitions.load import MAX_BYTES, MAX_FAULTS
from ostler.errors import DefinitionError
from ostler.model.spawn import AgentSpawnOptions, HealthCheckConfig, ResourceLimits, RestartPolicy
from ostler.model.states import AgentPriority, IsolationLevel, ProbeType, RestartPolicyType

FULL = """\
---
name: fixer
description: Fixes one failing test at a time
model: sonnet
tools: Read, Edit, Bash
hooks: {Stop: [{matcher: x}]}
lifecycle:
  driver: python:my.mod:Fixer
  isolation: process
  env: [ANTHROPIC_API_KEY]
  limits: {memory: 2G, cpu: 1.5, time: 45m, tokens-per-minute: 2000, tasks: 2, threads: 3}
  restart: on-failure:3
  healthcheck: {interval: 30s, timeout: 4s, retries: 4, successes: 1, start-period: 20s}
  priority: high
  tags: [web, api]
  initialization-timeout: 2m
  fail-on-error: true
  may-add-tasks: false
  checks: [ruff check ., pytest -q]
  home: private
---

Fix {{ task.title }}.
"""

Load = Callable[..., LoadedDefinition]
Faults = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loading(text: str | bytes, name: str = "a.md") -> LoadedDefinition:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_agent_file(path)

    return loading


@pytest.fixture
def faults(load: Load, tmp_path: Path) -> Faults:
    """The sentences about a file, without the folder."""

    def failing(text: str | bytes, name: str = "a.md") -> list[str]:
        with pytest.raises(DefinitionError) as caught:
            load(text, name)
        return [fault.message.replace(f"{tmp_path}/", "") for fault in caught.value.faults]

    return failing


def lifecycle(*lines: str) -> str:
    return "\n".join(["---", "lifecycle:", *(f"  {line}" for line in lines), "---", "Go."])


def options_of(found: LoadedDefinition) -> AgentSpawnOptions:
    assert found.manifest.defaults is not None
    return found.manifest.defaults


# --- what a file becomes -----------------------------------------------------------------------------


def test_a_full_file_becomes_a_manifest(load: Load, tmp_path: Path) -> None:
    found = load(FULL)
    assert found.manifest == AgentManifest(
        id=definition_id(AgentKind.PYTHON, "fixer"),
        name="fixer",
        kind=AgentKind.PYTHON,
        description="Fixes one failing test at a time",
        source=str(tmp_path / "a.md"),
        driver="python:my.mod:Fixer",
        env={"ANTHROPIC_API_KEY": None},
        checks=("ruff check .", "pytest -q"),
        home=HomeKind.PRIVATE,
        fail_on_error=True,
        may_add_tasks=False,
        prompt="Fix {{ task.title }}.",
        extra={"model": "sonnet", "tools": "Read, Edit, Bash", "hooks": {"Stop": [{"matcher": "x"}]}},
        defaults=AgentSpawnOptions(
            initialization_timeout=timedelta(minutes=2),
            isolation_level=IsolationLevel.PROCESS,
            resource_limits=ResourceLimits(
                max_memory_mb=2048,
                max_cpu_percent=150,
                execution_timeout=timedelta(minutes=45),
                max_tokens_per_minute=2000,
                max_concurrent_tasks=2,
                max_worker_threads=3,
            ),
            restart_policy=RestartPolicy(max_retries=3),
            health_check=HealthCheckConfig(
                interval=timedelta(seconds=30),
                timeout=timedelta(seconds=4),
                failure_threshold=4,
                success_threshold=1,
                start_period=timedelta(seconds=20),
            ),
            priority=AgentPriority.HIGH,
            tags=("web", "api"),
        ),
    )
    assert found.maker == PythonMaker("my.mod:Fixer")
    assert AgentManifest.from_json(found.manifest.to_json()) == found.manifest


def test_a_spawn_overrules_a_definition_field_by_field(load: Load) -> None:
    options = options_of(load(lifecycle("driver: python:a:B", "limits: {memory: 2G, time: 1h}", "tags: [web]")))
    assert options.fields_set == {"resource_limits", "tags"}
    assert options.resource_limits is not None
    assert options.resource_limits.fields_set == {"max_memory_mb", "execution_timeout"}
    spawned = AgentSpawnOptions(resource_limits=ResourceLimits(execution_timeout=timedelta(minutes=1))).over(options)
    assert spawned.resource_limits == ResourceLimits(max_memory_mb=2048, execution_timeout=timedelta(minutes=1))
    assert spawned.tags == ("web",)


def test_a_body_alone_is_an_agent_with_the_name_of_its_file(load: Load) -> None:
    found = load("Fix what is broken.\n\n---\nA rule is no front matter.", "night-watch.md").manifest
    assert (found.name, found.driver, found.extra) == ("night-watch", "claude", None)
    assert found.prompt == "Fix what is broken.\n\n---\nA rule is no front matter."


def test_a_front_matter_alone_is_an_agent(load: Load) -> None:
    assert load("---\nname: a\n---\n").manifest.prompt is None
    assert load("---\n---\nGo.").manifest.prompt == "Go."


def test_windows_lines_and_a_byte_order_mark_are_no_matter(load: Load) -> None:
    found = load(b"\xef\xbb\xbf---\r\nname: b\r\nlifecycle:\r\n  restart: no\r\n---\r\nOne.\r\nTwo.\r\n")
    assert (found.manifest.name, found.manifest.prompt) == ("b", "One.\nTwo.")


def test_a_long_description_is_cut_short_instead_of_refused(load: Load) -> None:
    description = load(f"---\ndescription: {'x' * 3000}\n---\n").manifest.description
    assert description is not None
    assert len(description) == MAX_DESCRIPTION
    assert description.endswith("…")


@pytest.mark.parametrize("line", ["driver: {command: [aider, --yes]}", "driver: 'command: aider --yes'"])
def test_a_command_runs_at_level_process(load: Load, line: str) -> None:
    found = load(lifecycle(line))
    assert found.manifest.command == CommandSpec(argv=("aider", "--yes"))
    assert (found.manifest.kind, found.manifest.driver) == (AgentKind.COMMAND, None)
    assert found.maker == CommandMaker("aider")
    assert drivers.options_of(found.manifest).isolation_level is IsolationLevel.PROCESS


def test_a_command_says_how_it_takes_prompts_and_what_its_exit_codes_mean(load: Load) -> None:
    found = load(lifecycle("driver: {command: [a], prompt: stdin, exit-codes: {0: done, 75: retry}, pty: true}"))
    codes = {"0": ExitMeaning.DONE, "75": ExitMeaning.RETRY}
    assert found.manifest.command == CommandSpec(argv=("a",), prompt_by=PromptBy.STDIN, exit_codes=codes, pty=True)


@pytest.mark.parametrize("line", ["driver: python:my.mod:Fixer.Inner", "driver: {python: my.mod:Fixer.Inner}"])
def test_a_python_driver_is_only_a_name(load: Load, line: str) -> None:
    found = load(lifecycle(line))
    assert (found.manifest.kind, found.manifest.driver) == (AgentKind.PYTHON, "python:my.mod:Fixer.Inner")
    assert found.maker == PythonMaker("my.mod:Fixer.Inner")


@pytest.mark.parametrize("line", ["driver: codex", "driver: {name: codex}"])
def test_a_plain_word_is_the_name_of_a_driver(load: Load, line: str) -> None:
    found = load(lifecycle(line))
    assert (found.manifest.kind, found.manifest.driver) == (AgentKind.COMMAND, "codex")


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("env: [A, B]", {"A": None, "B": None}),
        ("env: {A: x, B: 8080, C: }", {"A": "x", "B": "8080", "C": None}),
        ("env: []", {}),
    ],
)
def test_env_is_names_to_pass_on_or_names_with_values(load: Load, line: str, env: dict[str, str | None]) -> None:
    for driver in ("{command: [a]}", "python:a:B", "claude"):
        assert load(lifecycle(f"driver: {driver}", line)).manifest.env == env


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        *((f"restart: {word}", RestartPolicy.none()) for word in ("no", '"no"', "false", "never", "{type: no}")),
        ("restart: immediate", RestartPolicy.immediate()),
        ("restart: {type: immediate}", RestartPolicy.immediate()),
        ("restart: on-failure", RestartPolicy()),
        ("restart: on-failure:7", RestartPolicy(max_retries=7)),
        ("restart: {max-retries: 2}", RestartPolicy(max_retries=2)),
        ("restart: {type: on-failure, max-retries: 2}", RestartPolicy(max_retries=2)),
        (
            "restart: {type: linear, initial-delay: 5s, max-delay: 2m, backoff-multiplier: 3, use-jitter: false}",
            RestartPolicy(
                type=RestartPolicyType.LINEAR,
                initial_delay=timedelta(seconds=5),
                max_delay=timedelta(minutes=2),
                backoff_multiplier=3.0,
                use_jitter=False,
            ),
        ),
        (
            "restart: {circuit-breaker-timeout: 1h, burst-limit: 4, burst-window: 90s, lifetime-limit: 7}",
            RestartPolicy(
                circuit_breaker_timeout=timedelta(hours=1),
                burst_limit=4,
                burst_window=timedelta(seconds=90),
                lifetime_limit=7,
            ),
        ),
    ],
)
def test_restart_in_all_its_spellings(load: Load, line: str, policy: RestartPolicy) -> None:
    assert options_of(load(lifecycle(line))).restart_policy == policy


def test_a_probe_with_its_target(load: Load) -> None:
    found = load(lifecycle("healthcheck: {probe: tcp, target: 'localhost:80', interval: 9}"))
    expected = HealthCheckConfig(probe=ProbeType.TCP, target="localhost:80", interval=timedelta(seconds=9))
    assert options_of(found).health_check == expected


@pytest.mark.parametrize(("written", "percent"), [("2", 200), ("0.333", 33), ("50%", 50), ("150 %", 150), ("0", 0)])
def test_cpu_is_a_number_of_cores_or_a_percentage_of_one(load: Load, written: str, percent: int) -> None:
    limits = options_of(load(lifecycle(f"limits: {{cpu: {written}}}"))).resource_limits
    assert limits == ResourceLimits(max_cpu_percent=percent)


def test_a_file_of_claude_code_is_accepted_as_it_is(load: Load) -> None:
    found = load(
        "---\nname: reviewer\ndescription: Use when: code changed. Examples: <example>it's red</example>\n"
        "tools: [Read, Grep]\npermissionMode: plan\nisolation: worktree\nmcpServers:\n  - slack\n---\nRead it."
    ).manifest
    assert (found.name, found.driver, found.prompt) == ("reviewer", "claude", "Read it.")
    assert found.extra is not None
    assert found.extra["isolation"] == "worktree"


def test_a_file_of_codex_is_accepted_as_it_is(load: Load) -> None:
    found = load(
        'name = "scout"\ndescription = "Looks"\nmodel = "o"\nsandbox_mode = "read-only"\n'
        'developer_instructions = """\nLook.\n"""\n[lifecycle]\nrestart = "no"\n',
        "x.toml",
    ).manifest
    assert (found.name, found.description, found.prompt, found.driver) == ("scout", "Looks", "Look.", "codex")
    assert found.extra == {"model": "o", "sandbox_mode": "read-only"}


# --- what is wrong with a file -----------------------------------------------------------------------


def test_all_faults_come_at_once_each_with_its_line_and_the_key_as_written(faults: Faults) -> None:
    assert faults(
        lifecycle(
            "restrat: always",
            "memory: 2G",
            "isolation: worktree",
            "limits:",
            "  memory: 12M",
            "  time: 20d",
            "  cpu: many",
            "  threads: 33",
            "restart: on-failure:30",
            "healthcheck: {probe: http, interval: 0.5s}",
            "initialization_timeout: 3s",
            "checks:",
            "tags: [ok, not ok]",
            "env: [A=b]",
            "loop: {max-iterations: 50}",
            "limits: {}",
        ).replace("---\nlifecycle", "---\nx: [1, .inf]\nlifecycle", 1)
    ) == [
        "a.md:2: x.1 must be a finite number, was inf",
        "a.md:4: lifecycle.restrat is not known; did you mean restart?",
        "a.md:5: lifecycle.memory is not known; did you mean limits.memory?",
        "a.md:6: lifecycle.isolation must be one of none, thread, process, was worktree",
        "a.md:8: lifecycle.limits.memory must be at least 64M, was 12M",
        "a.md:9: lifecycle.limits.time must be at most 7d, was 20d",
        "a.md:10: lifecycle.limits.cpu must be a number of cores such as 1.5, or a percentage such as 50%, was many",
        "a.md:11: lifecycle.limits.threads must be at most 32, was 33",
        "a.md:12: lifecycle.restart.max-retries must be at most 10, was 30",
        "a.md:13: lifecycle.healthcheck.interval must be at least 1s, was 0.5s",
        "a.md:13: lifecycle.healthcheck.target is required for a http probe",
        "a.md:14: lifecycle.initialization_timeout is not known; did you mean initialization-timeout?",
        "a.md:15: lifecycle.checks has no value; write one, or remove the key",
        "a.md:16: lifecycle.tags.1 must be 1 to 50 letters, digits and hyphens, was 'not ok'",
        "a.md:17: lifecycle.env must name variables by letters, digits and _, was 'A=b'",
        "a.md:18: lifecycle.loop is not known",
        "a.md:19: lifecycle.limits stands already on line 7",
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "driver: acp:claude",
            "lifecycle.driver must be the name of a driver, python:module:Class, or {command: [...]}",
        ),
        ("driver: {}", "lifecycle.driver must have exactly one of command, python, name"),
        ("driver: {name: a, python: 'b:C'}", "lifecycle.driver must have exactly one of command, python, name"),
        ("driver: {acp: a}", "lifecycle.driver.acp is not known"),
        ("driver: {command: [a, '{promt}']}", "lifecycle.driver.command.1 must use only {attempt},"),
        ("driver: 'command: a {promt}'", "lifecycle.driver.command.1 must use only {attempt},"),
        ("driver: {command: [a, '{']}", "lifecycle.driver.command.1 must have its braces in pairs"),
        ("driver: {command: []}", "lifecycle.driver.command must begin with a program"),
        ('driver: {command: "a \'b"}', "lifecycle.driver.command must be a command line that splits into words"),
        ("driver: python:nowhere", "lifecycle.driver.python must be a class such as my.mod:Fixer, was nowhere"),
        ("driver: {name: claude, pty: true}", "lifecycle.driver must be a command to have the keys prompt, exit-codes"),
        ("driver: {command: a, prompt: pigeon}", "driver.prompt must be one of file, stdin, argument, was pigeon"),
        ("driver: {command: a, exit-codes: {256: done}}", "driver.exit-codes must have exit codes of 0 to 255 as keys"),
        (
            "driver: {command: a, exit-codes: {1: no}}",
            "driver.exit-codes.1 must be one of done, failed, retry, blocked",
        ),
        ("driver: {command: a, exit-codes: [1]}", "lifecycle.driver.exit-codes must be a mapping, was [1]"),
        ("pty: true", "lifecycle.pty is not known; did you mean driver.pty?"),
        ("env: A", "lifecycle.env must be a list of names, or names with values, was A"),
        ("env: {A: true}", "lifecycle.env.A must be text, was true"),
        ("env: [OSTLER_X]", "lifecycle.env must not name variables that begin with OSTLER_"),
        ("healthcheck: {probe: http}", "lifecycle.healthcheck.target is required for a http probe"),
        ("healthcheck: {interval: 2s}", "lifecycle.healthcheck.timeout must be at most the interval (2 s), was 3 s"),
        ("healthcheck: {interval: soon}", "lifecycle.healthcheck.interval must be a duration such as 30s, was soon"),
        ("healthcheck: {retries: x}", "lifecycle.healthcheck.retries must be a whole number, was x"),
        ("healthcheck: {heartbeat: 30s}", "lifecycle.healthcheck.heartbeat is not known"),
        ("restart: {initial-delay: 4m}", "restart.max-delay must be at least initial-delay (4 min), was 1 min"),
        ("restart: {max_retries: 4}", "lifecycle.restart.max_retries is not known; did you mean max-retries?"),
        ("restart: {type: sometimes}", "lifecycle.restart must be a restart policy, or one of none, immediate,"),
        ("restart: always", "lifecycle.restart must be a restart policy, or one of none, immediate, linear,"),
        ("restart: [1]", "lifecycle.restart must be a mapping, was [1]"),
        ("limits: 2G", "lifecycle.limits must be a mapping, was 2G"),
        ("limits: {memory: much}", "lifecycle.limits.memory must be a size such as 512M, was much"),
        ("limits: {cpu: 9999}", "lifecycle.limits.cpu must be at most 1024, was 9999"),
        ("priority: urgent", "lifecycle.priority must be one of low, normal, high, critical, was urgent"),
        ("tags: web", "lifecycle.tags must be a list, was web"),
        ("checks: ['']", "lifecycle.checks.0 must be a command line"),
        ("home: mine", "lifecycle.home must be one of private, own, was mine"),
        ("fail-on-error: sure", "lifecycle.fail-on-error must be true or false, was sure"),
    ],
)
def test_each_fault_is_one_sentence_on_its_line(faults: Faults, line: str, sentence: str) -> None:
    (said,) = faults(lifecycle(line))
    assert said.startswith("a.md:3: ")
    assert sentence in said


def test_a_program_cannot_run_below_level_process(faults: Faults) -> None:
    (said,) = faults(lifecycle("driver: {command: a}", "isolation: thread"))
    assert said == "a.md:4: lifecycle.isolation must be process where the driver is a program, was thread"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.md:1: the file is empty; write what the agent is to do"),
        ("---\nname: a\nGo.", "a.md:1: the front matter begins here and never ends; close it with a line of ---"),
        ("---\n- a\n---\n", "a.md:2: the front matter must be keys with values, such as name: fixer"),
        ("---\na: 1\nb:\n\tc: x\n---\n", "a.md:4: a tab stands where YAML wants spaces; indent with spaces"),
        (b"---\nname: a\n---\nca\xff\n", "a.md:4: this is not UTF-8 text; save the file as UTF-8"),
        (b"a\nb\0", "a.md:2: there is a NUL character; remove it"),
        (b"x" * (MAX_BYTES + 1), "a.md: is larger than 256 KiB"),
        ("---\nname: 5\n---\n", "a.md:2: name must be text, was 5"),
        ("---\nname:\n---\n", "a.md:2: name has no value; write one, or remove the key"),
        ('---\nx: 1\nname: "b\\nc"\n---\n', "a.md:3: name must be printable text on one line, was 'b\\nc'"),
        ('---\nname: "\\ud800"\n---\n', "a.md:2: name must be printable text on one line, was '\\ud800'"),
        ("---\ndescription: [a]\n---\n", "a.md:2: description must be text, was ['a']"),
        ("---\nlifecycle: 5\n---\n", "a.md:2: lifecycle must be a mapping, was 5"),
        ("---\nlifecycle:\n---\n", "a.md:2: lifecycle has no value; write one, or remove the key"),
        ("---\nlifecyle: {restart: no}\n---\n", "a.md:2: lifecyle is not known; did you mean lifecycle?"),
        ("---\nLifecycle: {restart: no}\n---\n", "a.md:2: Lifecycle is not known; did you mean lifecycle?"),
    ],
)
def test_a_file_that_cannot_be_taken(faults: Faults, text: str | bytes, said: str) -> None:
    assert faults(text) == [said]


def test_a_file_of_mistakes_is_not_told_to_the_end(faults: Faults) -> None:
    said = faults(lifecycle(*(f"wrong{number}: 1" for number in range(MAX_FAULTS + 20))))
    assert len(said) == MAX_FAULTS + 1
    assert said[-1] == "a.md: 20 more faults are not shown"


def test_the_faults_of_toml_have_lines_too(faults: Faults) -> None:
    assert faults('name = "a"\n\n[lifecycle.limits]\nmemory = "99T"\ntaks = 1\n', "a.toml") == [
        "a.toml:4: lifecycle.limits.memory must be at most 16T, was 99T",
        "a.toml:5: lifecycle.limits.taks is not known; did you mean tasks?",
    ]
    assert faults("developer_instructions = 3\n", "a.toml") == ["a.toml:1: developer_instructions must be text, was 3"]


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    with pytest.raises(DefinitionError, match=r"pipe\.md: is not a regular file"):
        load_agent_file(tmp_path / "pipe.md")
    with pytest.raises(DefinitionError, match=r"no\.md: cannot be read: No such file or directory"):
        load_agent_file(tmp_path / "no.md")
    with pytest.raises(DefinitionError, match=r"cannot be read|is not a regular file"):
        load_agent_file(tmp_path)


def test_a_file_whose_name_is_no_text_needs_a_name_inside(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.md"))
    path.write_text("Go.")
    with pytest.raises(DefinitionError, match="name must be printable text"):
        load_agent_file(path)
    path.write_text("---\nname: a\n---\nGo.")
    assert load_agent_file(path).manifest.name == "a"


KEYS = (
    *("driver", "isolation", "env", "limits", "restart", "healthcheck", "priority", "tags", "x"),
    *("initialization-timeout", "fail-on-error", "may-add-tasks", "checks", "home"),
)
VALUES = (
    *(
        "no",
        "true",
        "3",
        "acp:x",
        "[a, 1]",
        "{max-retries: 3}",
        "{memory: 1G, time: x}",
        "{command: '{'}",
        "~",
        "1e999",
    ),
    *("{probe: http}", "{interval: 1ms}", "{type: 3}", "''", "1h", "{command: [a]}", ".nan", "file", "python:a:b"),
    *('"\\ud800"', '{type: "\\ud800"}', '{"\\ud800": 1}', '{command: ["\\0", "\\ud800"]}', "{target: 3}", "[{}, [1]]"),
    *("{cpu: .inf}", "{cpu: .nan}", "{cpu: 1e308}", f"{{time: {'9' * 400}d, memory: {'9' * 400}G}}", "{A: {}, 1: 2}"),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=5))
def test_whatever_stands_under_lifecycle_is_a_definition_or_a_definition_error(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    path = tmp_path / "a.md"
    path.write_text(lifecycle(*(f"{key}: {value}" for key, value in keys.items())))
    try:
        found = load_agent_file(path)
    except DefinitionError:
        return
    assert found.manifest.validate()


# --- the same keys on a class ------------------------------------------------------------------------


def test_a_class_may_carry_the_same_keys() -> None:
    @agent(name="x", lifecycle={"restart": "on-failure:2", "isolation": "process", "env": ("A",), "checks": ["true"]})
    class Marked(Agent):
        def process(self, request: Any) -> Any:
            return request

    manifest = AgentRegistry(read_lifecycle=read_lifecycle).register(Marked)
    assert manifest.defaults is not None
    assert manifest.defaults.fields_set == {"restart_policy", "isolation_level"}
    assert manifest.defaults.restart_policy == RestartPolicy(max_retries=2)
    assert (manifest.env, manifest.checks) == ({"A": None}, ("true",))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"restrat": 1}, "mod:A: lifecycle.restrat is not known; did you mean restart?"),
        ({"limits": {"memory": "1M"}}, "mod:A: lifecycle.limits.memory must be at least 64M, was 1M"),
        ({"driver": "claude"}, "mod:A: lifecycle.driver is not for a class, which runs itself"),
    ],
)
def test_mistakes_on_a_class_are_told_too(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        read_lifecycle("mod:A", keys)
    assert str(caught.value) == said
