"""One daemon serves many projects: definitions, settings and crews are those of where a command stands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from api_served import Served, serving
from workdirs_ground import git

from ostler.agents.registry import AgentRegistry
from ostler.client.blocking import BlockingClient, DaemonError
from ostler.definitions.projects import Projects
from ostler.errors import AgentNotFoundError, DefinitionError
from ostler.home import project_near

pytestmark = pytest.mark.anyio
SECONDS = 60.0
_AGENT = """---
description: {words}
lifecycle:
  driver: {{command: [sh, -c, 'echo {words}; echo {words} > made.txt', "{{prompt}}"]}}
---
"""


def agent_file(folder: Path, name: str, words: str) -> None:
    path = folder / ".claude" / "agents" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_AGENT.format(words=words))


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "README").write_text("a project\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "begin")
    return folder


class Stand:
    """Commands from one directory, over the API of a daemon whose home lies elsewhere."""

    def __init__(self, served: Served, directory: Path) -> None:
        self._client = BlockingClient(served.home, directory=str(directory))
        self.directory = directory

    async def call(self, verb: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(self._client.call, verb, **parameters)

    async def until(self, verb: str, holds: Callable[[Any], bool], **parameters: Any) -> Any:
        async with asyncio.timeout(SECONDS):
            while not holds(reply := await self.call(verb, **parameters)):  # noqa: ASYNC110 - the API is asked
                await asyncio.sleep(0.02)
        return reply

    async def run(self, agent: str) -> str:
        """What the agent printed."""
        spawn = {"definition": agent, "cwd": str(self.directory), "job": {"request": {"prompt": ""}}}
        instance = (await self.call("spawn", spawn=spawn))["instance_id"]
        await self.until("instance", lambda reply: reply["state"] == "terminated", instance=instance)
        return "".join(line["text"] for line in await self.call("logs", instance=instance))

    async def add(self, text: str, agent: str, **more: Any) -> str:
        body = {"task": text, "agent": agent, "near": str(self.directory), **more}
        return str((await self.call("add_task", new_task=body))["key"])

    async def completed(self, key: str) -> Any:
        return await self.until("task", lambda task: task["state"] == "completed", task=key)


@contextlib.asynccontextmanager
async def two_projects(tmp_path: Path) -> AsyncIterator[tuple[Stand, Stand]]:
    first, second = repository(tmp_path / "first"), repository(tmp_path / "second")
    async with serving(tmp_path / "home") as served:
        yield Stand(served, first), Stand(served, second)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return home


# --- which project a directory is in -----------------------------------------------------------------


def test_the_nearest_directory_with_definitions_or_settings_is_the_project(tmp_path: Path) -> None:
    home = tmp_path / "home"
    nested = tmp_path / "work" / "nested" / "deep"
    nested.mkdir(parents=True)
    assert project_near(nested, home) is None
    (tmp_path / "work" / ".git").mkdir()
    assert project_near(nested, home) == tmp_path / "work"
    agent_file(tmp_path / "work" / "nested", "one", "one")
    assert project_near(nested, home) == tmp_path / "work" / "nested"
    (nested / "ostler.toml").touch()
    assert project_near(nested, home) == nested


def test_a_home_inside_a_project_serves_that_one_as_its_own(tmp_path: Path) -> None:
    project = tmp_path / "project"
    home = project / ".ostler"
    submodule = project / "vendor" / "part"
    (submodule / ".git").mkdir(parents=True)
    home.mkdir()
    assert project_near(project, home) is None
    assert project_near(submodule, home) is None
    assert project_near(home / "tasks" / "T001", home) is None


def test_what_the_user_has_in_the_own_directory_makes_no_project_of_it(user: Path) -> None:
    agent_file(user, "everywhere", "hello")
    (user / "src").mkdir()
    assert project_near(user / "src", user / ".ostler") is None


# --- definitions -------------------------------------------------------------------------------------


def test_a_name_belongs_to_one_definition_in_each_project(tmp_path: Path) -> None:
    projects = Projects(AgentRegistry(), tmp_path / "home")
    for name in ("first", "second"):
        agent_file(tmp_path / name, "greeter", name)
        assert projects.near(tmp_path / name).find("greeter").description == name
    first, second = (projects.near(tmp_path / name).find("greeter") for name in ("first", "second"))
    assert first.id != second.id
    with pytest.raises(AgentNotFoundError):
        projects.registry.find("greeter")


def test_a_changed_file_counts_and_a_broken_one_is_refused_with_its_line(tmp_path: Path) -> None:
    agent_file(tmp_path / "p", "greeter", "before")
    project = Projects(AgentRegistry(), tmp_path / "home").near(tmp_path / "p")
    assert project.find("greeter").description == "before"
    agent_file(tmp_path / "p", "greeter", "after")
    assert project.find("greeter").description == "after"
    (tmp_path / "p" / ".claude" / "agents" / "greeter.md").write_text("---\nlifecycle: {restrat: no}\n---\nhi\n")
    with pytest.raises(DefinitionError, match=r"greeter\.md:2: .*did you mean restart"):
        project.find("greeter")


def test_the_last_good_settings_of_each_project_stay_in_force(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "p"
    folder.mkdir()
    (folder / "ostler.toml").write_text("[tasks]\nmax-failures = 7\n")
    assert Projects(AgentRegistry(), home).near(folder).settings().tasks.max_failures == 7
    (folder / "ostler.toml").write_text("[tasks]\nmax-failures = 0\n")
    later = Projects(AgentRegistry(), home).near(folder)
    assert later.settings().tasks.max_failures == 7
    assert "ostler.toml:2" in str(later.fault())


# --- with a daemon -----------------------------------------------------------------------------------


async def test_agents_are_found_where_a_command_stands(tmp_path: Path) -> None:
    async with two_projects(tmp_path) as (first, second):
        agent_file(first.directory, "greeter", "hello-from-first")
        with pytest.raises(DaemonError, match="no agent named 'greeter'"):
            await second.run("greeter")
        agent_file(second.directory, "greeter", "hello-from-second")
        assert await first.run("greeter") == "hello-from-first"
        assert await second.run("greeter") == "hello-from-second"
        rows = await first.call("instances", include_terminated=True)
        assert {row["project"] for row in rows} == {str(first.directory), str(second.directory)}
        assert {row["name"] for row in await second.call("definitions") if row["project"]} == {"greeter"}


async def test_a_task_is_worked_on_with_the_definitions_and_settings_of_its_project(tmp_path: Path) -> None:
    async with two_projects(tmp_path) as (first, second):
        for stand, words, failures in ((first, "made-in-first", 5), (second, "made-in-second", 6)):
            agent_file(stand.directory, "maker", words)
            (stand.directory / "ostler.toml").write_text(f"[tasks]\nmax-failures = {failures}\n")
        keys = [await first.add("make it", "maker"), await second.add("make it", "maker")]
        tasks = [await first.completed(key) for key in keys]
        assert [task["max_failures"] for task in tasks] == [5, 6]
        texts = [(Path(task["workdir"]["path"]) / "made.txt").read_text() for task in tasks]
        assert texts == ["made-in-first\n", "made-in-second\n"]


async def test_crews_of_one_name_in_two_projects_are_two_crews(tmp_path: Path) -> None:
    async with two_projects(tmp_path) as (first, second):
        for stand, words in ((first, "by-first"), (second, "by-second")):
            agent_file(stand.directory, "maker", words)
            (stand.directory / "ostler.toml").write_text('[crew.coder]\nagent = "maker"\n')
        key_of_second = await second.add("make it", "maker")
        await first.call("crew_up", names=[])
        key_of_first = await first.add("make it", "maker")
        assert (await first.completed(key_of_first))["member"] == "coder-1"
        task = await second.call("task", task=key_of_second)
        assert task["state"] == "queued"
        assert "crew coder" in (await second.call("why_task", task=key_of_second))["verdict"]
        assert [crew["is_up"] for crew in await second.call("crews")] == [False]
        await second.call("crew_up", names=["coder"])
        done = await second.completed(key_of_second)
        assert (Path(done["workdir"]["path"]) / "made.txt").read_text() == "by-second\n"
        await second.call("crew_stop", names=[])
        assert [crew["is_up"] for crew in await first.call("crews")] == [True]


async def test_the_next_daemon_brings_the_crews_of_every_project_up_again(tmp_path: Path) -> None:
    folder = repository(tmp_path / "first")
    agent_file(folder, "maker", "made-later")
    (folder / "ostler.toml").write_text('[crew.coder]\nagent = "maker"\n')
    async with serving(tmp_path / "home") as served:
        await Stand(served, folder).call("crew_up", names=[])
    async with serving(tmp_path / "home") as served:
        stand = Stand(served, folder)
        assert [crew["is_up"] for crew in await stand.call("crews")] == [True]
        assert (await stand.completed(await stand.add("make it", "maker")))["member"] == "coder-1"


async def test_broken_settings_of_every_project_are_in_the_inbox(tmp_path: Path) -> None:
    async with two_projects(tmp_path) as (first, second):
        path = second.directory / "ostler.toml"
        path.write_text("[tasks]\nmax-failures = 0\n")
        assert "max-failures" in (await second.call("status"))["settings_fault"]
        assert [row["key"] for row in await first.call("inbox")] == [str(path)]
        path.write_text("[tasks]\nmax-failures = 9\n")
        await first.until("inbox", lambda rows: not rows)


async def test_a_token_that_may_only_look_reads_no_files_of_other_directories(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    agent_file(folder, "secret", "hidden")
    async with serving(tmp_path / "home") as served:
        names = {}
        for role in ("viewer", "admin"):
            client = BlockingClient(
                served.home, address=served.address, token=served.tokens[role], directory=str(folder)
            )
            definitions = await asyncio.to_thread(client.call, "definitions")
            names[role] = {definition["name"] for definition in definitions}
        assert "secret" in names["admin"]
        assert "secret" not in names["viewer"]


_MODULE = """
import ostler

