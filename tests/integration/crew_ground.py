"""What the tests of crews stand on: a home, a real repository, and agents that do what their task says."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from coding_ground import marked

import ostler
from ostler import (
    AgentLifecycleManager,
    AgentSpawnOptions,
    CommandSpec,
    CrewSettings,
    CrewView,
    IsolationLevel,
    MemberView,
    PromptBy,
    Supervisor,
    Task,
    TaskOrchestrator,
    TaskState,
)

SECONDS = 60.0
#: Does what the first word of its task says, and leaves traces on the stage.
SCRIPT = """
stage=$1
set -- $(head -n 1)
echo "$OSTLER_MEMBER" >> "$stage/$OSTLER_TASK.members"
ls -A "$OSTLER_WORKDIR" > "$stage/$OSTLER_TASK.found"
echo "$OSTLER_TASK by $OSTLER_MEMBER" > "$OSTLER_WORKDIR/made.txt"
case $1 in
  write) echo "wrote it" ;;
  fail) echo "it broke" >&2; exit 3 ;;
  fail-once) if mkdir "$stage/$OSTLER_TASK.failed" 2>/dev/null; then echo "it broke" >&2; exit 3; fi ;;
  crash) kill -9 $$ ;;
  hang) touch "$stage/$OSTLER_TASK.begun"; exec tail -f /dev/null ;;
  deaf) trap '' TERM INT; touch "$stage/$OSTLER_TASK.begun"; while :; do sleep 0.05; done ;;
  gate-fail) touch "$stage/$OSTLER_TASK.begun"; while [ ! -e "$stage/$OSTLER_TASK.go" ]; do sleep 0.02; done; exit 3 ;;
  gate) touch "$stage/$OSTLER_TASK.begun"; while [ ! -e "$stage/$OSTLER_TASK.go" ]; do sleep 0.02; done ;;
esac
"""


@dataclass
class Ground:
    """One home with its manager, and a supervisor where a test has opened one."""

    manager: AgentLifecycleManager
    tasks: TaskOrchestrator
    stage: Path
    project: Path

    def supervisor(self, crews: Mapping[str, CrewSettings] | None = None, **more: Any) -> Supervisor:
        return Supervisor(self.tasks, crews, **more)

    async def add(self, text: str, agent: str | None = "fixer", **more: Any) -> str:
        return (await self.tasks.submit(text, agent=agent, **{"backoff": 0, **more})).key

    async def task(self, key: str) -> Task:
        return await self.tasks.get(key)

    async def becomes(self, key: str, *states: TaskState) -> Task:
        async def there() -> bool:
            return (await self.task(key)).state in states

        await until(there, f"{key} did not become {', '.join(states)}")
        return await self.task(key)

    async def parked(self, key: str) -> Any:
        async def there() -> bool:
            return bool(await self.tasks.waits(key))

        await until(there, f"{key} was not parked")
        return (await self.tasks.waits(key))[0]

    def begun(self, key: str) -> Callable[[], bool]:
        return (self.stage / f"{key}.begun").exists

    def let_go(self, key: str) -> None:
        (self.stage / f"{key}.go").touch()

    def members_of(self, key: str) -> list[str]:
        """Who worked on it, in order."""
        file = self.stage / f"{key}.members"
        return file.read_text().split() if file.exists() else []

    async def instances(self, crew: str = "coder") -> list[ostler.AgentInstance]:
        """Of a crew, the oldest first."""
        wanted = ostler.GetInstancesFilter(crew=crew, include_terminated=True, limit=1000)
        return list(reversed(await self.manager.get_active_instances(wanted)))

    async def living(self) -> list[int]:
        return [pid for one in await self.instances() for pid in marked(one.instance_id)]


def coder(count: int = 1, **more: Any) -> CrewSettings:
    values: dict[str, Any] = {"backoff": timedelta(0), **more}
    return CrewSettings(agent=values.pop("agent", "fixer"), count=count, **values)


def member(crew: CrewView, name: str) -> MemberView:
    return next(one for one in crew.members if one.member == name)


async def until(is_so: Callable[[], Any], told: str = "it did not come to that", seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while True:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(told)


def register(manager: AgentLifecycleManager, stage: Path, name: str = "fixer") -> None:
    script = stage / "agent.sh"
    script.write_text(SCRIPT)
    defaults = AgentSpawnOptions(isolation_level=IsolationLevel.PROCESS)
    spec = CommandSpec(argv=("sh", str(script), str(stage)), prompt_by=PromptBy.STDIN)
    manager.registry.register(spec, name=name, defaults=defaults)


def repository(place: Path) -> Path:
    """A real one, with one commit."""
    place.mkdir(parents=True)
    (place / "readme.txt").write_text("hello\n")
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    for words in (("init", "-q", "-b", "main"), ("add", "."), (*who, "commit", "-q", "-m", "start")):
        subprocess.run(["git", *words], cwd=place, env=environment, check=True)
    return place


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Ground]:
    stage = folder / "stage"
    stage.mkdir(exist_ok=True)
    home = folder / "project" / ".ostler"
    home.parent.mkdir(exist_ok=True)
    async with ostler.open(home) as manager:
        register(manager, stage)
        tasks = TaskOrchestrator(manager)
        try:
            yield Ground(manager, tasks, stage, home.parent)
        finally:
            await tasks.close()
