"""What the tests of loops stand on: a repository, a home, and an agent that does what its next script says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workdirs_ground import git, make_repository

import ostler
from ostler import AgentLifecycleManager, CommandSpec, LifecycleSettings, Seams, Wait
from ostler.clock import Clock, SystemClock
from ostler.errors import OstlerError
from ostler.loop import AgentLifecycleLoop, LoopResult
from ostler.loop.service import Loops
from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.audit import AuditEntry
from ostler.model.loop import Iteration
from ostler.model.task import Task
from ostler.store import audit
from ostler.store import tasks as task_rows
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.testing.clock import ManualClock

PATIENCE = 60.0
#: The words that scripts may use. Every start looks whether a process of an earlier one still lives.
WORDS = r"""
stage=@STAGE@/$OSTLER_TASK
mkdir -p "$stage"
for old in $(cat "$stage/pids" 2>/dev/null); do kill -0 "$old" 2>/dev/null && echo "$old" >> "$stage/alive"; done
echo $$ >> "$stage/pids"
number=$(wc -l < "$stage/pids")
cat "$OSTLER_PROMPT_FILE" > "$stage/prompt-$number"
put() { printf '%s' "$1" > "$stage/new" && mv "$stage/new" "${2:-communications.json}"; }
entry() {
  printf '{"agent-%s": {"lifecycle_state": "%s", "breakpoint": {"type": "%s", "task_id": "%s", "summary": "%s"%s}}}' \
    "$OSTLER_TASK" "$1" "$2" "$OSTLER_TASK" "$3" "$4"
}
complete() { put "$(entry complete task_complete "${1:-it is done}")"; }
blocked() { put "$(entry blocked blocked "${2:-I cannot go on}" ", \"blocked_on\": \"$1\"")"; }
pr() { put "$(entry waiting_pr pr_created "${1:-please look}")"; }
hang() { touch "$stage/hangs"; exec tail -f /dev/null; }
while [ ! -e "$stage/$number.sh" ] && [ "$number" -gt 1 ]; do number=$((number - 1)); done
. "$stage/$number.sh"
"""


async def until(holds: Callable[[], Any], what: str = "it did not come to that") -> None:
    """Wait for something that happens elsewhere, and by itself."""
    end = time.monotonic() + PATIENCE
    while True:
        answer = holds()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


@dataclass
class LoopGround:
    """One user with one repository; managers come and go."""

    folder: Path
    clock: Clock = field(default_factory=SystemClock)
    _opening: AbstractAsyncContextManager[AgentLifecycleManager] | None = None

    def __post_init__(self) -> None:
        self.repository = make_repository(self.folder / "repository", {"a.txt": "one\n"})
        self.home = self.repository / ".ostler"
        self.home.mkdir(mode=0o700)
        (self.repository / ".git" / "info" / "exclude").write_text(".ostler\n")
        self.stage = self.folder / "stage"
        self.stage.mkdir()
        self.program = self.stage / "agent.sh"
        self.program.write_text(WORDS.replace("@STAGE@", str(self.stage)))

    # --- managers --------------------------------------------------------------------------------

    async def open(self, **more: Any) -> None:
        settings = LifecycleSettings(**{"environment": ("PATH",), **more})
        self._opening = ostler.open(self.home, seams=Seams(clock=self.clock), settings=settings)
        self.manager = await self._opening.__aenter__()
        self.manager.registry.register(CommandSpec(argv=("sh", str(self.program))), name="fixer", replace=True)
        self.orchestrator = TaskOrchestrator(self.manager)
        self.loops = Loops(self.orchestrator)

    async def close(self, *, keep: bool = False) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self.manager.keep_agents = keep
            await self.orchestrator.close()
            await opening.__aexit__(None, None, None)

    async def reopen(self, *, keep: bool = True) -> None:
        """As a program that was killed and started again: its agents live on."""
        await self.close(keep=keep)
        await self.open()

    # --- scripts ---------------------------------------------------------------------------------

    def steps(self, *scripts: str, key: str = "T001") -> None:
        """What the first start does, the second, and so on; the last one is repeated."""
        place = self.stage / key
        place.mkdir(exist_ok=True)
        for number, script in enumerate(scripts, 1):
            (place / f"{number}.sh").write_text(script)

    def prompt(self, number: int, key: str = "T001") -> str:
        """What a start was told."""
        return (self.stage / key / f"prompt-{number}").read_text()

    def starts(self, key: str = "T001") -> int:
        try:
            return len((self.stage / key / "pids").read_text().split())
        except OSError:
            return 0

    def pids(self, key: str = "T001") -> list[int]:
        return [int(pid) for pid in (self.stage / key / "pids").read_text().split()]

    async def hangs(self, key: str = "T001") -> None:
        """Until the present start has come to its `hang`, and the task has noted its instance."""
        await until((self.stage / key / "hangs").exists, "it did not hang")
        (self.stage / key / "hangs").unlink()

        async def is_noted() -> bool:
            return (await self.task(key)).instance_id is not None

        await until(is_noted, "its instance was not noted")

    def git(self, *arguments: str) -> str:
        return git(self.repository, *arguments)

    # --- loops -----------------------------------------------------------------------------------

    async def add(self, text: str = "Mend the parser", **more: Any) -> Task:
        """`loop` are settings of the task's own."""
        given = {"grace": 0, "retry_interval": 0, **more.pop("loop", {})}
        return await self.orchestrator.submit(text, near=self.repository, loop=self.loops.new_loop(**given), **more)

    def loop(self, **more: Any) -> AgentLifecycleLoop:
        return AgentLifecycleLoop(self.orchestrator, **more)

    async def run(self, task: str | Task = "T001", *, wait: bool = True, **more: Any) -> LoopResult:
        """Within a time in which a busy machine gets anything done that these tests do."""
        async with asyncio.timeout(PATIENCE):
            return await self.loop(**more).run_agent_loop("fixer", task, wait=wait)

    @asynccontextmanager
    async def running(self, task: str = "T001", **more: Any) -> AsyncIterator[asyncio.Task[LoopResult]]:
        """A loop that goes on beside the test."""
        running = asyncio.ensure_future(self.run(task, **more))
        try:
            yield running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, OstlerError):  # its manager may be closed by now
                await running

    def advance(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)

    async def settled(self) -> None:
        """What could happen by now has happened."""
        for _ in range(5):
            await self.manager.store.run(lambda _: None)
            await asyncio.sleep(0)

    # --- looking ---------------------------------------------------------------------------------

    async def task(self, key: str = "T001") -> Task:
        return await self.orchestrator.get(key)

    async def iterations(self, key: str = "T001") -> list[Iteration]:
        return await self.loops.iterations(key)

    async def ends(self, key: str = "T001") -> list[str | None]:
        return [one.ended_by for one in await self.iterations(key)]

    async def waits(self, key: str = "T001") -> list[Wait]:
        return await self.manager.store.read(task_rows.task_waits, (await self.task(key)).task_id)

    async def wait(self, key: str = "T001") -> Wait:
        """The one that is open, as soon as there is one."""
        await until(lambda: self.waits(key), f"{key} does not wait")
        (found,) = await self.waits(key)
        return found

    async def refusals(self) -> list[AuditEntry]:
        found = await self.manager.store.read(audit.last_entries, HOME_WORKSPACE_ID, 1000)
        return [one for one in found if one.action == "task.signal" and one.outcome == "denied"]

    def nothing_lived_on(self, key: str = "T001") -> bool:
        """No start found a process of an earlier one, and none of them lives now."""
        return not (self.stage / key / "alive").exists() and not any(lives(pid) for pid in self.pids(key))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def entry(key: str = "T001", kind: str = "task_complete", **more: Any) -> dict[str, Any]:
    states = {"task_complete": "complete", "blocked": "blocked", "pr_created": "waiting_pr"}
    about = {"type": kind, "task_id": key, "summary": "said by the test", **more}
    return {f"agent-{key}": {"lifecycle_state": states.get(kind, "complete"), "breakpoint": about}}


def put(path: Path, values: Any) -> None:
    """All at once, as a careful program writes a file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(values if isinstance(values, str) else json.dumps(values))
    os.replace(new, path)  # noqa: PTH105 - as above
