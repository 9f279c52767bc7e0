"""Workspaces with their plans, principals with their tokens, definitions."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from store_ground import ALICE, HOME, count, entries, new_workspace, reserved, seen

from ostler.errors import ConflictError, OstlerError, WorkspaceNotFoundError
from ostler.model.access import HOME_WORKSPACE_ID, Permission, Principal, Role, Token
from ostler.model.instance import AgentInstance
from ostler.model.spawn import Definition
from ostler.model.states import Tier
from ostler.store import workspaces
from ostler.store.store import Store
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio


def a_principal(number: int, clock: ManualClock) -> Principal:
    return Principal(
        principal_id=UUID(int=number),
        name=f"person {number}",
        workspace_id=HOME,
        roles=(Role.OPERATOR, Role.REVIEWER),
        permissions=(Permission.AUDIT_READ,),
        created_at=clock.wall(),
    )


def a_token(number: int, principal_id: UUID, clock: ManualClock, digest: str = "ab12") -> Token:
    return Token(
        token_id=UUID(int=number), principal_id=principal_id, token_hash=digest, name="ci", created_at=clock.wall()
    )


def a_definition(number: int, clock: ManualClock, **fields: object) -> Definition:
    return Definition(
        definition_id=UUID(int=number),
        name=f"def {number}",
        kind="command",
        manifest={"command": ["run", "ü"], "limits": {"cpu": 1.5}},
        source="agents/x.toml",
        created_at=clock.wall(),
        updated_at=clock.wall(),
    ).evolve(**fields)


async def test_a_store_begins_with_a_home_of_ones_own(store: Store) -> None:
    (home,) = await store.read(workspaces.list_workspaces)
    assert (home.workspace_id, home.tier) == (HOME_WORKSPACE_ID, Tier.ENTERPRISE)
    assert await store.read(workspaces.get_workspace, HOME) == home


async def test_workspaces_are_made_changed_listed_and_audited(store: Store) -> None:
    spaces = [await new_workspace(store, Tier.CORE, number) for number in (4, 2, 3)]
    listed = await store.read(workspaces.list_workspaces)
    assert [one.workspace_id for one in listed] == sorted([HOME, *spaces])
    one = await store.read(workspaces.require_workspace, spaces[0])
    renamed = one.evolve(
        name="new", tier=Tier.TEAMS, disabled_features=("agents.lifecycle.spawn",), max_tokens_per_minute=5
    )
    await reserved(store, workspace_id=spaces[0])
    await store.run(workspaces.put_workspace, renamed, by=ALICE)
    assert await store.read(workspaces.get_workspace, spaces[0]) == renamed
    entry = (await entries(store, spaces[0]))[-1]
    assert (entry.action, entry.actor) == ("workspace.put", "alice")
    assert entry.detail == "tier teams, agents.lifecycle.spawn off"
    assert await store.read(workspaces.get_workspace, UUID(int=1)) is None
    with pytest.raises(WorkspaceNotFoundError):
        await store.read(workspaces.require_workspace, UUID(int=1))


async def test_principals_are_found_by_id_and_tokens_by_their_hash(store: Store, clock: ManualClock) -> None:
    person = a_principal(1, clock)
    token = a_token(2, person.principal_id, clock).evolve(expires_at=clock.wall() + timedelta(hours=1))
    with pytest.raises(OstlerError):
        await store.run(workspaces.add_token, token, HOME)
    await store.run(workspaces.add_principal, person, by=ALICE)
    await store.run(workspaces.add_token, token, HOME, by=ALICE)
    assert await store.read(workspaces.get_principal, person.principal_id) == person
    assert await store.read(workspaces.find_token, "ab12", clock.wall()) == token
    assert await store.read(workspaces.find_token, "ab1%", clock.wall()) is None
    assert await store.read(workspaces.find_token, "ab12", clock.wall() + timedelta(hours=1)) is None, "expired"
    assert await store.read(workspaces.list_tokens) == [token]
    assert [entry.action for entry in await entries(store)] == ["principal.add", "token.add"]
    with pytest.raises(ConflictError, match="exists already"):
        await store.run(workspaces.add_principal, person)
    with pytest.raises(WorkspaceNotFoundError):
        await store.run(workspaces.add_principal, a_principal(3, clock).evolve(workspace_id=UUID(int=5)))


async def test_a_revoked_token_is_not_found_and_is_revoked_once(store: Store, clock: ManualClock) -> None:
    person = a_principal(1, clock)
    await store.run(workspaces.add_principal, person)
    token = await store.run(workspaces.add_token, a_token(2, person.principal_id, clock), HOME)
    assert await store.run(workspaces.revoke_token, token.token_id, HOME, by=ALICE)
    assert await store.read(workspaces.find_token, "ab12", clock.wall()) is None
    before = await seen(store)
    assert not await store.run(workspaces.revoke_token, token.token_id, HOME, by=ALICE)
    assert await seen(store) == before
    (kept,) = await store.read(workspaces.list_tokens)
    assert kept.revoked_at == clock.wall()


async def test_a_second_token_with_the_same_hash_fails_alone(store: Store, clock: ManualClock) -> None:
    person = a_principal(1, clock)
    await store.run(workspaces.add_principal, person)
    first = await store.run(workspaces.add_token, a_token(2, person.principal_id, clock), HOME)
    twin = store.run(workspaces.add_token, a_token(3, person.principal_id, clock), HOME)
    answers = await asyncio.gather(reserved(store), twin, reserved(store), return_exceptions=True)
    assert isinstance(answers[1], OstlerError)
    assert isinstance(answers[0], AgentInstance)
    assert isinstance(answers[2], AgentInstance)
    assert await store.read(workspaces.find_token, "ab12", clock.wall()) == first
    assert await store.read(count("tokens")) == 1


async def test_definitions_are_kept_whole_and_written_only_where_they_changed(store: Store, clock: ManualClock) -> None:
    made = [a_definition(number, clock) for number in (3, 1, 2)]
    for one in made:
        await store.run(workspaces.put_definition, one)
    assert await store.read(workspaces.get_definition, UUID(int=3)) == made[0]
    assert [one.name for one in await store.read(workspaces.list_definitions, HOME)] == ["def 1", "def 2", "def 3"]
    assert await store.read(workspaces.list_definitions, UUID(int=9)) == []
    clock.advance(5)
    await store.run(workspaces.put_definition, a_definition(3, clock))
    assert await store.read(workspaces.get_definition, UUID(int=3)) == made[0], "unchanged ones are left alone"
    await store.run(workspaces.put_definition, a_definition(3, clock, manifest={"command": []}))
    newer = await store.read(workspaces.get_definition, UUID(int=3))
    assert newer is not None
    assert (newer.version, newer.manifest, newer.created_at) == (2, {"command": []}, made[0].created_at)
    assert newer.updated_at == clock.wall()


async def test_a_definition_is_found_by_name_the_latest_first(store: Store, clock: ManualClock) -> None:
    await store.run(workspaces.put_definition, a_definition(1, clock, name="coder"))
    clock.advance(1)
    await store.run(workspaces.put_definition, a_definition(2, clock, name="coder"))
    found = await store.read(workspaces.find_definition, HOME, "coder")
    assert found is not None
    assert found.definition_id == UUID(int=2)
    assert await store.read(workspaces.find_definition, HOME, "Coder") is None
    assert await store.read(workspaces.find_definition, UUID(int=9), "coder") is None
