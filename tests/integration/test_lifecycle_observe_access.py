"""Who may look at whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from lifecycle_aids import Scene, all_of, delivered, moves, take

from ostler.errors import AgentNotFoundError, AuthorizationError, ValidationError
from ostler.model import AgentState, ObservationOptions, Permission, Principal, Role, Tier, Workspace
from ostler.store.commands import PutRecord

pytestmark = pytest.mark.anyio

S = AgentState


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


def principal(scene: Scene, space: UUID, *, cross: bool = False, roles: tuple[Role, ...] = (Role.ADMIN,)) -> Principal:
    return Principal(
        principal_id=uuid4(),
        name="grace",
        workspace_id=space,
        roles=roles,
        permissions=(Permission.WORKSPACES_CROSS,) if cross else (),
        created_at=scene.clock.wall(),
    )


async def test_what_belongs_to_another_workspace_is_not_there(scene: Scene) -> None:
    space = Workspace(workspace_id=UUID(int=7), name="other", tier=Tier.ENTERPRISE, created_at=scene.clock.wall())
    async with scene.open() as manager:
        await manager.store.commit(PutRecord(record=space))
        instance = await scene.spawn()
        other = manager.acting_as(principal(scene, space.workspace_id))
        everything = other.observe()
        for after in (None, 0):
            stream = other.observe(instance.instance_id, after=after)
            await manager.process(instance.instance_id, "hello")
            with pytest.raises(AgentNotFoundError):
                await anext(stream)
            assert await all_of(stream) == []
        own = await other.spawn(scene.request())
        assert {one.instance_id for one in await take(everything, 2)} == {own.instance_id}
        nobody = manager.acting_as(principal(scene, instance.workspace_id or UUID(int=0), roles=()))
        for refused in (nobody.observe(), nobody.observe(instance.instance_id)):
            with pytest.raises(AuthorizationError):
                await anext(refused)


async def test_a_step_that_was_cancelled_is_no_way_in(scene: Scene) -> None:
    space = Workspace(workspace_id=UUID(int=7), name="other", tier=Tier.ENTERPRISE, created_at=scene.clock.wall())
    async with scene.open() as manager:
        await manager.store.commit(PutRecord(record=space))
        instance = await scene.spawn()
        other = manager.acting_as(principal(scene, space.workspace_id))
        for turns in range(12):
            stream = other.observe(instance.instance_id, after=0)
            step = asyncio.ensure_future(take(stream, 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            if step.cancelled():
                with pytest.raises(AgentNotFoundError):
                    await anext(stream)


async def test_who_may_look_across_sees_what_happens_there(scene: Scene) -> None:
    space = Workspace(workspace_id=UUID(int=7), name="other", tier=Tier.ENTERPRISE, created_at=scene.clock.wall())
    async with scene.open() as manager:
        await manager.store.commit(PutRecord(record=space))
        instance = await scene.spawn()
        await delivered(scene)
        auditor = manager.acting_as(principal(scene, space.workspace_id, cross=True))
        live = auditor.observe(instance.instance_id)
        history = auditor.observe(instance.instance_id, after=0)
        await manager.terminate(instance.instance_id)
        assert moves(await all_of(live)) == [S.TERMINATING, S.TERMINATED]
        assert moves(await all_of(history)) == [S.READY, S.TERMINATING, S.TERMINATED]


async def test_what_does_not_exist_cannot_be_watched(scene: Scene) -> None:
    async with scene.open() as manager:
        with pytest.raises(AgentNotFoundError):
            await anext(manager.observe(uuid4()))
        with pytest.raises(ValidationError, match="after"):
            manager.observe(after=-1)
        with pytest.raises(ValidationError, match="buffer_capacity"):
            manager.observe(options=ObservationOptions(buffer_capacity=0))
        with pytest.raises(ValidationError):
            await anext(manager.observe(after=10**9))
