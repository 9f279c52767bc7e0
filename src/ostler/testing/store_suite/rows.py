"""The quieter rows: waits, workspaces, people, tokens, definitions."""

# ruff: noqa: S101, S106, S107 - a suite speaks by assert; the hashes are made up

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import InvalidOperationError, OstlerError, ValidationError, WorkspaceNotFoundError
from ostler.model import (
    HOME_WORKSPACE_ID,
    Definition,
    Permission,
    Principal,
    Role,
    Tier,
    Token,
    Wait,
    WaitKind,
    Workspace,
)
from ostler.store import Store
from ostler.store.commands import Command, EndWait, OpenWait, PutRecord
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.ground import HOME, StoreGround, new_workspace, reserved


def a_wait(number: int, clock: ManualClock, minutes: float | None = None) -> Wait:
    due: datetime | None = None if minutes is None else clock.wall() + timedelta(minutes=minutes)
    return Wait(
        wait_id=UUID(int=number),
        workspace_id=HOME,
        kind=WaitKind.BACKOFF,
        reason="later",
        created_at=clock.wall(),
        due_at=due,
        detail={"n": [number]},
    )


def a_principal(number: int, clock: ManualClock) -> Principal:
    return Principal(
        principal_id=UUID(int=number),
        name=f"person {number}",
        workspace_id=HOME,
        roles=(Role.OPERATOR, Role.REVIEWER),
        permissions=(Permission.AUDIT_READ,),
        created_at=clock.wall(),
    )


def a_token(number: int, principal_id: UUID, clock: ManualClock, token_hash: str = "ab12") -> Token:
    return Token(
        token_id=UUID(int=number), principal_id=principal_id, token_hash=token_hash, name="ci", created_at=clock.wall()
    )


