"""Real Claude Code, Codex and pi do tasks on a scripted model: accepted, stopped, frozen, killed, limited, cancelled.

Whatever happens to them, nothing lives on, what they wrote is there, and the record says what happened.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from coding_ground import CODEX_ARGUMENTS, PATH, PI_SETTINGS, kill_program, marked, require_program
from isolation.ground import until
from tasks_ground import FILES, T, TaskGround, ground, until_async
from workdirs_ground import make_repository

from ostler import AgentHandle, Task
from ostler.drivers import NAMES, spec_for
from ostler.testing import ScriptedModel, hang, run, say, usage_limit

__all__ = ["ground"]

pytestmark = pytest.mark.anyio
EDIT = run("sed -i 's/^one$/ONE/' a.txt")
HALF = run("echo half > half.txt")
#: Starts a process in the tool's own group and one in a session of its own, and waits.
KIDS = run("echo half > half.txt; setsid tail -f /dev/null & tail -f /dev/null & tail -f /dev/null")


@dataclass
class Coder:
    """A coding agent that works for one user, with a model that says what the test wrote down."""

    name: str
    ground: TaskGround
    model: ScriptedModel

    async def add(self, text: str = "Mend a.txt.", **more: object) -> Task:
        return await self.ground.add(text, agent=f"my-{self.name}", **more)

    @asynccontextmanager
    async def at_work(self, task: Task) -> AsyncIterator[tuple[AgentHandle, asyncio.Task[Task]]]:
        """It has written half of its work, and its model has heard of that."""
        running = asyncio.create_task(self.ground.tasks.run(task.key))
        await until((self.ground.place(task) / "half.txt").exists)
        agent = self.ground.manager.handle((await self.ground.get(task)).instance_id or "")
        yield agent, running
        assert marked(agent.instance_id) == {}, "something of it lives on"
        assert (self.ground.place(task) / "half.txt").read_text() == "half\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "project", {**FILES, ".pi/settings.json": json.dumps(PI_SETTINGS)})


@pytest.fixture(params=NAMES)
async def coder(request: pytest.FixtureRequest, ground: TaskGround) -> AsyncIterator[Coder]:
    name = request.param
    require_program(name)
    async with ScriptedModel([EDIT, say("I mended it.")]) as model:
        spec = spec_for(name, home="private", arguments=CODEX_ARGUMENTS if name == "codex" else ())
        variables = {**model.environment(name), "PATH": PATH}
        ground.manager.registry.register(spec.evolve(set_env=variables), name=f"my-{name}")
        yield Coder(name, ground, model)


async def test_it_does_a_task_that_is_proven_and_accepted(coder: Coder) -> None:
    ground = coder.ground
    coder.model.set_script([EDIT, say("I mended it.\nAll is well.").using(input_tokens=200, output_tokens=30)])
    task = await coder.add(checks=["grep -q ONE a.txt"])
    done = await ground.tasks.run(task.key)
    assert done.state is T.COMPLETED, done.error
    assert (done.summary, done.changed_files) == ("I mended it.\nAll is well.", ("a.txt",))
    assert (done.tokens > 0, done.cost_usd is None) == (True, coder.name == "codex")
    assert done.session
    assert "Mend a.txt." in coder.model.requests[0].prompt
    await ground.tasks.accept(task.key)
    assert ground.shown("a.txt") == "ONE\ntwo\nthree\n"
    assert ground.git("status", "--porcelain") == ""


async def test_it_is_told_what_was_said_of_its_work(coder: Coder) -> None:
    task = await coder.add()
    await coder.ground.tasks.run(task.key)
    await coder.ground.tasks.send_back(task.key, "Line two as well.")
    coder.model.set_script([run("sed -i 's/^two$/TWO/' a.txt"), say("Now both.")])
    done = await coder.ground.tasks.run(task.key)
    assert "> Line two as well." in coder.model.requests[-1].prompt
    assert (done.attempt, done.summary) == (2, "Now both.")
    assert (coder.ground.place(task) / "a.txt").read_text() == "ONE\nTWO\nthree\n"


async def test_stopped_in_mid_work_it_is_held_back(coder: Coder) -> None:
    coder.model.set_script([HALF, hang()])
    task = await coder.add()
    async with coder.at_work(task) as (agent, running):
        await coder.model.asked(2)
        assert marked(agent.instance_id)
        await agent.stop(reason="enough")
        done = await running
    assert (done.state, done.is_held, done.failures) == (T.QUEUED, True, 0)
    assert done.error == "its agent was stopped: enough"


async def test_frozen_in_mid_work_it_goes_on(coder: Coder) -> None:
    coder.model.set_script([HALF, say("one two three four five six seven eight", seconds=1.0)])
    task = await coder.add()
    async with coder.at_work(task) as (agent, running):
        await coder.model.asked(2)
        await agent.pause("freeze")
        assert (await coder.ground.get(task)).state is T.RUNNING
        assert (await agent.record()).state == "suspended"
        await agent.resume()
        done = await running
    assert (done.state, done.attempt) == (T.COMPLETED, 1)
    assert done.summary == "one two three four five six seven eight"


async def test_killed_in_mid_work_it_is_done_again_from_what_is_there(coder: Coder) -> None:
    coder.model.set_script([KIDS, say("never")])
    task = await coder.add()
    async with coder.at_work(task) as (agent, running):
        await until(lambda: sum("tail -f" in line for line in marked(agent.instance_id).values()) >= 3)
        kill_program(agent.instance_id)
        done = await running
    assert (done.state, done.failures) == (T.QUEUED, 1)
    assert "was killed by SIGKILL" in (done.error or "")
    coder.model.set_script([run("cat half.txt > whole.txt"), say("Done.")])
    again = await coder.ground.tasks.run(task.key)
    assert (again.state, again.attempt, again.changed_files) == (T.COMPLETED, 2, ("half.txt", "whole.txt"))


async def test_limited_in_mid_work_it_waits_and_goes_on_in_its_session(coder: Coder) -> None:
    resets = (datetime.now(UTC) + timedelta(hours=3)).replace(microsecond=0)
    coder.model.set_script([HALF, usage_limit(resets_at=resets)])
    task = await coder.add()
    async with coder.at_work(task) as (_, running):
        done = await running
    assert (done.state, done.failures, done.is_held) == (T.QUEUED, 0, False)
    assert done.session
    (wait,) = await coder.ground.tasks.waits(task.key)
    assert wait.kind == "quota"
    assert (wait.reason or "").startswith("usage limit until ")
    assert wait.due_at is not None
    if coder.name == "pi":  # a server of this kind tells no time
        assert wait.due_at > datetime.now(UTC) + timedelta(minutes=50)
    else:
        assert abs(wait.due_at - resets) <= timedelta(minutes=1)
    await coder.ground.tasks.answer(wait.wait_id, "renewed")
    coder.model.set_script([run("cat half.txt > whole.txt"), say("Done.")])
    again = await coder.ground.tasks.run(task.key)
    assert again.state is T.COMPLETED, again.error
    assert again.changed_files == ("half.txt", "whole.txt")
    messages = coder.model.requests[-1].body.get("messages") or coder.model.requests[-1].body["input"]
    assert "half.txt" in str(messages), "its model is told what was done before the limit"


async def test_cancelled_in_mid_work_it_is_gone(coder: Coder) -> None:
    coder.model.set_script([KIDS, say("never")])
    task = await coder.add()
    async with coder.at_work(task) as (_, running):
        done = await coder.ground.tasks.cancel(task.key)
        await running
    assert (done.state, done.error) == (T.REJECTED, "cancelled")

    async def has_let_go() -> bool:
        return all(request.ended.is_set() for request in coder.model.requests)

    await until_async(has_let_go)
