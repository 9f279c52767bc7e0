"""Hooks of the daemon: a command or a notification when a person is needed, at a failure, and when nobody works."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tasks_ground import TaskGround, ground, opened, repository, until_async, working_queue

import ostler
from ostler import AgentSpawnOptions, InboxKind, SpawnRequest, TaskSettings, TaskState
from ostler.daemon.hooks import Hooks, find_notifier
from ostler.definitions.project import DaemonSettings
from ostler.home import DAEMON_LOG, project_of
from ostler.tasks.attempt import DAEMON_STOPPED

__all__ = ["ground", "repository"]  # fixtures
pytestmark = pytest.mark.anyio


class Told:
    """What hooks have written, a line each time."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "told"

    def command(self, name: str) -> str:
        script = f'echo {name} "$OSTLER_TASK$OSTLER_AGENT: $OSTLER_REASON" >> {shlex.quote(str(self.file))}'
        return shlex.join(["sh", "-c", script])

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []

    async def reach(self, count: int) -> list[str]:
        async def has_come() -> bool:
            return len(self.lines) >= count

        await until_async(has_come, lambda: f"only {self.lines}")
        return self.lines


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


@asynccontextmanager
async def hooked(ground: TaskGround, told: Told, *names: str, notify: bool = False) -> AsyncIterator[Hooks]:
    commands = {name: told.command(name) for name in names}
    on_change = commands.pop("on-change", None)
    hooks = Hooks(ground.tasks, DaemonSettings.from_dict({**commands, "notify": notify}), on_change)
    hooks.start()
    try:
        yield hooks
    finally:
        await hooks.close()


async def start_false(ground: TaskGround, name: str, **job: bool) -> None:
    """An agent that fails for good."""
    false = ground.manager.registry.register(ostler.CommandSpec(argv=("false",)), name="false", replace=True)
    options = AgentSpawnOptions(name=name, isolation_level=ostler.IsolationLevel.PROCESS)
    request = SpawnRequest(agent_definition_id=false.id, options=options, job={"request": "", **job})
    await ground.manager.handle((await ground.manager.spawn(request)).instance_id).ended()


async def test_idle_is_told_once_when_the_last_task_is_done(repository: Path, tmp_path: Path, told: Told) -> None:
    gate, places = tmp_path / "gate", TaskSettings(at_once=2)
    async with (
        opened(repository, tmp_path / "home", settings=places) as ground,
        working_queue(ground),
        hooked(ground, told, "on-idle"),
    ):
        first = await ground.add("echo 1 > one.txt")
        await ground.add("echo never", hold=True)
        await ground.add("echo later", depends_on=[first.key])
        assert await told.reach(1) == ["on-idle : the queue is empty and nobody works"]
        slow = await ground.add(f"until test -e {gate}; do sleep 0.05; done; echo 2 > two.txt")
        await ground.until_state(slow, TaskState.RUNNING)
        quick = await ground.add("echo 3 > three.txt")
        await ground.until_state(quick, TaskState.COMPLETED)
        assert len(told.lines) == 1, "one is still at work"
        gate.touch()
        assert len(await told.reach(2)) == 2
        # The one that waited for it is begun, and the queue becomes empty once more.
        await ground.tasks.accept(first.key)
        assert len(await told.reach(3)) == 3


async def test_idle_waits_for_agents_and_for_retries(ground: TaskGround, told: Told) -> None:
    gate = ground.home.parent / "gate"
    async with working_queue(ground), hooked(ground, told, "on-idle", "on-change"):
        waiting = ["sh", "-c", f"until test -e {gate}; do sleep 0.05; done"]
        agent = await ground.manager.start(waiting, name="busy", isolation="process")
        asking = asyncio.ensure_future(agent.ask(""))
        await ground.add("test -e tried || { touch tried; exit 3; }", backoff="1s")
        await told.reach(5)
        await ground.add("echo never", hold=True)  # what is told of it comes after what would be told before
        assert {line.split()[0] for line in await told.reach(6)} == {"on-change"}
        gate.touch()
        await asking
        assert (await told.reach(7))[6].startswith("on-idle ")


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_a_daemon_that_stops_does_not_tell_that_nobody_works(
    ground: TaskGround, told: Told, *, is_stopping: bool
) -> None:
    async with working_queue(ground) as queue, hooked(ground, told, "on-idle", "on-change") as hooks:
        task = await ground.add("exec sleep 600")
        running = await ground.until_state(task, TaskState.RUNNING)

        async def has_agent() -> bool:
            nonlocal running
            running = await ground.get(task)
            return running.instance_id is not None

        await until_async(has_agent)
        queue.draining, hooks.is_stopping = True, is_stopping
        await ground.manager.handle(str(running.instance_id)).stop(reason=DAEMON_STOPPED)
        await ground.until_state(task, TaskState.QUEUED)
        await told.reach(3)
        await ground.add("echo never", hold=True)  # told after what is told of the first
        lines = await told.reach(4 if is_stopping else 5)
    assert any(line.startswith("on-idle ") for line in lines) is not is_stopping


