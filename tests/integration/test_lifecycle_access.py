"""Who may do what, in which workspace, under which plan; what the audit keeps of it; and calls that are malformed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from lifecycle_ground import LEVELS, NONE, PROCESS, THREAD, Crew, S, at, do, logged

import ostler
from ostler import (
    HOME_WORKSPACE_ID,
    AgentEvent,
    AgentInstance,
    AgentLifecycleManager,
    AgentNotFoundError,
    AgentSpawnedEvent,
    AuditEntry,
    AuthorizationError,
    GetInstancesFilter,
    InvalidOperationError,
    IsolationLevel,
    LicenseError,
    NotFoundError,
    OstlerError,
    Permission,
    RestartPolicy,
    Role,
    SpawnRequest,
    TerminationOptions,
    Tier,
    ValidationError,
    WorkspaceNotFoundError,
)
from ostler.lifecycle.admit import SPAWN_FLAG
from ostler.model.access import OWNER
from ostler.store.audit import verify

pytestmark = pytest.mark.anyio

P = Permission
Act = Callable[[AgentLifecycleManager, AgentInstance], Awaitable[object]]


def _spawn(manager: AgentLifecycleManager, one: AgentInstance) -> Awaitable[object]:
    request = SpawnRequest(agent_definition_id=one.definition_id, options=one.spawn_options, context=one.context)
    return manager.spawn(request)


ACTS: tuple[tuple[str, Permission, Act], ...] = (
    ("spawn", P.AGENTS_SPAWN, _spawn),
    ("process", P.AGENTS_PROCESS, lambda manager, one: manager.process(one.instance_id, do("echo"))),
    ("suspend", P.AGENTS_SUSPEND, lambda manager, one: manager.suspend(one.instance_id)),
    ("resume", P.AGENTS_SUSPEND, lambda manager, one: manager.resume(one.instance_id)),
    ("restart", P.AGENTS_SPAWN, lambda manager, one: manager.restart(one.instance_id)),
    ("terminate", P.AGENTS_TERMINATE, lambda manager, one: manager.terminate(one.instance_id)),
)


async def _log(manager: AgentLifecycleManager, one: AgentInstance) -> list[str]:
    return [line.text async for line in manager.log(one.instance_id)]


LOOKS: tuple[Act, ...] = (
    lambda manager, one: manager.get_instance(one.instance_id),
    lambda manager, _: manager.get_active_instances(),
    lambda manager, one: manager.open_waits(one.instance_id),
    lambda manager, _: manager.open_waits(),
    lambda manager, one: manager.get_requests(one.instance_id),
    lambda manager, one: manager.why(one.instance_id),
    lambda manager, _: manager.get_statistics(),
    lambda manager, one: anext(manager.observe(one.instance_id, after=0)),
    lambda manager, _: anext(manager.observe(after=0)),
    _log,
)


async def record_of(crew: Crew, **more: Any) -> AgentInstance:
    return await (await crew.start(**more)).record()


# --- permissions -------------------------------------------------------------------------------------


@at(NONE)
async def test_a_viewer_may_look_and_do_nothing(crew: Crew) -> None:
    one = await record_of(crew)
    viewer = crew.as_principal(Role.VIEWER)
    for look in LOOKS:
        assert await look(viewer, one) is not None
    for _, permission, act in ACTS:
        with pytest.raises(AuthorizationError, match=f"someone does not have the permission {permission}"):
            await act(viewer, one)
    assert await crew.manager.get_instance(one.instance_id) == one


@at(NONE)
async def test_without_a_role_a_principal_may_not_even_look(crew: Crew) -> None:
    one = await record_of(crew)
    unprivileged = crew.as_principal()
    for look in LOOKS:
        with pytest.raises(AuthorizationError, match=r"someone does not have the permission agents\.read"):
            await look(unprivileged, one)


@pytest.mark.parametrize("permission", sorted({permission for _, permission, _ in ACTS}))
@at(NONE)
async def test_each_verb_needs_its_own_permission_or_agents_lifecycle(crew: Crew, permission: Permission) -> None:
    one = await record_of(crew)
    others = tuple(other for other in P if other not in {permission, P.AGENTS_LIFECYCLE})
    without, alone = crew.as_principal(permissions=others), crew.as_principal(permissions=(permission,))
    every = crew.as_principal(permissions=(P.AGENTS_LIFECYCLE,))
    for name, needed, act in ACTS:
        if needed is permission:
            with pytest.raises(AuthorizationError, match=f"the permission {permission}"):
                await act(without, one)
            for allowed in (alone, every):
                if name == "resume":
                    await crew.manager.suspend(one.instance_id)
                await act(allowed, one)
                if name == "suspend":
                    await crew.manager.resume(one.instance_id)
                if name == "terminate":
                    one = await record_of(crew)


@at(NONE)
async def test_a_disabled_principal_may_do_nothing(crew: Crew) -> None:
    one = await record_of(crew)
    with pytest.raises(AuthorizationError, match="principal someone is disabled"):
        await crew.as_principal(Role.ADMIN, disabled=True).terminate(one.instance_id)


@at(NONE)
async def test_instances_of_another_owner_need_read_all(crew: Crew) -> None:
    one = await record_of(crew)
    assert one.owner_id == crew.manager.principal.principal_id
    wanted = GetInstancesFilter(owner_id=one.owner_id)
    reader = crew.as_principal(permissions=(P.AGENTS_READ,))
    with pytest.raises(AuthorizationError, match=r"agents\.read_all"):
        await reader.get_active_instances(wanted)
    assert await reader.get_active_instances(GetInstancesFilter(owner_id=reader.principal.principal_id)) == []
    assert await reader.get_active_instances() == [], "a plain list shows no more than the filter admits"
    spawner = crew.as_principal(permissions=(P.AGENTS_READ, P.AGENTS_SPAWN))
    mine = await spawner.spawn(crew.request())
    assert [found.instance_id for found in await spawner.get_active_instances()] == [mine.instance_id]
    everyone = crew.as_principal(permissions=(P.AGENTS_READ, P.AGENTS_READ_ALL))
    assert [found.instance_id for found in await everyone.get_active_instances(wanted)] == [one.instance_id]
    listed = [found.instance_id for found in await everyone.get_active_instances()]
    assert listed == [mine.instance_id, one.instance_id]


# --- workspaces --------------------------------------------------------------------------------------


@at(NONE)
async def test_an_instance_of_another_workspace_does_not_exist(crew: Crew) -> None:
    one = await record_of(crew, name="ada")
    stranger = crew.as_principal(Role.ADMIN, workspace=await crew.found_workspace())
    assert await stranger.get_instance(one.instance_id) is None
    assert await stranger.get_instance("ada") is None
    assert await stranger.get_active_instances() == []
    assert await stranger.open_waits() == []
    missing_id = UUID(int=9)
    for name, _, act in ACTS[1:]:
        with pytest.raises(AgentNotFoundError) as foreign:
            await act(stranger, one)
        with pytest.raises(AgentNotFoundError) as missing:
            await act(stranger, one.evolve(instance_id=missing_id))
        told = str(foreign.value).replace(str(one.instance_id), "x")
        assert told == str(missing.value).replace(str(missing_id), "x"), "the two must not be told apart"
        (*_, entry) = await crew.audit(stranger.principal.workspace_id)
        assert (entry.action, entry.outcome) == (name, "AgentNotFoundError"), "told where the caller is"
    with pytest.raises(AgentNotFoundError):
        await anext(stranger.observe(one.instance_id, after=0))
    assert await crew.manager.get_instance(one.instance_id) == one


@at(NONE)
async def test_a_wait_of_another_workspace_cannot_be_answered(crew: Crew) -> None:
    agent = await crew.start()
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    stranger = crew.as_principal(Role.ADMIN, workspace=await crew.found_workspace())
    with pytest.raises(NotFoundError) as foreign:
        await stranger.answer(wait.wait_id)
    with pytest.raises(NotFoundError) as missing:
        await stranger.answer(UUID(int=9))
    assert type(foreign.value) is type(missing.value)
    assert str(foreign.value).replace(str(wait.wait_id), "x") == str(missing.value).replace(str(UUID(int=9)), "x")
    with pytest.raises(AuthorizationError, match=r"agents\.process"):
        await crew.as_principal(Role.VIEWER).answer(wait.wait_id)
    await crew.manager.answer(wait.wait_id, "fine")
    assert await call == ["fine", None]


@at(NONE)
async def test_a_principal_that_may_look_across_looks_and_does_no_more(crew: Crew) -> None:
    one = await record_of(crew)
    room = await crew.found_workspace()
    auditor = crew.as_principal(Role.ADMIN, workspace=room, permissions=(P.WORKSPACES_CROSS,))
    assert await auditor.get_instance(one.instance_id) == one
    assert await auditor.open_waits(one.instance_id) == []
    assert (await auditor.why(one.instance_id)).state is S.READY
    there = GetInstancesFilter(workspace_id=HOME_WORKSPACE_ID)
    assert await auditor.get_active_instances(there) == [one]
    assert (await auditor.get_statistics(HOME_WORKSPACE_ID)).active_instances == 1
    for _, _, act in ACTS[1:]:
        with pytest.raises(AgentNotFoundError):
            await act(auditor, one)
    small = await crew.found_workspace(Tier.TEAMS, number=8)
    poorer = crew.as_principal(Role.ADMIN, workspace=small, permissions=(P.WORKSPACES_CROSS,))
    assert await poorer.get_instance(one.instance_id) is None
    for look in (lambda: poorer.get_active_instances(there), lambda: poorer.get_statistics(HOME_WORKSPACE_ID)):
        with pytest.raises(AuthorizationError):
            await look()


@at(NONE)
async def test_workspaces_have_their_own_plans_counts_and_events(crew: Crew) -> None:
    room = await crew.found_workspace(Tier.CORE)
    theirs = crew.as_principal(Role.OPERATOR, workspace=room)
    request = crew.request()
    await crew.manager.spawn(request)
    made = [await theirs.spawn(request) for _ in range(2)]
    with pytest.raises(LicenseError, match="the core plan admits 2"):
        await theirs.spawn(request)
    await crew.manager.spawn(request)
    assert (await theirs.get_statistics()).active_instances == 2
    assert (await crew.manager.get_statistics()).active_instances == 2
    async with theirs.observe(after=0) as events:
        found = [await anext(events) for _ in range(4)]
    seen = {one.instance_id for one in found if isinstance(one, AgentEvent)}
    assert seen == {one.instance_id for one in made}


@at(NONE)
async def test_who_acts_stands_in_the_record(crew: Crew) -> None:
    operator = crew.as_principal(Role.OPERATOR)
    one = await operator.spawn(crew.request())
    assert one.owner_id == operator.principal.principal_id
    (spawned,) = await crew.events(crew.manager.handle(one.instance_id), AgentSpawnedEvent)
    assert (spawned.user_id, spawned.correlation_id) == (one.owner_id, "request-7")
    own = await record_of(crew)
    assert own.owner_id == crew.manager.principal.principal_id
    await operator.terminate(own.instance_id)
    assert operator.registry is crew.manager.registry


@at(NONE)
async def test_a_workspace_that_does_not_exist_is_said_so(crew: Crew) -> None:
    lost = crew.as_principal(Role.ADMIN, workspace=UUID(int=404))
    with pytest.raises(WorkspaceNotFoundError, match="There is no such workspace; create it first"):
        await lost.spawn(crew.request())


# --- plans -------------------------------------------------------------------------------------------


@at(THREAD)
async def test_of_many_spawns_at_once_the_plan_admits_as_many_as_it_says(crew: Crew) -> None:
    await crew.set_tier(Tier.CORE)
    spawns = await asyncio.gather(*(crew.start() for _ in range(5)), return_exceptions=True)
    refused = [one for one in spawns if isinstance(one, LicenseError)]
    assert len(refused) == 3
    assert {(one.tier, one.current, one.maximum) for one in refused} == {(Tier.CORE, 2, 2)}
    assert "terminate one, or" in str(refused[0])


@at(THREAD)
async def test_instances_above_a_lowered_plan_live_on_and_a_warning_says_so(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    agents = [await crew.start() for _ in range(4)]
    await crew.set_tier(Tier.CORE)
    with pytest.raises(LicenseError):
        await crew.start()
    for agent in agents:
        assert await agent.ask(do("echo", value=1)) == 1
    await crew.tick(601, step=60)
    await crew.tick(61, step=60)
    assert {(one["current"], one["max"]) for one in logged(caplog, "over_limit")} == {(4, 2)}


@at(THREAD)
async def test_the_feature_flag_of_a_workspace_switches_spawning_off(crew: Crew) -> None:
    agent = await crew.start()
    await crew.set_tier(Tier.ENTERPRISE, disabled_features=(SPAWN_FLAG,))
    with pytest.raises(AuthorizationError, match=r"spawning is switched off .*agents\.lifecycle\.spawn"):
        await crew.start()
    assert await agent.ask(do("echo", value=1)) == 1
    await crew.set_tier(Tier.ENTERPRISE, disabled_features=())
    await crew.start()


@at(THREAD)
async def test_a_plan_that_was_changed_by_another_program_counts_within_seconds(crew: Crew) -> None:
    home = crew.runtime.workspaces[HOME_WORKSPACE_ID]
    await crew.put_workspace(home.evolve(disabled_features=(SPAWN_FLAG,)))
    crew.runtime.workspaces[HOME_WORKSPACE_ID] = home  # as this manager knew it
    await crew.tick(6)
    with pytest.raises(AuthorizationError, match="switched off"):
        await crew.start()


# --- audit -------------------------------------------------------------------------------------------


async def by(crew: Crew, actor: str) -> list[AuditEntry]:
    return [entry for entry in await crew.audit() if entry.actor == actor]


@at(*LEVELS)
async def test_every_act_is_in_the_audit_with_who_what_and_why(crew: Crew) -> None:
    someone = crew.as_principal(Role.OPERATOR)
    one = await someone.spawn(crew.request())
    agent = someone.handle(one.instance_id)
    await agent.ask(do("echo"))
    call = crew.begin(agent.ask(do("ask")))
    wait = await crew.wait_of(agent)
    await someone.answer(wait.wait_id)
    await call
    await someone.suspend(one.instance_id, reason="lunch")
    await agent.resume()
    await agent.restart(reason="a new version")
    await agent.stop(reason="the day is over")
    entries = await by(crew, "someone")
    assert [entry.action for entry in entries] == [
        "spawn", "answer", "suspend", "resume", "restart", "terminate",
    ]  # fmt: skip
    assert {entry.outcome for entry in entries} == {"ok"}
    assert {entry.correlation_id for entry in entries} == {"request-7"}
    assert {entry.subject for entry in entries} == {f"instance:{one.instance_id}", f"wait:{wait.wait_id}"}
    details = [entry.detail or "" for entry in entries]
    for detail, word in zip(details[2:], ("lunch", "", "a new version", "the day is over"), strict=True):
        assert word in detail
    report = await crew.manager.store.read(verify, HOME_WORKSPACE_ID)
    assert report.is_sound, report.faults
    assert report.entries == len(await crew.audit())


@at(NONE)
async def test_every_refusal_is_audited_once(crew: Crew) -> None:
    agent = await crew.start()
    await agent.stop()
    before = len(await crew.audit())
    manager, unknown = crew.manager, uuid4()
    refused: list[tuple[str, str, str]] = []

    async def expect(act: str, about: str, kind: type[OstlerError], work: Awaitable[object]) -> None:
        with pytest.raises(kind):
            await work
        refused.append((act, about, kind.__name__))

    ended, over = f"instance:{agent.instance_id}", InvalidOperationError
    for wrong, kind in ((unknown, AgentNotFoundError), (UUID(int=0), ValidationError)):
        await expect("spawn", f"definition:{wrong}", kind, manager.spawn(SpawnRequest(agent_definition_id=wrong)))
    await expect("process", ended, over, agent.ask({}))
    await expect("suspend", ended, over, agent.pause())
    await expect("resume", ended, over, agent.resume())
    await expect("restart", ended, over, agent.restart())
    await expect("terminate", ended, over, agent.stop())
    await expect("terminate", f"instance:{unknown}", AgentNotFoundError, manager.terminate(unknown))
    await expect("answer", f"wait:{unknown}", NotFoundError, manager.answer(unknown))
    living = await crew.start()
    await crew.audit()
    await expect("resume", f"instance:{living.instance_id}", over, living.resume())
    entries = [entry for entry in (await crew.audit())[before:] if entry.outcome != "ok"]
    assert [(entry.action, entry.subject, entry.outcome) for entry in entries] == refused
    assert {entry.actor for entry in entries} == {"owner"}
    assert (await manager.store.read(verify, HOME_WORKSPACE_ID)).is_sound


@at(NONE)
async def test_an_unauthorized_verb_is_audited_with_who_and_what(crew: Crew) -> None:
    one = await record_of(crew)
    viewer = crew.as_principal(Role.VIEWER)
    for name, _, act in ACTS:
        with pytest.raises(AuthorizationError):
            await act(viewer, one)
        entry = (await crew.audit())[-1]
        assert (entry.actor, entry.action, entry.outcome) == ("someone", name, "AuthorizationError")
        assert entry.subject in {f"instance:{one.instance_id}", f"definition:{one.definition_id}"}
        assert entry.correlation_id == "request-7"
        assert "does not have the permission" in (entry.detail or "")


@at(NONE)
async def test_what_the_plan_refuses_is_audited_and_counted_once(crew: Crew) -> None:
    await crew.set_tier(Tier.CORE)
    await crew.start()
    await crew.start()
    before = len(await crew.audit())
    with pytest.raises(LicenseError):
        await crew.start()
    with pytest.raises(LicenseError):
        await crew.start(restart_policy=RestartPolicy())
    entries = [entry for entry in (await crew.audit())[before:] if entry.action == "spawn"]
    assert [entry.outcome for entry in entries] == ["LicenseError"] * 2
    assert "2 are active" in (entries[0].detail or "")
    assert crew.metric("ostler_lifecycle_license_rejections_total") == 2
    assert crew.metric("ostler_lifecycle_spawn_failures_total") == 2


@at(NONE)
async def test_reads_and_granted_requests_are_not_audited(crew: Crew) -> None:
    one = await record_of(crew)
    before = len(await crew.audit())
    await crew.manager.process(one.instance_id, do("echo"))
    for look in LOOKS:
        await look(crew.manager, one)
    assert len(await crew.audit()) == before


# --- malformed calls ---------------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (None, 5, 1.5, b"b", [], {}, (), object(), [float("nan")])
NO_SUCH: tuple[str, ...] = ("", "x", "\ud800", "a" * 100_000, "' OR 1=1 --", "%")


@at(NONE)
async def test_what_is_no_id_is_refused_by_every_verb(crew: Crew) -> None:
    manager = crew.manager
    await crew.start()
    asks: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "process": lambda value: manager.process(value, 1),
        "suspend": manager.suspend,
        "resume": manager.resume,
        "restart": manager.restart,
        "terminate": manager.terminate,
        "why": manager.why,
        "open_waits": lambda value: manager.open_waits(cast("Any", 5) if value is None else value),
        "get_requests": manager.get_requests,
        "observe": lambda value: anext(manager.observe(cast("Any", 5) if value is None else value)),
    }
    for name, ask in asks.items():
        for value in WRONG:
            with pytest.raises(ValidationError, match="instance_id must be the id or the name") as caught:
                await ask(value)
            assert len(str(caught.value)) < 300, name
        for text in NO_SUCH:
            with pytest.raises(NotFoundError) as missing:
                await ask(text)
            assert len(str(missing.value)) < 400, name
    for value in WRONG:
        with pytest.raises(ValidationError):
            await manager.get_instance(value)
    for text in NO_SUCH:
        assert await manager.get_instance(text) is None
    refused = [one for one in await crew.audit() if one.outcome == "ValidationError"]
    assert len(refused) == 5 * len(WRONG), "each refusal of an act is audited, however strange its subject"


@at(NONE)
async def test_what_is_no_filter_or_option_is_refused_even_where_it_is_empty(crew: Crew) -> None:
    agent = await crew.start()
    for value in ("", *WRONG[1:]):
        with pytest.raises(ValidationError, match="filter must be of type GetInstancesFilter"):
            await crew.manager.get_active_instances(value)
        with pytest.raises(ValidationError, match="wait must be true or false"):
            await agent.ask(1, wait=value)
    with pytest.raises(ValidationError, match="limit must be 1 to 1000"):
        await crew.manager.get_active_instances(GetInstancesFilter(limit=0))
    with pytest.raises(ValidationError, match="retries"):
        await agent.ask(1, id="r-1", retries=-1)
    with pytest.raises(ValidationError, match="state must be one of"):
        await crew.manager.get_requests(agent.instance_id, state="odd")
    record = await agent.record()
    assert (record.state, record.attempt) == (S.READY, 1)


@pytest.mark.parametrize("name", ["settings", "registry", "levels", "seams"])
async def test_a_manager_is_not_opened_with_something_else(tmp_path: Path, name: str) -> None:
    wrong: tuple[Any, ...] = ("x", 5, [], object())
    for value in wrong:
        with pytest.raises(ValidationError, match=f"{name} must be of type"):
            async with ostler.open(tmp_path / "home", **{name: value}):
                pytest.fail("it was opened")
    assert not (tmp_path / "home").exists()


async def test_a_manager_is_not_opened_on_what_is_no_place() -> None:
    for value in (5, b"b", [], object()):
        with pytest.raises(ValidationError, match="where must be a directory, an address or a Store"):
            async with ostler.open(value):  # type: ignore[arg-type]  # wrong on purpose
                pytest.fail("it was opened")
    for text in ("", "  ", "a\0b", "mysql://x"):
        with pytest.raises(ValidationError):
            async with ostler.open(text):
                pytest.fail("it was opened")


@at(NONE)
async def test_a_manager_acts_on_behalf_of_principals_only(crew: Crew) -> None:
    manager = crew.manager
    for value in WRONG:
        with pytest.raises(ValidationError, match="principal must be of type Principal"):
            manager.acting_as(value)
    with pytest.raises(ValidationError, match="name must"):
        manager.acting_as(OWNER.evolve(name="eve\n"))
    with pytest.raises(ValidationError, match="workspace_id must be"):
        manager.acting_as(OWNER.evolve(workspace_id=5))
    wrong: Any
    for wrong in ("a\nb", "a" * 100_000, "", 5, []):
        with pytest.raises(ValidationError, match="correlation_id must"):
            manager.acting_as(OWNER, correlation_id=wrong)
    assert manager.acting_as(OWNER, correlation_id="request-7").principal == OWNER


@at(NONE)
async def test_another_event_loop_is_told_where_the_manager_lives(crew: Crew) -> None:
    manager, agent = crew.manager, await crew.start()
    request = crew.request()

    async def look() -> Any:
        return await anext(manager.observe(agent.instance_id))

    asked: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: agent.ask(1),
        lambda: manager.spawn(request),
        lambda: manager.get_instance(agent.instance_id),
        manager.get_statistics,
        lambda: manager.answer(uuid4()),
        look,
    )

    async def there(ask: Callable[[], Awaitable[Any]]) -> Any:
        return await ask()

    with ThreadPoolExecutor(1) as elsewhere:
        for ask in asked:
            running = asyncio.get_running_loop().run_in_executor(elsewhere, asyncio.run, there(ask))
            with pytest.raises(InvalidOperationError, match="belongs to the event loop that opened it"):
                await running
    assert await agent.ask(do("echo", value=2)) == 2
    assert len(await manager.get_active_instances()) == 1


@at(PROCESS)
async def test_a_container_is_refused_with_a_sentence_after_the_gate(crew: Crew) -> None:
    with pytest.raises(InvalidOperationError, match="container is not part of this version"):
        await crew.start(isolation_level=IsolationLevel.CONTAINER)
    await crew.set_tier(Tier.TEAMS)
    with pytest.raises(LicenseError, match="container isolation; it needs enterprise"):
        await crew.start(isolation_level=IsolationLevel.CONTAINER)
    assert TerminationOptions() == TerminationOptions.default()
