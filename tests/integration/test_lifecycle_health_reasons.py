"""Why an agent is unwell: the record keeps up with the reason, and a probe that cannot be made is told of."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lifecycle_aids import Scene
from lifecycle_ground import logged

from ostler.model import AgentHealthChangedEvent, HealthCheckConfig, HealthState, ProbeType
from ostler.store.commands import ReportHealth

pytestmark = pytest.mark.anyio

SECOND = timedelta(seconds=1)
CUSTOM = HealthCheckConfig(probe=ProbeType.CUSTOM, interval=SECOND, timeout=SECOND)
MISSPELT = CUSTOM.evolve(probe=ProbeType.COMMAND, target="no-such-program --check")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def evidence(scene: Scene, instance_id: object) -> str:
    return " | ".join((await scene.manager.why(instance_id)).evidence)  # type: ignore[arg-type]  # a scene hands on what it was given


async def test_a_new_reason_for_the_same_health_is_kept(scene: Scene) -> None:
    scene.stage.health = "first reason"
    async with scene.open():
        one = await scene.spawn(health_check=CUSTOM)
        await scene.tick(6)
        before = (await scene.record(one)).health
        assert (before.state, before.details) == (HealthState.UNHEALTHY, "first reason")
        scene.stage.health = "second reason"
        await scene.tick(2)
        after = (await scene.record(one)).health
        assert after.details == "second reason"
        assert after.consecutive_failures > before.consecutive_failures
        assert after.checked_at is not None
        assert before.checked_at is not None
        assert after.checked_at > before.checked_at
        assert len(await scene.events(one, AgentHealthChangedEvent)) == 1


async def test_a_reason_that_changes_with_every_look_is_not_written_with_every_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.stage.health = "unwell"
    async with scene.open() as manager:
        one = await scene.spawn(health_check=CUSTOM)
        await scene.tick(6)
        written: list[ReportHealth] = []
        commit = manager.store.commit

        async def counting(command: object) -> object:
            if isinstance(command, ReportHealth):
                written.append(command)
            return await commit(command)  # type: ignore[arg-type]  # whatever is committed passes through

        monkeypatch.setattr(manager.store, "commit", counting)
        for number in range(60):
            scene.stage.health = f"{number} requests wait"
            await scene.tick(1)
        assert 4 <= len(written) <= 7
        # Who asks why is told of the latest look, written or not.
        assert "59 requests wait" in await evidence(scene, one.instance_id)
        assert (await scene.record(one)).health.details != "59 requests wait"


async def test_a_probe_that_cannot_be_made_is_told_of_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async with scene.open():
        one = await scene.spawn(health_check=MISSPELT)
        await scene.tick(10)
        health = (await scene.record(one)).health
        assert health.state is HealthState.UNKNOWN
        assert health.details == "the probe could not be made: cannot run no-such-program: No such file or directory"
        assert health.checked_at is not None
        assert [line["error"] for line in logged(caplog, "look_failed")] == [health.details]
        assert "the probe could not be made: cannot run no-such-program" in await evidence(scene, one.instance_id)
