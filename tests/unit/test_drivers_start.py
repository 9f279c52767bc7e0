"""How each driver starts its program, what it finds there, and how definitions come to a driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import AgentContext, AgentKind, AgentManifest, AgentRegistry, CommandSpec, HomeKind, Message
from ostler.agents.command import Place, Start
from ostler.agents.messages import WaitAnswer, WaitAsked
from ostler.drivers import NAMES, command_of, driver_named, driver_of, options_of, register_built_in, spec_for
from ostler.drivers.base import Order
from ostler.drivers.pi import QUIET
from ostler.drivers.start import Wishes, driven_start, require_installed
from ostler.errors import AgentExecutionError, ValidationError
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits
from ostler.model.states import IsolationLevel
from ostler.testing.clock import ManualClock

ID = UUID("01890000-0000-7000-8000-000000000001")
SERVER = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_MODEL": "tiny"}


class Deaf:
    def say(self, message: Message) -> None: ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        raise NotImplementedError


def context(env: Mapping[str, str] | None = None) -> AgentContext:
    return AgentContext(
        instance_id=ID,
        attempt=1,
        definition_id=ID,
        name="a",
        limits=ResourceLimits(),
        clock=ManualClock(),
        voice=Deaf(),
        env=env or {},
    )


def started(spec: CommandSpec, homes: Path, env: Mapping[str, str] | None = None, request: Any = "x") -> Start:
    place = Place(cwd=Path("/w"), workdir=Path("/w"), temp=Path("/t"))
    driver = driver_named(spec.driver or "")
    return driven_start(driver, spec, context(env), place, "do it", Wishes.of(request), homes)


def order(**fields: Any) -> Order:
    return Order(**{"program": "p", **fields})


def test_claude_is_called_unattended() -> None:
    driver = driver_named("claude")
    plain = ["p", "-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    assert driver.argv(order()) == plain
    asked = order(model="opus", session="s-1", arguments=("--max-turns", "3"))
    assert driver.argv(asked) == [*plain, "--model", "opus", "--resume", "s-1", "--max-turns", "3"]
    assert driver.environment(order()) == {"DISABLE_AUTOUPDATER": "1"}
    assert driver.environment(order(is_root=True))["IS_SANDBOX"] == "1"
    assert driver.environment(order(env={"DISABLE_AUTOUPDATER": "0"})) == {}


def test_codex_is_called_unattended() -> None:
    driver = driver_named("codex")
    plain = ["p", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    assert driver.argv(order()) == [*plain, "-"]
    asked = order(model="m", session="s-1", arguments=("--search",))
    assert driver.argv(asked) == [*plain, "--model", "m", "--search", "resume", "s-1", "-"]
    words = driver.argv(order(env=SERVER))
    assert 'model_providers.ostler.base_url="http://127.0.0.1:1/v1"' in words
    assert words[-3:] == ["--model", "tiny", "-"]


def test_pi_is_called_unattended_and_quiet() -> None:
    driver = driver_named("pi")
    assert driver.argv(order(model="m", session="s-1")) == [
        "p",
        "--mode",
        "json",
        "-p",
        "--model",
        "m",
        "--session",
        "s-1",
    ]
    assert driver.environment(order())["NODE_OPTIONS"] == f"--import={QUIET.as_uri()}"
    merged = driver.environment(order(env={"NODE_OPTIONS": "--no-warnings"}))["NODE_OPTIONS"]
    assert merged == f"--no-warnings --import={QUIET.as_uri()}"
    home = Path("/h")
    assert driver.argv(order(env=SERVER, private_home=home))[4:] == ["--provider", "ostler", "--model", "tiny"]
    models = json.loads(driver.home_files(order(env=SERVER, private_home=home))[".pi/agent/models.json"])
    assert models["providers"]["ostler"]["baseUrl"] == SERVER["OPENAI_BASE_URL"]
    assert driver.home_files(order(private_home=home)) == {}
    assert QUIET.is_file()


def test_by_default_it_sees_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("CODEX_HOME", "/home/ada/codex")
    monkeypatch.setenv("SECRET", "hush")
    start = started(spec_for("codex"), tmp_path / "homes")
    assert (start.env["HOME"], start.env["CODEX_HOME"], start.env["TMPDIR"]) == (
        "/home/ada",
        "/home/ada/codex",
        "/t",
    )
    assert start.env["OSTLER_WORKDIR"] == "/w"
    assert "SECRET" not in start.env
    assert start.stdin == b"do it"
    assert "do it" not in start.argv
    assert not (tmp_path / "homes").exists()


def test_a_private_home_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "/home/ada/pi")
    spec = spec_for("pi", home="private")
    start = started(spec, tmp_path, SERVER)
    home = tmp_path / str(ID)
    assert start.env["HOME"] == str(home)
    assert "PI_CODING_AGENT_DIR" not in start.env
    file = home / ".pi/agent/models.json"
    assert (home.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    file.write_text("its own")
    started(spec, tmp_path, SERVER)
    assert file.read_text() == "its own"
    assert [one.name for one in tmp_path.iterdir()] == [str(ID)]


def test_variables_of_the_spawn_win(tmp_path: Path) -> None:
    start = started(spec_for("claude", home="private"), tmp_path, {"HOME": "/given", "TMPDIR": "/given/tmp"})
    assert (start.env["HOME"], start.env["TMPDIR"]) == ("/given", "/given/tmp")
    assert list(tmp_path.iterdir()) == []


def test_a_request_may_name_a_model_and_a_session(tmp_path: Path) -> None:
    spec = spec_for("claude", model="sonnet", arguments=("--add-dir", "{workdir}"))
    assert started(spec, tmp_path).argv[-4:] == ("--model", "sonnet", "--add-dir", "/w")
    start = started(spec, tmp_path, request={"prompt": "x", "model": "opus", "session": "s"})
    assert start.argv[-6:] == ("--model", "opus", "--resume", "s", "--add-dir", "/w")


@pytest.mark.parametrize(
    "request_", [{"session": 7}, {"session": "--help"}, {"model": "a\nb"}, {"model": ""}, {"home": "../up"}]
)
def test_a_session_that_is_no_name_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"^request\.(session|model|home) must"):
        Wishes.of(request_)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_that_is_not_there_is_told_with_how_to_install_it(name: str) -> None:
    spec = spec_for(name)
    said = rf"^{name} is not installed: .* on the agent's PATH \(/nowhere\); install it with: npm install -g @"
    with pytest.raises(AgentExecutionError, match=said):
        require_installed(driver_named(name), spec, context({"PATH": "/nowhere"}))


def test_an_unknown_driver_is_told_with_the_known_ones() -> None:
    said = r"^driver must be one of claude, codex, pi, or .*; did you mean claude\?, was 'cluade'$"
    with pytest.raises(ValidationError, match=said):
        spec_for("cluade")
    with pytest.raises(ValueError, match="HomeKind"):
        spec_for("claude", home="mine")


def test_the_built_in_agents_are_known_by_name() -> None:
    registry = AgentRegistry()
    mine = registry.register(CommandSpec(argv=("echo",)), name="pi")
    register_built_in(registry)
    register_built_in(registry)
    assert [one.name for one in registry.list()] == ["claude", "codex", "pi"]
    assert registry.find("pi") is mine
    claude = registry.find("claude")
    assert claude.checked() == claude
    assert driver_of(claude) is driver_named("claude")
    replaced = registry.register(CommandSpec(argv=("my-claude",)), name="claude")
    assert registry.find("claude") is replaced, "a definition of the user takes its place"
    assert driver_of(replaced) is None


def test_a_definition_file_comes_to_its_driver() -> None:
    made = AgentManifest(id=ID, name="fixer", kind=AgentKind.COMMAND, driver="codex", home=HomeKind.PRIVATE)
    spec = command_of(replace(made, extra={"model": "big"}))
    assert spec is not None
    assert (spec.driver, spec.model, spec.home) == ("codex", "big", HomeKind.PRIVATE)
    inherits = command_of(replace(made, extra={"model": "inherit"}))
    assert inherits is not None
    assert inherits.model is None
    python = AgentManifest(id=ID, name="p", kind=AgentKind.PYTHON, driver="python:m:C")
    assert (command_of(python), driver_of(python)) == (None, None)


def test_a_coding_agent_has_room_to_work() -> None:
    limits = ResourceLimits(max_memory_mb=256)
    made = AgentManifest(
        id=ID, name="f", kind=AgentKind.COMMAND, driver="pi", defaults=AgentSpawnOptions(resource_limits=limits)
    )
    options = options_of(made)
    assert options.isolation_level is IsolationLevel.PROCESS
    assert options.resource_limits is not None
    assert (options.resource_limits.max_memory_mb, options.resource_limits.max_concurrent_tasks) == (256, 1)
    assert options.resource_limits.execution_timeout.total_seconds() == 4 * 3600
    plain = AgentManifest(id=ID, name="e", kind=AgentKind.COMMAND, command=CommandSpec(argv=("echo",)))
    assert options_of(plain) == AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS)