class Worker(ostler.Agent):
    async def process(self, request):
        return "{words}"
"""


async def test_modules_of_one_name_in_two_projects_are_not_mixed_up(tmp_path: Path) -> None:
    async with two_projects(tmp_path) as (first, second):
        for stand, words in ((first, "from-first"), (second, "from-second")):
            (stand.directory / "worker_of_project.py").write_text(_MODULE.format(words=words))
            folder = stand.directory / ".claude" / "agents"
            folder.mkdir(parents=True)
            for level in ("process", "thread"):
                driver = "driver: 'python:worker_of_project:Worker'"
                text = f"---\nlifecycle: {{{driver}, isolation: {level}}}\n---\nWork.\n"
                (folder / f"{level}-worker.md").write_text(text)
        for stand, words in ((first, "from-first"), (second, "from-second")):
            assert await _asked(stand, "process-worker") == words
        assert await _asked(first, "thread-worker") == "from-first"
        with pytest.raises(DaemonError, match=r"cannot be used beside .*isolation: process"):
            await _asked(second, "thread-worker")


async def _asked(stand: Stand, agent: str) -> Any:
    instance = (await stand.call("spawn", spawn={"definition": agent}))["instance_id"]
    return (await stand.call("ask", instance=instance, request="?"))["answer"]