async def test_failures_are_told_of_agents_for_good_and_of_tasks_that_are_parked(
    ground: TaskGround, told: Told
) -> None:
    async with working_queue(ground), hooked(ground, told, "on-failed", "on-wait"):
        await start_false(ground, "seen", attended=True)
        await start_false(ground, "nightly")
        assert await told.reach(1) == ["on-failed nightly: false failed with exit code 1 and said nothing"]
        task = await ground.add("exit 3", max_failures=2, backoff="0s")
        lines = (await told.reach(3))[1:]
    assert [line.partition(", at last")[0] for line in lines] == [
        f"on-wait {task.key}: failed 2 times",
        f"on-failed {task.key}: failed 2 times",
    ]


async def test_a_shell_runs_a_command_in_the_project_and_the_inbox_names_one_that_fails(ground: TaskGround) -> None:
    home = ground.manager.require_home()
    project = project_of(home)
    settings = DaemonSettings(on_failed="echo begun $OSTLER_AGENT >> begun.txt && ./hook.sh", notify=False)
    hooks = Hooks(ground.tasks, settings, None)
    hooks.start()

    async def rows() -> list[ostler.InboxRow]:
        return [row for row in await ground.manager.inbox() if row.kind is InboxKind.HOOK]

    async def has_row() -> bool:
        return bool(await rows())

    async def has_none() -> bool:
        return not await has_row()

    try:
        await start_false(ground, "first")
        await until_async(has_row)
        assert (project / "begun.txt").read_text() == "begun first\n"
        (row,) = await rows()
        assert (row.key, row.next) == ("on-failed", f"tail {home / DAEMON_LOG}")
        assert row.sentence.startswith("on-failed ended with exit code 127; mend it in ostler.toml")
        script = project / "hook.sh"
        script.write_text("#!/bin/sh\nexit 0\n")
        script.chmod(0o755)
        await start_false(ground, "second")
        await until_async(has_none)
    finally:
        await hooks.close()


async def test_a_desktop_is_told_what_no_command_is_named_for(
    ground: TaskGround, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    notifier = programs / "notify-send"
    notifier.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(told.file))}\n')
    notifier.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere")
    async with working_queue(ground), hooked(ground, told, "on-failed", notify=True):
        await start_false(ground, "nightly")
        await ground.add("echo 1 > one.txt")
        lines = await told.reach(2)
        assert lines[0].startswith("on-failed nightly: ")
        assert lines[1] == "--app-name=Ostler -- Ostler the queue is empty and nobody works"
    async with working_queue(ground), hooked(ground, told, "on-failed", notify=False):
        await ground.until_state(await ground.add("echo 2 > two.txt"), TaskState.COMPLETED)
        await start_false(ground, "again")
        assert (await told.reach(3))[2].startswith("on-failed again: "), "notifications are off"


def test_a_notifier_needs_a_program_and_a_session(tmp_path: Path) -> None:
    assert find_notifier({"PATH": str(tmp_path), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/x"}) is None
    for name in ("notify-send", "osascript"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "osascript").unlink()
    assert find_notifier({"PATH": str(tmp_path)}) is None
    words = find_notifier({"PATH": str(tmp_path), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/x"})
    assert words == [str(tmp_path / "notify-send"), "--app-name=Ostler", "--", "Ostler"]
    (tmp_path / "osascript").touch(mode=0o755)
    words = find_notifier({"PATH": str(tmp_path)})
    assert words is not None
    assert (words[0], words[-1]) == (str(tmp_path / "osascript"), "Ostler")
