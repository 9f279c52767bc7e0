"""Agents of definition files are started: each driver, its environment, and again without their file."""

from __future__ import annotations

from pathlib import Path

import pytest

import ostler
from ostler.definitions import register_files

pytestmark = pytest.mark.anyio

CODE = """\
import os

from ostler import Agent


class Shower(Agent):
    def initialize(self, context):
        self.context = context

    def process(self, request):
        names = ("FILES_PASSED", "FILES_SET", "FILES_OVER", "FILES_MISSING")
        seen = self.context.env if request == "context" else os.environ
        return " ".join(seen.get(name, "-") for name in names)
"""
ENV = "env: {FILES_PASSED: , FILES_MISSING: , FILES_SET: set, FILES_OVER: file}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shower_of_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FILES_PASSED", "passed")
    (tmp_path / ".ostler" / "agents").mkdir(parents=True)
    return tmp_path


def put(root: Path, *lines: str) -> Path:
    path = root / ".ostler" / "agents" / "fixer.md"
    path.write_text("\n".join(["---", "lifecycle:", *(f"  {line}" for line in lines), "---", ""]))
    return path


def settings() -> ostler.LifecycleSettings:
    return ostler.LifecycleSettings(environment=("PATH", "PYTHONPATH"))


@pytest.mark.parametrize(
    ("lines", "request_text"),
    [
        (["driver: python:shower_of_a_test:Shower", "isolation: process"], "process"),
        (["driver: python:shower_of_a_test:Shower", "isolation: thread"], "context"),
        (
            [
                "driver: {command: [sh, -c, 'echo $FILES_PASSED $FILES_SET $FILES_OVER ${{FILES_MISSING--}}']}",
            ],
            "command",
        ),
    ],
    ids=["process", "thread", "command"],
)
async def test_the_env_of_a_file_reaches_every_kind_of_agent(root: Path, lines: list[str], request_text: str) -> None:
    put(root, *lines, ENV)
    async with ostler.open(root / "home", settings=settings()) as manager:
        assert not register_files(manager.registry, root).faults
        said = []
        for options in (None, ostler.AgentSpawnOptions(env={"FILES_OVER": "spawn"})):
            spawned = await manager.spawn(ostler.SpawnRequest(agent_definition_id="fixer", options=options))
            answer = await manager.process(spawned.instance_id, request_text)
            said.append(answer if isinstance(answer, str) else answer["output"].strip())
    assert said == ["passed set file -", "passed set spawn -"]


async def test_a_path_is_enough_and_a_spawn_overrules_the_file(root: Path) -> None:
    path = put(root, "driver: {command: [cat]}", "limits: {memory: 256M, time: 1m}", "restart: on-failure:2")
    async with ostler.open(root / "home", settings=settings()) as manager:
        record = await (await manager.start(path, memory="128M")).record()
    options = record.spawn_options
    assert options is not None
    assert options.isolation_level is ostler.IsolationLevel.PROCESS
    assert options.restart_policy == ostler.RestartPolicy(max_retries=2)
    assert options.resource_limits is not None
    assert options.resource_limits.max_memory_mb == 128
    assert options.resource_limits.execution_timeout.total_seconds() == 60


async def test_an_agent_comes_back_without_its_file(root: Path) -> None:
    path = put(root, "driver: python:shower_of_a_test:Shower", "isolation: process", ENV)
    async with ostler.open(root / "home", settings=settings()) as manager:
        agent = await manager.start(path, name="ada")
        await agent.pause("park")
    path.unlink()
    async with ostler.open(root / "home", settings=settings()) as manager:
        agent = manager.handle("ada")
        await agent.resume()
        assert await agent.ask("process") == "passed set file -"


async def test_a_driver_that_is_not_there_fails_the_start(root: Path) -> None:
    path = put(root, "driver: nightowl")
    async with ostler.open(root / "home", settings=settings()) as manager:
        with pytest.raises(
            ostler.ValidationError, match=r"driver must be one of claude, codex, pi, or .* was 'nightowl'"
        ):
            await manager.start(path)