class RowsContract(StoreGround):
    async def test_waits_come_the_earliest_due_first_and_those_without_a_time_last(
        self, store: Store, clock: ManualClock
    ) -> None:
        waits = [a_wait(1, clock, 30), a_wait(2, clock), a_wait(3, clock, 10), a_wait(4, clock, 20)]
        for wait in waits:
            assert await store.commit(OpenWait(wait=wait)) == wait
        in_order = [waits[2], waits[3], waits[0], waits[1]]
        assert await store.open_waits() == in_order
        assert await store.open_waits(limit=2) == in_order[:2]
        assert await store.open_waits(due_until=clock.wall() + timedelta(minutes=20)) == in_order[:2]
        await store.commit(EndWait(wait_id=UUID(int=3), outcome="due"))
        assert await store.open_waits() == in_order[1:]

    async def test_open_waits_can_be_read_on_from_the_last_one(self, store: Store, clock: ManualClock) -> None:
        minutes = (5, 5, 7, None, None, 9)
        for number, due in enumerate(minutes, 1):
            await store.commit(OpenWait(wait=a_wait(number, clock, due)))
        for until, ids in ((None, [1, 2, 3, 6, 4, 5]), (clock.wall() + timedelta(minutes=7), [1, 2, 3])):
            seen: list[Wait] = []
            while page := await store.open_waits(due_until=until, limit=2, after=seen[-1] if seen else None):
                seen += page
            assert [wait.wait_id.int for wait in seen] == ids
        undated = (await store.open_waits())[-2]
        assert await store.open_waits(due_until=clock.wall() + timedelta(days=1), after=undated) == []

    async def test_exactly_one_caller_ends_a_wait(self, store: Store, clock: ManualClock) -> None:
        await store.commit(OpenWait(wait=a_wait(1, clock, 1)))
        ends = (store.commit(EndWait(wait_id=UUID(int=1), outcome=f"by {number}")) for number in range(20))
        answers = await asyncio.gather(*ends, return_exceptions=True)
        assert sum(isinstance(one, Wait) for one in answers) == 1
        refused = [one for one in answers if isinstance(one, InvalidOperationError)]
        assert len(refused) == 19
        assert "ended already" in str(refused[0])
        with pytest.raises(InvalidOperationError, match="there is no wait"):
            await store.commit(EndWait(wait_id=UUID(int=2), outcome="?"))
        with pytest.raises(InvalidOperationError, match="exists already"):
            await store.commit(OpenWait(wait=a_wait(1, clock)))

    async def test_a_store_begins_with_a_home_of_ones_own(self, store: Store) -> None:
        (home,) = await store.list_workspaces()
        assert (home.workspace_id, home.tier) == (HOME_WORKSPACE_ID, Tier.ENTERPRISE)
        assert await store.get_workspace(HOME) == home

    async def test_workspaces_are_put_changed_and_paged(self, store: Store) -> None:
        spaces = [await new_workspace(store, Tier.CORE, number) for number in range(2, 7)]
        listed = await store.list_workspaces(limit=4)
        listed += await store.list_workspaces(listed[-1].workspace_id, limit=4)
        assert {one.workspace_id for one in listed} == {HOME, *spaces}
        assert [one.workspace_id for one in listed] == sorted(one.workspace_id for one in listed)
        renamed = listed[0].evolve(name="new name") if listed[0].workspace_id != HOME else listed[1].evolve(name="n")
        await store.commit(PutRecord(record=renamed))
        assert await store.get_workspace(renamed.workspace_id) == renamed
        assert (await store.read_audit(renamed.workspace_id))[-1].action == "put"
        assert await store.get_workspace(UUID(int=1)) is None

    async def test_principals_and_tokens_are_found_by_id_and_by_hash(self, store: Store, clock: ManualClock) -> None:
        person = a_principal(1, clock)
        token = a_token(2, person.principal_id, clock)
        with pytest.raises(InvalidOperationError, match="no principal"):
            await store.commit(PutRecord(record=token))
        await store.commit(PutRecord(record=person))
        await store.commit(PutRecord(record=token))
        assert await store.get_principal(person.principal_id) == person
        assert await store.find_token("ab12") == token
        assert await store.find_token("ab1%") is None
        revoked = token.evolve(revoked_at=clock.wall(), expires_at=clock.wall())
        await store.commit(PutRecord(record=revoked))
        assert await store.find_token("ab12") == revoked
        disabled = person.evolve(disabled_at=clock.wall(), roles=())
        await store.commit(PutRecord(record=disabled))
        assert await store.get_principal(person.principal_id) == disabled
        lost = a_principal(3, clock).evolve(workspace_id=UUID(int=5))
        with pytest.raises(WorkspaceNotFoundError):
            await store.commit(PutRecord(record=lost))

    async def test_a_hash_belongs_to_one_token_and_a_second_harms_nobody_else(
        self, store: Store, clock: ManualClock
    ) -> None:
        person = a_principal(1, clock)
        await store.commit(PutRecord(record=person))
        await store.commit(PutRecord(record=a_token(2, person.principal_id, clock)))
        twin = store.commit(PutRecord(record=a_token(3, person.principal_id, clock)))
        answers = await asyncio.gather(reserved(store), twin, reserved(store), return_exceptions=True)
        assert isinstance(answers[1], OstlerError)
        assert not isinstance(answers[0], BaseException), answers[0]
        assert not isinstance(answers[2], BaseException), answers[2]
        assert (await store.find_token("ab12")) == a_token(2, person.principal_id, clock)

    async def test_definitions_are_put_and_paged(self, store: Store, clock: ManualClock) -> None:
        made = [
            Definition(
                definition_id=UUID(int=number),
                name=f"def {number}",
                kind="command",
                manifest={"command": ["run", "ü"], "limits": {"cpu": 1.5}},
                source="agents/x.toml",
                created_at=clock.wall(),
                updated_at=clock.wall(),
            )
            for number in (3, 1, 2)
        ]
        for one in made:
            await store.commit(PutRecord(record=one))
        assert await store.get_definition(UUID(int=3)) == made[0]
        assert await store.list_definitions(limit=2) == [made[1], made[2]]
        assert await store.list_definitions(UUID(int=2)) == [made[0]]
        newer = made[0].evolve(version=2, manifest={})
        await store.commit(PutRecord(record=newer))
        assert await store.get_definition(UUID(int=3)) == newer

    async def test_unfit_rows_are_refused_by_field(self, store: Store, clock: ManualClock) -> None:
        before = await store.head()
        nameless = Workspace(workspace_id=UUID(int=1), name="", tier=Tier.CORE, created_at=clock.wall())
        person = a_principal(1, clock)
        bad: list[tuple[str, Command[Any]]] = [
            ("name", PutRecord(record=nameless)),
            ("tier", PutRecord(record=nameless.evolve(name="n", tier="gold"))),
            ("roles.0", PutRecord(record=person.evolve(roles=("king",)))),
            ("name", PutRecord(record=a_token(2, person.principal_id, clock).evolve(name="a\0"))),
            ("token_hash", PutRecord(record=a_token(2, person.principal_id, clock, token_hash="\0"))),
            ("created_at", OpenWait(wait=a_wait(1, clock).evolve(created_at=datetime(2026, 1, 1)))),  # noqa: DTZ001 - a moment without a zone is the fault
            ("reason", OpenWait(wait=a_wait(1, clock).evolve(reason="a\0"))),
            ("detail", OpenWait(wait=a_wait(1, clock).evolve(detail={"a": {1, 2}}))),
        ]
        for field, command in bad:
            with pytest.raises(ValidationError, match=field):
                await store.commit(command)
        assert await store.head() == before
