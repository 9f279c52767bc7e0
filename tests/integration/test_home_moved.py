"""A home that is moved goes on where it is now; a copy of one adopts nothing; workspaces do not share workdirs."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from tasks_ground import FILES, T, opened, until_async, working_queue
from workdirs_ground import git, make_repository

from ostler import AgentState, Seams, Tier, Workspace
from ostler.lifecycle.identity import read_identity
from ostler.model.access import OWNER
from ostler.store import workspaces
from ostler.tasks import retire
from ostler.workdirs import Workdirs

pytestmark = pytest.mark.anyio
EDIT = "sed -i 's/^one$/ONE/' a.txt; echo new > made.txt"
#: The first attempt waits for ever, the next one ends.
SLOW = "if [ -e began ]; then echo done > out.txt; else touch began; echo $$ > pid; exec sleep 1000; fi"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = make_repository(tmp_path / "project", {**FILES, ".gitignore": ".ostler/\nbegan\npid\n"})
    (project / ".ostler").mkdir()
    return project


def move(project: Path) -> Path:
    return project.rename(project.with_name("project two"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "older"])
async def test_finished_tasks_of_a_moved_project_are_accepted_and_sent_back(project: Path, noted: bool) -> None:
    async with opened(project, project / ".ostler") as ground:
        assert ground.manager.home_notice is None
        first, second, retired = [await ground.done(EDIT) for _ in range(3)]
        await ground.tasks.retire(retired.key)
    if not noted:  # a home that was made before homes noted their place
        (project / ".ostler" / "identity.json").unlink()
    moved = move(project)
    async with opened(moved, moved / ".ostler") as ground:
        assert f"the home was moved from {project}/.ostler to {moved}/.ostler" in str(ground.manager.home_notice)
        await ground.tasks.recover_agents()
        assert "agent" in git(ground.place(first), "log", "-1", "--format=%ae"), "its repository finds its objects"
        accepted = await ground.tasks.accept(first.key)
        assert accepted.accepted is not None
        assert accepted.accepted["repository"] == str(moved / ".git")
        assert (moved / "made.txt").read_text() == "new\n"
        await ground.tasks.undo(first.key)
        await ground.tasks.send_back(second.key, "again")
        again = await ground.tasks.run(second.key)
        assert (again.state, again.attempt) == (T.COMPLETED, 2)
        assert (await ground.tasks.accept(second.key)).state is T.ACCEPTED
        back = await ground.tasks.unretire(retired.key)
        assert back.workdir is not None
        assert back.workdir["path"] == str(ground.place(retired))
        assert "agent" in git(ground.place(retired), "log", "-1", "--format=%ae")
    assert not project.exists(), "nothing is made again at the old place"
    async with opened(moved, moved / ".ostler") as ground:
        assert ground.manager.home_notice is None


async def test_a_running_task_of_a_moved_project_is_recovered_there(project: Path) -> None:
    async with opened(project, project / ".ostler") as ground:
        task = await ground.add(SLOW)
        async with working_queue(ground):
            pid_file = ground.place(task) / "pid"
            await until_async(lambda: _is_written(pid_file))
            pid = int(pid_file.read_text())
            ground.manager.keep_agents = True
    assert is_alive(pid)
    moved = move(project)
    async with opened(moved, moved / ".ostler") as ground:
        assert "its agents, which knew the old place, were ended" in str(ground.manager.home_notice)
        async with working_queue(ground):
            done = await ground.until_state(task, T.COMPLETED)
        assert (done.failures, (ground.place(task) / "out.txt").read_text()) == (0, "done\n")
        assert not is_alive(pid)
    assert not project.exists()


async def _is_written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


async def test_a_copied_home_adopts_nothing_and_says_so(project: Path) -> None:
    async with opened(project, project / ".ostler") as ground, working_queue(ground):
        running = await ground.add(SLOW)
        pid_file = ground.place(running) / "pid"
        await until_async(lambda: _is_written(pid_file))
        pid = int(pid_file.read_text())
        waiting = await ground.add("true", hold=True)
        waiting = await ground.add("true", depends_on=[waiting.key])
        copied = project.with_name("copy")
        await asyncio.to_thread(lambda: subprocess.run(["cp", "-a", project, copied], check=True))
        async with opened(copied, copied / ".ostler") as other:
            assert "is a copy of the home" in str(other.manager.home_notice)
            for task in (running, waiting):
                held = await other.get(task)
                assert (held.state, held.is_held) == (T.QUEUED, True)
            record = (await ground.get(running)).instance_id
            assert record is not None
            instance = await other.manager.get_instance(record)
            assert instance is not None
            assert instance.state is AgentState.FAILED
            await other.tasks.requeue(running.key)
            done = await other.tasks.run(running.key)
            assert done.workdir is not None
            assert done.workdir["path"] == str(copied / ".ostler" / "tasks" / running.key)
            assert (await other.tasks.accept(running.key)).state is T.ACCEPTED
        assert is_alive(pid), "what runs in the other home runs on"
        assert (await ground.get(running)).state is T.RUNNING
        assert not (project / "out.txt").exists()
        ids = {read_identity(place / ".ostler")["id"] for place in (project, copied)}
        assert len(ids) == 2
        await ground.tasks.cancel(running.key)


async def test_an_accept_that_was_cut_off_is_finished_where_the_project_is_now(project: Path) -> None:
    def cut_off(point: str) -> None:
        if point == "review.ref.after":
            raise RuntimeError(point)

    async with Workdirs(project / ".ostler", Seams(fault=cut_off)) as workdirs:
        workdir = await workdirs.plan("T1", near=project)
        await workdirs.prepare(workdir)
        (Path(workdir.path) / "a.txt").write_text("agent\n")
        snapshot = await workdirs.snapshot(workdir, "one")
        with pytest.raises(RuntimeError):
            await workdirs.accept(workdir, snapshot, message="m")
    assert (project / ".git" / "index.lock").exists()
    moved = move(project)
    async with Workdirs(moved / ".ostler") as workdirs:
        assert await workdirs.recover() == []
    assert (moved / "a.txt").read_text() == "agent\n"
    assert git(moved, "status", "--porcelain") == ""


async def test_the_same_home_by_another_path_is_neither_moved_nor_copied(project: Path, tmp_path: Path) -> None:
    async with opened(project, project / ".ostler"):
        pass
    (tmp_path / "link").symlink_to(project)
    async with opened(project, tmp_path / "link" / ".ostler") as ground:
        assert ground.manager.home_notice is None


async def test_workdirs_of_two_workspaces_do_not_collide(project: Path) -> None:
    space = Workspace(workspace_id=UUID(int=7), name="other", tier=Tier.ENTERPRISE, created_at=OWNER.created_at)
    async with opened(project, project / ".ostler") as ground:
        await ground.manager.store.run(workspaces.put_workspace, space)
    async with opened(project, project / ".ostler") as ground:
        other = ground.tasks.acting_as(ground.manager.acting_as(OWNER.evolve(workspace_id=space.workspace_id)))
        here = await ground.done("echo here > made.txt")
        there = await other.run((await other.submit("echo there > made.txt", agent="shell", near=project)).key)
        assert (here.key, there.key) == ("T001", "T001")
        assert here.workdir is not None
        assert there.workdir is not None
        assert here.workdir["path"] != there.workdir["path"]
        for verbs, key, text in ((ground.tasks, here.key, "here"), (other, there.key, "there")):
            assert f"+{text}" in await verbs.diff(key)
        assert await ground.tasks.tasks.workdirs.orphans({here.workdir["key"], there.workdir["key"]}) == []
        await retire.collect(ground.tasks.tasks)
        await ground.tasks.retire(here.key)
        await other.retire(there.key)
        back = await other.unretire(there.key)
        assert back.workdir == there.workdir
        assert (Path(there.workdir["path"]) / "made.txt").read_text() == "there\n"
