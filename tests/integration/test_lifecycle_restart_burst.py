"""The window against bursts: what counts in it, and whom it holds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from lifecycle_aids import Scene

from ostler.model import AgentState, RestartPolicy

pytestmark = pytest.mark.anyio


async def test_starts_by_hand_count_in_the_window_and_are_not_held_up_by_it(tmp_path: Path) -> None:
    scene = Scene(home=tmp_path)
    policy = RestartPolicy.immediate().evolve(max_retries=10, burst_limit=3)
    async with scene.open() as manager:
        one = await scene.spawn(restart_policy=policy)
        for number in range(2, 7):
            back = await manager.restart(one.instance_id)
            assert (back.state, back.attempt) == (AgentState.READY, number)
        await scene.crash(one)
        await scene.reaches(one, AgentState.FAILED)
        (wait,) = await manager.get_waits(one.instance_id)
        assert wait.reason is not None
        assert "because the limit is 3 starts in 1 min" in wait.reason
        await scene.tick(61)
        await scene.reaches(one, AgentState.READY, attempt=7)
