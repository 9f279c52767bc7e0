"""Loops: from a breakpoint to the reaction, and to the next fresh agent, beside a bare shell loop."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from pathlib import Path
from uuid import UUID

import ostler
from ostler.loop import AgentLifecycleLoop
from ostler.loop.service import Loops
from ostler.store import loops as rows
from ostler.tasks.orchestrator import TaskOrchestrator
from table import Table, middle, percentile

#: Notes when it began, says that it is blocked on a task that is not there, notes when, and ends or hangs. That spends
#: a retry without a pause, so that the next start follows at once.
_AGENT = """#!/bin/sh
date +%s%N >> @PLACE@/began
said='{"agent-T001": {"lifecycle_state": "blocked", "breakpoint": {"type": "blocked", "blocked_on": "T404"}}}'
date +%s%N >> @PLACE@/said
printf '%s' "$said" > .new && mv .new communications.json
@THEN@
"""


def loops(*, quick: bool) -> Table:
    table = Table("Loops, milliseconds", "what", "p50", "p95")
    count = 15 if quick else 60
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        reacted, followed = asyncio.run(_driven(place / "ends", count, "exit 0"))
        after_kill, renewed = asyncio.run(_driven(place / "hangs", count, "exec tail -f /dev/null"))
        bare = _bare(place / "bare", count)
    _add(table, "communications.json written, breakpoint in the log", [*reacted, *after_kill])
    _add(table, "breakpoint written, next fresh agent at work; the agent ends itself", followed)
    _add(table, "the same, the agent hangs and is ended first (grace 0)", renewed)
    _add(table, "while :; do agent < PROMPT.md; done: without record, snapshot or proof", bare)
    return table


def _add(table: Table, what: str, took: list[float]) -> None:
    table.add(what, f"{middle(took):.1f}", f"{percentile(took, 0.95):.1f}")


def _prepare(place: Path, then: str) -> Path:
    place.mkdir()
    (place / "PROMPT.md").write_text("Mend it\n")
    agent = place / "agent.sh"
    agent.write_text(_AGENT.replace("@PLACE@", str(place)).replace("@THEN@", then))
    for words in (("init", "-q", "-b", "main"), ("add", "PROMPT.md"), ("commit", "-q", "-m", "first")):
        person = ("-c", "user.name=u", "-c", "user.email=u@u")
        subprocess.run(["git", *person, *words], cwd=place, check=True)  # noqa: S607 - the user's own git
    return agent


async def _driven(place: Path, count: int, then: str) -> tuple[list[float], list[float]]:
    agent = _prepare(place, then)
    async with ostler.open(place / ".ostler") as manager:
        manager.registry.register(ostler.CommandSpec(argv=("sh", str(agent))), name="agent")
        async with TaskOrchestrator(manager) as orchestrator:
            found = Loops(orchestrator)
            loop = found.new_loop(retry_interval=0, grace=0, max_iterations=count, max_retries=count)
            await orchestrator.submit("Mend it", near=place, loop=loop)
            await AgentLifecycleLoop(orchestrator).run_agent_loop("agent", "T001")
            noted = [await _noted(manager, one.instance_id) for one in await found.iterations("T001")]
    began, said = _times(place / "began"), _times(place / "said")
    reacted = [heard - spoken for heard, spoken in zip(noted, said, strict=True)]
    return reacted, [following - spoken for following, spoken in zip(began[1:], said, strict=False)]


async def _noted(manager: ostler.AgentLifecycleManager, instance: UUID | None) -> float:
    assert instance is not None
    event, *_ = await manager.store.read(rows.signals_of, instance)
    assert event.occurred_at is not None
    return event.occurred_at.timestamp() * 1000


def _bare(place: Path, count: int) -> list[float]:
    agent = _prepare(place, "exit 0")
    script = f"n=0; while [ $n -lt {count} ]; do sh {agent} < PROMPT.md; n=$((n+1)); done"
    subprocess.run(["sh", "-c", script], cwd=place, check=True)  # noqa: S607 - the system's own
    began, said = _times(place / "began"), _times(place / "said")
    return [following - spoken for following, spoken in zip(began[1:], said, strict=False)]


def _times(path: Path) -> list[float]:
    """Milliseconds."""
    return [int(line) / 1e6 for line in path.read_text().split()]
