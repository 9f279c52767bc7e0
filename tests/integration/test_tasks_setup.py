"""Work that can run in a fresh worktree: a setup before the agent, a port and a name for databases of its own."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from isolation.ground import until
from tasks_ground import SHELL, T, TaskGround, ground, opened, repository, until_async, working_queue

from ostler import CommandSpec, Task, TaskSettings
from ostler.model.task import TaskState

__all__ = ["ground", "repository"]

pytestmark = pytest.mark.anyio
_NOTE = "echo $OSTLER_PORT $OSTLER_SLUG"


async def test_the_setup_runs_before_the_agent_with_the_same_port_and_name(ground: TaskGround, tmp_path: Path) -> None:
    told = tmp_path / "told"
    task = await ground.done(
        f"test -e ready && {_NOTE} >> {told}",
        setup=f"touch ready && {_NOTE} >> {told}",
        checks=[f"{_NOTE} >> {told}"],
    )
    lines = told.read_text().splitlines()
    assert lines == [f"{task.port} {task.slug}"] * 3
    assert task.slug.isidentifier()
    assert task.slug == task.slug.lower()


async def test_the_setup_runs_once_in_a_worktree_and_the_port_stays(ground: TaskGround, tmp_path: Path) -> None:
    runs, ports = tmp_path / "runs", tmp_path / "ports"
    script = f"echo $OSTLER_PORT >> {ports}; test $(wc -l < {ports}) -ge 2"
    task = await ground.add(script, setup=f"echo run >> {runs}", backoff=0)
    await ground.tasks.run(task.key)
    assert (await ground.tasks.run(task.key)).state is T.COMPLETED
    assert runs.read_text() == "run\n"
    first, second = ports.read_text().split()
    assert first == second


async def test_a_setup_that_fails_is_told_with_its_last_lines_and_no_agent_begins(ground: TaskGround) -> None:
    task = await ground.add("touch begun", setup="echo no such lock file >&2; exit 3", max_failures=1)
    failed = await ground.tasks.run(task.key)
    assert failed.state is T.QUEUED
    assert failed.error is not None
    assert failed.error.startswith("the setup `echo no such lock file >&2; exit 3` failed with exit code 3")
    assert "no such lock file" in failed.error
    assert not (ground.place(task) / "begun").exists()
    why = await ground.tasks.why(task.key)
    assert "no such lock file" in "\n".join((why.verdict, *why.evidence))


async def test_a_setup_that_takes_too_long_is_ended(repository: Path, tmp_path: Path) -> None:
    settings = TaskSettings(setup="exec tail -f /dev/null", setup_timeout=timedelta(seconds=1))
    async with opened(repository, tmp_path / "home", settings=settings) as ground:
        failed = await ground.tasks.run((await ground.add("true", max_failures=1)).key)
        assert "did not end within 1 s" in str(failed.error)
        assert failed.state is T.QUEUED


async def test_the_task_comes_before_its_agent_and_that_before_the_settings(repository: Path, tmp_path: Path) -> None:
    async with opened(repository, tmp_path / "home", settings=TaskSettings(setup="echo settings > by")) as ground:
        assert await _set_up_by(ground, SHELL, None) == "settings"
        spec = CommandSpec(argv=("sh", "-c", "true"), env=("PATH",))
        manifest = ground.manager.registry.register(spec, name="prepared")
        maker = ground.manager.registry.maker(manifest.id)
        ground.manager.registry.add(manifest.evolve(setup="echo agent > by"), maker, replace=True)
        assert await _set_up_by(ground, "prepared", None) == "agent"
        assert await _set_up_by(ground, "prepared", "echo task > by") == "task"


async def _set_up_by(ground: TaskGround, agent: str, setup: str | None) -> str:
    task = await ground.done("true", agent=agent, setup=setup)
    return (ground.place(task) / "by").read_text().strip()


async def test_no_two_running_tasks_share_a_port(ground: TaskGround, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    script = f"touch begun; while ! test -e {gate}; do sleep 0.01; done"
    tasks = [await ground.add(script) for _ in range(4)]
    runs = [asyncio.create_task(ground.tasks.run(task.key)) for task in tasks]
    for task in tasks:
        await until((ground.place(task) / "begun").exists)
    ports = [(await ground.get(task)).port for task in tasks]
    gate.touch()
    await asyncio.gather(*runs)
    assert None not in ports
    assert len(set(ports)) == len(ports)


async def test_a_port_that_another_program_took_meanwhile_is_given_up(ground: TaskGround, tmp_path: Path) -> None:
    done = tmp_path / "done"
    task = await ground.add(f"test -e {done}", backoff=0)
    port = (await ground.tasks.run(task.key)).port
    assert port is not None
    done.touch()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        again = await ground.tasks.run(task.key)
    assert again.state is T.COMPLETED
    assert again.port not in {None, port}


async def test_a_setup_goes_on_when_its_program_ends_and_is_not_run_twice(repository: Path, tmp_path: Path) -> None:
    runs, gate = tmp_path / "runs", tmp_path / "go"
    setup = f"echo run >> {runs}; while ! test -e {gate}; do sleep 0.01; done"
    async with opened(repository, tmp_path / "home") as ground:
        task: Task = await ground.add("true", setup=setup)
        async with working_queue(ground):
            await until(runs.exists)

            async def is_running() -> bool:
                return (await ground.get(task)).state is TaskState.RUNNING

            await until_async(is_running)
            ground.manager.keep_agents = True
    gate.touch()
    async with opened(repository, tmp_path / "home") as later:
        assert (await later.until_state(task.key, T.COMPLETED)).is_set_up
    assert runs.read_text() == "run\n"
