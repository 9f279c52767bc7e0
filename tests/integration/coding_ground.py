"""What the tests of real coding agents stand on: the programs, a scripted model, and a look at what lives on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import ostler
from ostler import AgentHandle, AgentLifecycleManager
from ostler.drivers import NAMES, spec_for
from ostler.testing import ScriptedModel

CACHE = Path(os.environ.get("OSTLER_AGENTS_DIR") or Path.home() / ".cache" / "ostler" / "agents") / "bin"
PATH = f"{CACHE}:{os.environ['PATH']}"
#: pi tries twelve times, which takes 20 s, unless its settings say otherwise.
PI_SETTINGS = {"retry": {"enabled": False, "provider": {"maxRetries": 0}}}
#: Of a server that is not OpenAI's own, Codex would try again too.
CODEX_ARGUMENTS = (
    "-c",
    "model_providers.ostler.request_max_retries=0",
    "-c",
    "model_providers.ostler.stream_max_retries=0",
)


def require_program(name: str) -> None:
    """Skip where it is not installed; in CI that is a failure."""
    if shutil.which(name, path=PATH) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed; run `make agents`")


@dataclass
class Coder:
    """One coding agent: how it is defined, and with which variables it is started."""

    name: str
    place: Path

    @property
    def definition(self) -> str:
        return f"my-{self.name}"

    def register(self, manager: AgentLifecycleManager) -> None:
        spec = spec_for(self.name, home="private", arguments=CODEX_ARGUMENTS if self.name == "codex" else ())
        manager.registry.register(spec, name=self.definition)

    def environment(self, model: ScriptedModel) -> dict[str, str]:
        return {**model.environment(self.name), "PATH": PATH}

    async def start(self, manager: AgentLifecycleManager, model: ScriptedModel) -> AgentHandle:
        self.register(manager)
        return await manager.start(self.definition, workdir=str(self.place), env=self.environment(model))


@pytest.fixture(params=NAMES)
def coder(request: pytest.FixtureRequest, tmp_path: Path) -> Coder:
    require_program(request.param)
    place = tmp_path / "place"
    place.mkdir()
    if request.param == "pi":
        (place / ".pi").mkdir()
        (place / ".pi" / "settings.json").write_text(json.dumps(PI_SETTINGS))
    return Coder(request.param, place)


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[AgentLifecycleManager]:
    async with ostler.open(tmp_path / "home") as manager:
        yield manager


@asynccontextmanager
async def working(
    coder: Coder, manager: AgentLifecycleManager, model: ScriptedModel
) -> AsyncIterator[tuple[AgentHandle, asyncio.Task[object]]]:
    """An agent that has been asked, and whose model has heard of it."""
    agent = await coder.start(manager, model)
    asking = asyncio.create_task(agent.ask("Do it.", id="work"))
    try:
        await model.asked()
        yield agent, asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def marked(instance: object) -> dict[int, str]:
    """Every living process that has the instance in its environment: whatever session it has made for itself."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environ = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if f"OSTLER_INSTANCE={instance}\0".encode() in environ and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def kill_program(instance: object) -> None:
    """Kill the process that the keeper started, and only that."""
    processes = marked(instance)
    first = next(pid for pid in processes if _parent(pid) not in processes)
    os.kill(first, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
