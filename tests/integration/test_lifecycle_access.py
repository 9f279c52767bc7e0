"""Who may do what: refused by permission, blind across workspaces, and every look and act on somebody's behalf."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest
from lifecycle_ground import Crew

from ostler import (
    AgentInstance,
    AgentLifecycleManager,
    AgentNotFoundError,
    AgentSpawnedEvent,
    AgentState,
    AuthorizationError,
    InvalidOperationError,
    IsolationLevel,
    LicenseError,
    Permission,
    Role,
    SpawnRequest,
    Tier,
    WorkspaceNotFoundError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("level", [IsolationLevel.NONE], ids=str)]

_P = Permission
Act = Callable[[AgentLifecycleManager, AgentInstance], Awaitable[object]]


def _spawn(manager: AgentLifecycleManager, one: AgentInstance) -> Awaitable[object]:
    return manager.spawn(SpawnRequest(agent_definition_id=one.definition_id, options=one.spawn_options))


ACTS: tuple[tuple[Permission, Act], ...] = (
    (_P.AGENTS_SPAWN, _spawn),
    (_P.AGENTS_PROCESS, lambda manager, one: manager.process(one.instance_id, {"do": "echo"})),
    (_P.AGENTS_SUSPEND, lambda manager, one: manager.suspend(one.instance_id)),
    (_P.AGENTS_SUSPEND, lambda manager, one: manager.resume(one.instance_id)),
    (_P.AGENTS_SPAWN, lambda manager, one: manager.restart(one.instance_id)),
    (_P.AGENTS_TERMINATE, lambda manager, one: manager.terminate(one.instance_id)),
)
LOOKS: tuple[Act, ...] = (
    lambda manager, one: manager.get_instance(one.instance_id),
    lambda manager, _: manager.get_active_instances(),
    lambda manager, one: manager.get_waits(one.instance_id),
    lambda manager, one: manager.why(one.instance_id),
    lambda manager, _: manager.get_statistics(),
    lambda manager, one: anext(manager.observe(one.instance_id, after=0)),
    lambda manager, _: anext(manager.observe(after=0)),
)


async def test_a_viewer_may_look_and_do_nothing(crew: Crew) -> None:
    one = await crew.spawn()
    viewer = await crew.as_somebody(Role.VIEWER)
    for look in LOOKS:
        assert await look(viewer, one) is not None
    for permission, act in ACTS:
        with pytest.raises(AuthorizationError, match=f"somebody does not have the permission {permission}"):
            await act(viewer, one)
    assert await crew.get(one) == one


async def test_who_has_no_role_may_not_even_look(crew: Crew) -> None:
    one = await crew.spawn()
    nobody = await crew.as_somebody()
    for look in LOOKS:
        with pytest.raises(AuthorizationError, match=r"somebody does not have the permission agents\.read"):
            await look(nobody, one)


@pytest.mark.parametrize("permission", sorted({permission for permission, _ in ACTS}))
async def test_each_act_needs_its_own_permission(crew: Crew, permission: Permission) -> None:
    one = await crew.spawn()
    others = tuple(other for other in _P if other is not permission)
    somebody = await crew.as_somebody(permissions=others)
    for needed, act in ACTS:
        if needed is permission:
            with pytest.raises(AuthorizationError, match=f"the permission {permission}"):
                await act(somebody, one)


async def test_a_disabled_principal_may_do_nothing(crew: Crew) -> None:
    one = await crew.spawn()
    gone = crew.manager.principal.evolve(disabled_at=crew.clock.wall())
    with pytest.raises(AuthorizationError, match="principal owner is disabled"):
        await crew.manager.acting_as(gone).terminate(one.instance_id)


async def test_a_refusal_is_audited_with_who_and_what(crew: Crew) -> None:
    one = await crew.spawn()
    viewer = await crew.as_somebody(Role.VIEWER)
    for permission, act in ACTS:
        with pytest.raises(AuthorizationError):
            await act(viewer, one)
        entry = (await crew.audit())[-1]
        assert (entry.actor, entry.action, entry.outcome) == ("somebody", permission, "AuthorizationError")
        assert entry.subject in {f"instance:{one.instance_id}", f"definition:{one.definition_id}"}
        assert entry.correlation_id == "request-7"
        assert "does not have the permission" in (entry.detail or "")


async def test_an_instance_of_another_workspace_does_not_exist(crew: Crew) -> None:
    one = await crew.spawn()
    stranger = await crew.as_somebody(Role.ADMIN, workspace=await crew.found_workspace())
    assert await stranger.get_instance(one.instance_id) is None
    assert await stranger.get_active_instances() == []
    for _, act in ACTS[1:]:
        with pytest.raises(AgentNotFoundError) as foreign:
            await act(stranger, one)
        with pytest.raises(AgentNotFoundError) as missing:
            await act(stranger, one.evolve(instance_id=UUID(int=9)))
        assert str(foreign.value).replace(str(one.instance_id), "x") == str(missing.value).replace(
            str(UUID(int=9)), "x"
        ), "the two must not be told apart"
    with pytest.raises(AgentNotFoundError):
        await anext(stranger.observe(one.instance_id, after=0))
    before = len(await crew.audit(stranger.principal.workspace_id))
    with pytest.raises(AgentNotFoundError):
        await stranger.terminate(one.instance_id)
    (entry,) = (await crew.audit(stranger.principal.workspace_id))[before:]
    assert (entry.action, entry.outcome) == ("agents.terminate", "AuthorizationError"), "told once, where the asker is"
    assert await crew.get(one) == one


async def test_a_wait_of_another_workspace_cannot_be_answered(crew: Crew) -> None:
    one = await crew.spawn()
    call = crew.start(one, "ask")
    wait = await crew.wait_of(one)
    stranger = await crew.as_somebody(Role.ADMIN, workspace=await crew.found_workspace())
    with pytest.raises((AgentNotFoundError, InvalidOperationError)) as foreign:
        await stranger.answer(wait.wait_id)
    with pytest.raises((AgentNotFoundError, InvalidOperationError)) as missing:
        await stranger.answer(UUID(int=9))
    assert type(foreign.value) is type(missing.value), "the two must not be told apart"
    assert str(foreign.value).replace(str(wait.wait_id), "x") == str(missing.value).replace(str(UUID(int=9)), "x")
    viewer = await crew.as_somebody(Role.VIEWER)
    with pytest.raises(AuthorizationError, match=r"agents\.process"):
        await viewer.answer(wait.wait_id)
    await crew.manager.answer(wait.wait_id, "fine")
    assert await call == ["fine", None]


async def test_who_may_look_across_looks_and_does_no_more(crew: Crew) -> None:
    one = await crew.spawn()
    room = await crew.found_workspace()
    auditor = await crew.as_somebody(Role.ADMIN, workspace=room, permissions=(_P.WORKSPACES_CROSS,))
    assert await auditor.get_instance(one.instance_id) == one
    assert await auditor.get_waits(one.instance_id) == []
    assert (await auditor.why(one.instance_id)) is not None
    for _, act in ACTS[1:]:
        with pytest.raises(AgentNotFoundError):
            await act(auditor, one)
    small = await crew.found_workspace(Tier.TEAMS, number=8)
    poorer = await crew.as_somebody(Role.ADMIN, workspace=small, permissions=(_P.WORKSPACES_CROSS,))
    assert await poorer.get_instance(one.instance_id) is None


async def test_workspaces_have_their_own_plans_counts_and_events(crew: Crew) -> None:
    room = await crew.found_workspace(Tier.CORE)
    theirs = await crew.as_somebody(Role.OPERATOR, workspace=room)
    request = crew.request()
    await crew.manager.spawn(request)
    made = [await theirs.spawn(request) for _ in range(2)]
    with pytest.raises(LicenseError, match="the core plan admits 2"):
        await theirs.spawn(request)
    await crew.manager.spawn(request)
    assert (await theirs.get_statistics()).active_instances == 2
    assert (await crew.manager.get_statistics()).active_instances == 2
    watching = theirs.observe(after=0)
    seen = {(await anext(watching)).instance_id for _ in range(4)}
    await watching.aclose()
    assert seen == {one.instance_id for one in made}


async def test_who_acts_stands_in_the_record(crew: Crew) -> None:
    operator = await crew.as_somebody(Role.OPERATOR)
    one = await operator.spawn(crew.request())
    assert one.owner_id == operator.principal.principal_id
    (spawned, *_) = await crew.events(one)
    assert isinstance(spawned, AgentSpawnedEvent)
    assert spawned.user_id == operator.principal.principal_id
    assert spawned.correlation_id == "request-7"
    own = await crew.spawn()
    assert own.owner_id == crew.manager.principal.principal_id
    await operator.terminate(own.instance_id)
    assert await crew.state(own) is AgentState.TERMINATED
    assert operator.registry is crew.manager.registry


async def test_a_workspace_that_does_not_exist_is_said_so(crew: Crew) -> None:
    lost = await crew.as_somebody(Role.ADMIN, workspace=UUID(int=404))
    with pytest.raises(WorkspaceNotFoundError, match="There is no such workspace; create it first"):
        await lost.spawn(crew.request())
