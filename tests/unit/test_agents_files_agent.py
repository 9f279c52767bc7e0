from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostler.agents import AgentKind, CommandSpec, ExitMeaning, PromptBy, definition_id
from ostler.agents.files import DriverKind, LoadedDefinition, MakerSource, load_agent_file
from ostler.agents.files.forms import FORMS, Form
from ostler.agents.files.page import MAX_BYTES, MAX_FAULTS
from ostler.agents.manifest import MAX_DESCRIPTION
from ostler.errors import DefinitionError
from ostler.model import (
    AgentSpawnOptions,
    HealthCheckConfig,
    IsolationLevel,
    ProbeType,
    ResourceLimits,
    RestartPolicy,
    RestartPolicyType,
)

FULL = """\
---
name: fixer
description: Fixes one failing test at a time
model: sonnet
tools: Read, Edit, Bash
hooks: {Stop: [{matcher: x}]}
lifecycle:
  driver: acp:claude
  isolation: worktree
  env: [ANTHROPIC_API_KEY]
  limits: {memory: 2G, cpu: 50%, time: 45m, tokens: 2M, cost: 5.00, tasks: 2, threads: 3}
  restart: on-failure:3
  healthcheck: {heartbeat: 30s, timeout: 4s, stall: 5m, retries: 4, successes: 1, start-period: 20s}
  loop: {max-iterations: 50, until: ALL DONE, gates: [ruff check ., pytest -q], wait: [ci], timeout: 1h}
  review: {by: file, accept: human}
  hooks: {after-create: uv sync, before-run: ""}
  tasks: {from: github, label: agent, claim: assign}
---

Fix {{ task.title }}.
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def loading(text: str | bytes, name: str = "a.md") -> LoadedDefinition:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_agent_file(path)

    return loading


@pytest.fixture
def faults(load: Any, tmp_path: Path) -> Any:
    """The sentences about a file, without the folder."""

    def failing(text: str | bytes, name: str = "a.md") -> list[str]:
        with pytest.raises(DefinitionError) as caught:
            load(text, name)
        return [fault.message.replace(f"{tmp_path}/", "") for fault in caught.value.faults]

    return failing


def lifecycle(*lines: str) -> str:
    return "\n".join(["---", "lifecycle:", *(f"  {line}" for line in lines), "---", "Go."])


# --- what a file becomes -----------------------------------------------------------------------------


def test_a_full_file_becomes_a_manifest(load: Any, tmp_path: Path) -> None:
    found = load(FULL)
    manifest = found.manifest
    assert (manifest.name, manifest.kind, manifest.id) == (
        "fixer",
        AgentKind.COMMAND,
        definition_id(AgentKind.COMMAND, "fixer"),
    )
    assert manifest.description == "Fixes one failing test at a time"
    assert manifest.prompt == "Fix {{ task.title }}."
    assert manifest.source == found.path == str(tmp_path / "a.md")
    assert manifest.defaults == AgentSpawnOptions(
        isolation_level=IsolationLevel.PROCESS,
        resource_limits=ResourceLimits(
            max_memory_mb=2048,
            max_cpu_percent=50,
            execution_timeout=timedelta(minutes=45),
            max_tokens_per_minute=2_000_000,
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
    )
    assert found.maker_source == MakerSource(kind=DriverKind.ACP, target="claude")
    assert found.isolation == "worktree"
    assert len(found.digest) == 64
    assert LoadedDefinition.from_json(found.to_json()) == found


def test_foreign_keys_and_the_parts_of_later_are_kept_as_data(load: Any) -> None:
    assert load(FULL).manifest.extra == {
        "model": "sonnet",
        "tools": "Read, Edit, Bash",
        "hooks": {"Stop": [{"matcher": "x"}]},
        "lifecycle": {
            "driver": {"acp": "claude"},
            "isolation": "worktree",
            "env": ["ANTHROPIC_API_KEY"],
            "limits": {"cost": 5.0},
            "healthcheck": {"stall": 300.0},
            "loop": {
                "max-iterations": 50,
                "until": "ALL DONE",
                "gates": ["ruff check .", "pytest -q"],
                "wait": ["ci"],
                "timeout": 3600.0,
            },
            "review": {"by": "file", "accept": "human"},
            "hooks": {"after-create": "uv sync", "before-run": ""},
            "tasks": {"from": "github", "label": "agent", "claim": "assign"},
        },
    }


def test_a_body_alone_is_an_agent_with_the_name_of_its_file(load: Any) -> None:
    found = load("Fix what is broken.\n\n---\nA rule is no front matter.", "night-watch.md")
    assert found.manifest.name == "night-watch"
    assert found.manifest.prompt == "Fix what is broken.\n\n---\nA rule is no front matter."
    assert (found.manifest.defaults, found.manifest.extra, found.isolation) == (None, None, None)
    assert found.maker_source == MakerSource(kind=DriverKind.ACP, target="claude", declared=False)


def test_a_front_matter_alone_is_an_agent(load: Any) -> None:
    assert load("---\nname: a\n---\n").manifest.prompt is None
    assert load("---\n---\nGo.").manifest.prompt == "Go."


def test_windows_lines_and_a_byte_order_mark_are_no_matter(load: Any) -> None:
    found = load(b"\xef\xbb\xbf---\r\nname: b\r\nlifecycle:\r\n  restart: no\r\n---\r\nOne.\r\nTwo.\r\n")
    assert (found.manifest.name, found.manifest.prompt) == ("b", "One.\nTwo.")


def test_a_long_description_is_cut_short_instead_of_refused(load: Any) -> None:
    description = load(f"---\ndescription: {'x' * 3000}\n---\n").manifest.description
    assert len(description) == MAX_DESCRIPTION
    assert description.endswith("…")


def test_a_command_driver_becomes_a_command(load: Any) -> None:
    found = load(
        lifecycle(
            "driver:",
            '  command: ["aider", "--message-file", "{prompt_file}"]',
            "env: [A, B]",
            "prompt: stdin",
            "exit-codes: {0: done, 75: retry}",
            "pty: true",
        )
    )
    spec = CommandSpec(
        argv=("aider", "--message-file", "{prompt_file}"),
        env=("A", "B"),
        prompt_by=PromptBy.STDIN,
        exit_codes={"0": ExitMeaning.DONE, "75": ExitMeaning.RETRY},
        pty=True,
    )
    assert found.manifest.command == found.maker_source.command == spec
    assert (found.manifest.kind, found.maker_source.target) == (AgentKind.COMMAND, "aider")
    assert found.manifest.extra is None


@pytest.mark.parametrize("line", ["driver: python:my.mod:Fixer", "driver: {python: my.mod:Fixer}"])
def test_a_python_driver_is_only_a_name(load: Any, line: str) -> None:
    found = load(lifecycle(line))
    assert found.maker_source == MakerSource(kind=DriverKind.PYTHON, target="my.mod:Fixer")
    assert found.manifest.kind is AgentKind.PYTHON
    assert found.manifest.extra == {"lifecycle": {"driver": {"python": "my.mod:Fixer"}}}


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("restart: no", RestartPolicy.none()),
        ('restart: "no"', RestartPolicy.none()),
        ("restart: false", RestartPolicy.none()),
        ("restart: {policy: no}", RestartPolicy.none()),
        ("restart: always", RestartPolicy(max_retries=10)),
        ("restart: on-failure", RestartPolicy()),
        ("restart: on-failure:7", RestartPolicy(max_retries=7)),
        ("restart: {max: 2}", RestartPolicy(max_retries=2)),
        ("restart: {policy: immediate}", RestartPolicy.immediate()),
        (
            "restart: {policy: linear, delay: 2m}",
            RestartPolicy(type=RestartPolicyType.LINEAR).evolve(initial_delay=2 * MINUTE, max_delay=2 * MINUTE),
        ),
        (
            "restart: {max-delay: 500ms}",
            RestartPolicy(initial_delay=timedelta(milliseconds=500), max_delay=timedelta(milliseconds=500)),
        ),
        (
            "restart: {delay: 5s, max-delay: 1m, multiplier: 3, jitter: false, breaker: 1h}",
            RestartPolicy(
                initial_delay=timedelta(seconds=5),
                backoff_multiplier=3.0,
                use_jitter=False,
                circuit_breaker_timeout=60 * MINUTE,
            ),
        ),
    ],
)
def test_restart_in_all_its_spellings(load: Any, line: str, policy: RestartPolicy) -> None:
    assert load(lifecycle(line)).manifest.defaults.restart_policy == policy


def test_that_it_was_always_is_kept(load: Any) -> None:
    assert load(lifecycle("restart: always")).manifest.extra == {"lifecycle": {"restart": "always"}}


def test_a_short_interval_shortens_the_unwritten_timeout(load: Any) -> None:
    check = load(lifecycle("healthcheck: {interval: 2s}")).manifest.defaults.health_check
    assert check.timeout == check.interval == timedelta(seconds=2)


def test_a_probe_with_its_target(load: Any) -> None:
    check = load(
        lifecycle("healthcheck: {probe: tcp, target: 'localhost:80', interval: 9s}")
    ).manifest.defaults.health_check
    assert check == HealthCheckConfig(probe=ProbeType.TCP, target="localhost:80", interval=timedelta(seconds=9))


def test_a_stall_alone_leaves_the_health_check_to_the_spawn(load: Any) -> None:
    manifest = load(lifecycle("healthcheck: {stall: 5m}")).manifest
    assert manifest.defaults is None
    assert manifest.extra == {"lifecycle": {"healthcheck": {"stall": 300.0}}}


@pytest.mark.parametrize("word", ["none", "thread", "process", "container"])
def test_the_words_of_isolation_are_its_levels(load: Any, word: str) -> None:
    assert load(lifecycle(f"isolation: {word}")).manifest.defaults.isolation_level is IsolationLevel(word)


def test_memory_is_rounded_up_to_whole_megabytes(load: Any) -> None:
    assert load(lifecycle("limits: {memory: 100.5M}")).manifest.defaults.resource_limits.max_memory_mb == 101


def test_the_file_of_codex(load: Any) -> None:
    found = load(
        'name = "scout"\ndescription = "Looks"\nmodel = "o"\nsandbox_mode = "read-only"\n'
        'developer_instructions = """\nLook.\n"""\n[lifecycle]\nrestart = "always"\n',
        "x.toml",
    )
    assert (found.manifest.name, found.manifest.description, found.manifest.prompt) == ("scout", "Looks", "Look.")
    assert found.manifest.extra == {"model": "o", "sandbox_mode": "read-only", "lifecycle": {"restart": "always"}}
    assert found.maker_source == MakerSource(kind=DriverKind.ACP, target="codex", declared=False)


# --- what is wrong with a file -----------------------------------------------------------------------


def test_all_faults_come_at_once_each_with_its_line_and_the_key_as_written(faults: Any) -> None:
    assert faults(
        lifecycle(
            "restrat: always",
            "memory: 2G",
            "isolation: worktre",
            "limits:",
            "  memory: 64G",
            "  time: 2h",
            "  cost: -1",
            "restart: on-failure:30",
            "healthcheck: {probe: http, interval: 30, retries: x}",
            "loop: {max_iterations: 50}",
            "review:",
            "hooks: {Stop: x}",
            "limits: {}",
        )
    ) == [
        "a.md:3: lifecycle.restrat is not known; did you mean restart?",
        "a.md:4: lifecycle.memory is not known; did you mean limits.memory?",
        "a.md:5: lifecycle.isolation must be one of none, thread, process, worktree, container, was 'worktre'",
        "a.md:7: lifecycle.limits.memory must be 64 to 8192 MB, was '64G'",
        "a.md:8: lifecycle.limits.time must be 1 s to 1 h, was '2h'",
        "a.md:9: lifecycle.limits.cost must be an amount such as 5.00, was -1",
        "a.md:10: lifecycle.restart (max) must be 0 to 10, was 'on-failure:30'",
        f"a.md:11: lifecycle.healthcheck.interval must be {FORMS[Form.DURATION].hint}, was 30",
        "a.md:11: lifecycle.healthcheck.retries must be a whole number such as 3, 500k or 2M, was 'x'",
        "a.md:11: lifecycle.healthcheck.target is required for a http probe",
        "a.md:12: lifecycle.loop.max_iterations is not known; did you mean max-iterations?",
        "a.md:13: lifecycle.review has no value; write one, or remove the key",
        "a.md:14: lifecycle.hooks.Stop is not known; known are after-create, before-run, after-run, before-remove",
        "a.md:15: lifecycle.limits stands already on line 6",
    ]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["driver: claude"], "lifecycle.driver must be acp:NAME, python:module:Class, or keys with one of"),
        (["driver: {}"], "lifecycle.driver must have exactly one of acp, command, python"),
        (["driver: {acp: a, python: 'b:C'}"], "must have exactly one of acp, command, python, has ['acp', 'python']"),
        (["driver: {command: [a, '{promt}']}"], "lifecycle.driver.command.1 must use only {attempt},"),
        (["driver: 'command: a {promt}'"], "lifecycle.driver (command) must use only {attempt},"),
        (["driver: {command: [a, '{']}"], "lifecycle.driver.command.1 must have its braces in pairs"),
        (["pty: true"], "lifecycle.pty is only for a driver that is a command"),
        (["driver: acp:x", "prompt: stdin"], "a.md:4: lifecycle.prompt is only for a driver that is a command"),
        (
            ["driver: {command: a}", "prompt: pigeon"],
            "lifecycle.prompt must be one of file, stdin, argument, was 'pigeon'",
        ),
        (["driver: {command: a}", "exit-codes: {256: done}"], "lifecycle.exit-codes.256 must be an exit code from 0"),
        (["driver: {command: a}", "exit-codes: {1: dunno}"], "lifecycle.exit-codes.1 must be one of done, failed,"),
        (["driver: {command: a}", "exit-codes: [1]"], "lifecycle.exit-codes must be names with values"),
        (["env: [A=b]"], "lifecycle.env must be a list of names of variables, without values, was ['A=b']"),
        (["driver: {command: a}", "env: [OSTLER_X]"], "lifecycle.env must not name variables that begin with OSTLER_"),
        (["healthcheck: {heartbeat: 1s, interval: 2s}"], "lifecycle.healthcheck.heartbeat and interval are the same"),
        (["healthcheck: {probe: tcp, target: 'a:1', heartbeat: 9s}"], "does not go with a tcp probe; write interval"),
        (
            ["healthcheck: {interval: 2s, timeout: 3s}"],
            "healthcheck.timeout must be at most the interval (2 s), was '3s'",
        ),
        (["restart: {delay: 4m, max-delay: 1m}"], "restart.max-delay must be at least delay (4 min), was '1m'"),
        (["restart: {policy: sometimes}"], "lifecycle.restart.policy must be one of no, always, on-failure,"),
        (["restart: sometimes"], "lifecycle.restart must be no, always, on-failure, on-failure:3, or keys"),
        (["limits: 2G"], "lifecycle.limits must be keys with values, was '2G'"),
        (["review: {accept: everyone}"], "lifecycle.review.accept must be one of human, gates, never, was 'everyone'"),
        (["loop: {gates: [3]}"], "lifecycle.loop.gates must be a list of texts, was [3]"),
    ],
)
def test_each_fault_is_said(faults: Any, lines: list[str], sentence: str) -> None:
    (said,) = faults(lifecycle(*lines))
    assert sentence in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.md:1: the file is empty; write what the agent is to do"),
        ("---\nname: a\nGo.", "a.md:1: the front matter begins here and never ends; close it with a line of ---"),
        ("---\n- a\n---\n", "a.md:2: the front matter must be keys with values, such as name: fixer"),
        (
            "---\na: 1\nlifecycle:\n\tdriver: x\n---\n",
            "a.md:4: a tab stands where YAML wants spaces; indent with spaces",
        ),
        (b"---\nname: a\n---\nca\xff\n", "a.md:4: this is not UTF-8 text; save the file as UTF-8"),
        (b"a\nb\0", "a.md:2: there is a NUL character; remove it"),
        (b"x" * (MAX_BYTES + 1), "a.md: is larger than 256 KiB"),
        ("---\nname: 5\n---\n", "a.md:2: name must be text; put it in quotes, was 5"),
        ("---\nname:\n---\n", "a.md:2: name has no value; write one, or remove the key"),
        (
            '---\nx: 1\nname: "two\\nlines"\n---\n',
            "a.md:3: name must be printable text on one line, was 'two\\nlines'",
        ),
        ("---\ndescription: [a]\n---\n", "a.md:2: description must be text; put it in quotes, was ['a']"),
        ("---\nx:\n  y: [1, .inf]\n---\n", "a.md:3: x.y.1 must be a finite number, was inf"),
        ("---\nlifecycle: 5\n---\n", "a.md:2: lifecycle must be keys with values, was 5"),
        ("---\nlifecycle:\n---\n", "a.md:2: lifecycle has no value; write one, or remove the key"),
        ("---\nlifecyle: {restart: no}\n---\n", "a.md:2: lifecyle is not known; did you mean lifecycle?"),
    ],
)
def test_a_file_that_cannot_be_taken(faults: Any, text: str | bytes, said: str) -> None:
    assert faults(text) == [said]


def test_a_file_of_mistakes_is_not_told_to_the_end(faults: Any) -> None:
    said = faults(lifecycle(*(f"wrong{number}: 1" for number in range(MAX_FAULTS + 20))))
    assert len(said) == MAX_FAULTS + 1
    assert said[-1] == "a.md: 20 more faults are not shown"


def test_the_faults_of_codex_have_lines_too(faults: Any) -> None:
    assert faults('name = "a"\n\n[lifecycle.limits]\nmemory = "1T"\ntokns = 1\n', "a.toml") == [
        "a.toml:4: lifecycle.limits.memory must be 64 to 8192 MB, was '1T'",
        "a.toml:5: lifecycle.limits.tokns is not known; did you mean tokens?",
    ]
    assert faults("developer_instructions = 3\n", "a.toml") == [
        "a.toml:1: developer_instructions must be text; put it in quotes, was 3"
    ]


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    with pytest.raises(DefinitionError, match=r"pipe\.md: is not a regular file"):
        load_agent_file(tmp_path / "pipe.md")
    with pytest.raises(DefinitionError, match=r"no\.md: cannot be read: No such file or directory"):
        load_agent_file(tmp_path / "no.md")
    with pytest.raises(DefinitionError, match=r"cannot be read|is not a regular file"):
        load_agent_file(tmp_path)


VALUES = (
    *("no", "true", "3", "acp:x", "[a, 1]", "{max: 3}", "{memory: 1G, time: x}", "{0: done}", "{command: '{'}", "~"),
    *("{probe: http}", "{interval: 1ms}", "{policy: 3}", "''", "{from: x}", "1h", "{command: [a]}", ".nan", "file"),
    *(
        '"\\ud800"',
        '{until: "\\ud800"}',
        '{"\\ud800": 1}',
        '{command: ["\\0", "\\ud800"]}',
        "{delay: 9m}",
        "{target: 3}",
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.sampled_from(
            [
                "driver",
                "isolation",
                "env",
                "limits",
                "restart",
                "healthcheck",
                "loop",
                "review",
                "hooks",
                "tasks",
                "prompt",
                "exit-codes",
                "pty",
                "x",
            ]
        ),
        max_size=5,
        unique=True,
    ),
    st.data(),
)
def test_whatever_stands_under_lifecycle_is_a_definition_or_a_definition_error(
    tmp_path: Path, keys: list[str], data: st.DataObject
) -> None:
    values = st.sampled_from(VALUES)
    path = tmp_path / "a.md"
    path.write_text(lifecycle(*(f"{key}: {data.draw(values)}" for key in keys)))
    try:
        found = load_agent_file(path)
    except DefinitionError:
        return
    assert found.validate().is_valid
