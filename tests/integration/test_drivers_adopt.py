"""The manager of a real coding agent is killed in mid-work: the next one goes on, and nothing is counted twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coding_ground import Coder, coder
from isolation.ground import until

import ostler
from ostler import AgentLifecycleManager, GetInstancesFilter
from ostler.testing import ScriptedModel, run, say

__all__ = ["coder"]

pytestmark = pytest.mark.anyio

VICTIM = Path(__file__).with_name("coding_victim.py")
TEXT = "one two three four five six seven"


async def orphaned(coder: Coder, model: ScriptedModel, home: Path) -> None:
    """An agent in mid-word, whose manager was killed."""
    command = [sys.executable, str(VICTIM), str(home), str(coder.place), coder.name]
    victim = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)  # noqa: ASYNC220 - it is only started
    assert victim.stdin is not None
    victim.stdin.write(json.dumps(coder.environment(model)))
    victim.stdin.close()
    try:
        await model.asked(2)
        await asyncio.sleep(0.6)  # so that it has told of the first call, and of the second not yet
    finally:
        victim.kill()
        victim.wait()


async def finished(manager: AgentLifecycleManager) -> tuple[Any, dict[str, Any]]:
    """The answer that the first manager did not live to hear, and what was counted."""
    (record,) = await manager.get_active_instances(GetInstancesFilter())
    answer = await manager.process(record.instance_id, "Do it.", request_id="work")
    shown = await manager.details(await manager.require_instance(record.instance_id))
    return answer, shown["metrics_now"]


@pytest.mark.parametrize("when", ["while it works", "when it is done"])
async def test_the_next_manager_goes_on(coder: Coder, tmp_path: Path, when: str) -> None:
    script = [
        run("echo one > one.txt").using(input_tokens=1000, output_tokens=100),
        say(TEXT, seconds=1.5).using(input_tokens=3000, output_tokens=50, cached_tokens=1000),
    ]
    async with ScriptedModel(script) as model:
        await orphaned(coder, model, tmp_path / "home")
        if when == "when it is done":
            assert await asyncio.to_thread(model.requests[1].ended.wait, 20)
            await until(lambda: not any(coder.name in line for line in processes(coder)))
        async with ostler.open(tmp_path / "home") as manager:
            answer, metrics = await finished(manager)
            again, _ = await finished(manager)
        assert len(model.requests) == 2, "nothing was done twice"
    assert again == answer
    assert answer["message"] == TEXT
    assert answer["tokens"] == {"input": 4000, "output": 150, "cached": 1000}
    assert metrics["tokens_used"] == 3150
    assert (metrics["custom"] or {}).get("cost_usd") == answer["cost_usd"]
    assert (coder.place / "one.txt").read_text() == "one\n"
    assert not any(str(coder.place) in line for line in processes(coder))


def processes(coder: Coder) -> list[str]:
    """The command lines of all that works in its place."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cwd").resolve() == coder.place:
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found
