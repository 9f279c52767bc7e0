"""Asking for runs and turns: pages, order, and where replaying begins."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import ValidationError
from ostler.model import Tier
from ostler.store import Store
from ostler.testing.store_suite.ground import StoreGround, new_workspace
from ostler.testing.store_suite.simulations import RUN, a_turn, begun, stepped


class TurnReadingContract(StoreGround):
    async def test_runs_are_listed_newest_first_by_workspace_and_page(self, store: Store) -> None:
        elsewhere = await new_workspace(store, Tier.TEAMS)
        for number in (3, 1, 5, 2, 4):
            await begun(store, UUID(int=number))
        await begun(store, UUID(int=9), workspace_id=elsewhere)

        async def found(**wanted: Any) -> list[int]:
            return [run.run_id.int for run in await store.list_runs(**wanted)]

        assert await found() == [5, 4, 3, 2, 1]
        assert await found(limit=2) == [5, 4]
        assert await found(limit=2, before=UUID(int=4)) == [3, 2]
        assert await found(before=UUID(int=1)) == []
        assert await found(workspace_id=elsewhere) == [9]
        assert await found(workspace_id=UUID(int=404)) == []
        with pytest.raises(ValidationError, match="limit must be at least 1"):
            await store.list_runs(limit=0)

    async def test_turns_are_read_in_order_and_page_by_page(self, store: Store) -> None:
        await begun(store, turns=7)
        await begun(store, UUID(int=2), turns=1)

        async def found(**wanted: Any) -> list[int]:
            return [turn.turn for turn in await store.read_turns(RUN, **wanted)]

        assert await found() == list(range(8))
        assert await found(limit=3) == [0, 1, 2]
        assert await found(after=2, limit=3) == [3, 4, 5]
        assert await found(after=7) == []
        assert await store.read_turns(UUID(int=404)) == []
        assert (await store.read_turns(RUN, after=2, limit=1)) == [a_turn(3, whole=True)]
        assert [await store.get_turn(RUN, number) for number in (-1, 8)] == [None, None]

    async def test_the_newest_complete_state_is_found_for_every_turn(self, store: Store) -> None:
        await begun(store, turns=7)
        await begun(store, UUID(int=2), turns=3)
        wanted = {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 6, 7: 6, 10**6: 6}
        for until, turn in wanted.items():
            found = await store.whole_turn(RUN, until)
            assert found == a_turn(turn, whole=True)
        assert await store.whole_turn(RUN, -1) is None
        assert await store.whole_turn(UUID(int=404), 7) is None

    async def test_a_number_that_no_turn_can_have_is_refused(self, store: Store) -> None:
        await begun(store)
        for number in (-2, 2**63, 2**70):
            with pytest.raises(ValidationError, match="turn must be -1 or the number of a turn"):
                await store.get_turn(RUN, number)
            with pytest.raises(ValidationError, match="after must be"):
                await store.read_turns(RUN, after=number)
            with pytest.raises(ValidationError, match="until must be"):
                await store.whole_turn(RUN, number)

    async def test_a_body_of_megabytes_comes_back_as_it_was(self, store: Store) -> None:
        await begun(store)
        body = json.dumps({"cells": "äx" * 2**20}, ensure_ascii=False)
        await stepped(store, 1, body=body, whole=True)
        (found,) = await store.read_turns(RUN, after=0)
        assert found.body == body
