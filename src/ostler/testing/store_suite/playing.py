"""Who may play a run: whoever comes, also beside the owner of the store, one at a time. And how a run goes."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from ostler.errors import (
    InvalidOperationError,
    OutcomeUnknownError,
    SimulationNotFoundError,
    StaleWriterError,
    StoreFailedError,
    VersionConflictError,
)
from ostler.model import AgentState, RunState
from ostler.seams import FaultPlan
from ostler.store import Seams, Store, commands
from ostler.store.commands import MoveRun, RecordTurn, RemoveRun
from ostler.store.commands.simulations import REMOVING
from ostler.testing.store_suite.crashing import KEPT, LOST
from ostler.testing.store_suite.ground import OpenStore, StoreGround, moved, reserved
from ostler.testing.store_suite.simulations import RUN, a_turn, beginning, begun, digest_of, said_by_audit, stepped

TTL = timedelta(seconds=30)


class PlayingContract(StoreGround):
    async def test_a_run_is_played_beside_the_owner_of_the_store_and_nothing_else_is_written(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        await store.take_lease("manager", ttl=TTL)
        async with open_store(seams) as beside:
            await begun(beside, turns=2)
            mine = await reserved(store)  # the owner goes on meanwhile
            over = await stepped(beside, 3, ended="done")
            assert (over.turn, over.state) == (3, RunState.ENDED)
            back = await beside.commit(MoveRun(run_id=RUN, to=RunState.OPEN, expected_version=over.version))
            assert back == await store.get_run(RUN)
            before = await store.head()
            with pytest.raises(StaleWriterError, match="manager owns this store until"):
                await reserved(beside)
            with pytest.raises(StaleWriterError):
                await moved(beside, mine, AgentState.READY)
            with pytest.raises(StaleWriterError):
                await beside.sweep()
            assert await store.head() == before
        assert [action for action, *_ in await said_by_audit(store)][-3:] == [
            "spawn",
            "simulation.end",
            "simulation.reopen",
        ]
        (await store.verify_audit()).require()

    async def test_of_two_who_resume_a_run_one_wins_whoever_owns_the_store(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        await begun(store, turns=1)
        async with open_store(seams) as one, open_store(seams) as other:
            await store.take_lease("manager", ttl=TTL)
            for first, second, number in ((one, other, 2), (other, store, 3), (store, one, 4)):
                assert (await stepped(first, number)).turn == number
                with pytest.raises(VersionConflictError, match="somebody else may be running it"):
                    await stepped(second, number, body="{}")
                assert await store.get_turn(RUN, number) == a_turn(number)
            with pytest.raises(VersionConflictError, match="is at version"):
                await one.commit(MoveRun(run_id=RUN, to=RunState.ENDED, expected_version=2))

    def test_only_what_fences_itself_is_not_fenced_by_the_epoch(self) -> None:
        free = {name for name in commands.__all__ if not getattr(getattr(commands, name), "fenced", True)}
        assert free == {"CreateRun", "MoveRun", "RecordTurn", "RemoveRun", "TakeLease"}

    # --- removing -------------------------------------------------------------------------------

    async def test_a_run_goes_turn_by_turn_and_is_sound_all_the_way(self, store: Store) -> None:
        other = UUID(int=0x52)
        await begun(store, turns=7)
        kept = await begun(store, other, turns=2)
        left = await store.commit(RemoveRun(run_id=RUN, most=3))
        assert left == await store.get_run(RUN)
        assert left is not None
        assert (left.turn, left.digest, left.state) == (4, digest_of(4), RunState.ENDED)
        assert left.outcome == "its later turns were removed"
        assert [turn.turn for turn in await store.read_turns(RUN)] == [0, 1, 2, 3, 4]
        with pytest.raises(InvalidOperationError, match="is ended and takes no more turns"):
            await stepped(store, 8)  # somebody who still plays it
        await store.commit(MoveRun(run_id=RUN, to=RunState.OPEN))
        assert (await stepped(store, 5)).turn == 5
        assert await store.commit(RemoveRun(run_id=RUN)) is None
        assert await store.get_run(RUN) is None
        assert (await store.read_turns(RUN), await store.whole_turn(RUN, 9)) == ([], None)
        with pytest.raises(SimulationNotFoundError):
            await store.commit(RemoveRun(run_id=RUN))
        assert await store.get_run(other) == kept
        assert len(await store.read_turns(other)) == 3
        told = [(action, detail) for action, _, _, detail in await said_by_audit(store)]
        assert [detail for action, detail in told if action == "simulation.remove"] == ["turns 5 to 7", "meadow"]
        await begun(store, turns=1)  # its id is free again

    async def test_a_fork_goes_without_the_run_it_came_from(self, store: Store) -> None:
        parent, child = await begun(store, turns=3), UUID(int=0xC)
        await store.commit(beginning(child, 2, parent_id=RUN, forked_at=2))
        await stepped(store, 3, run_id=child)
        left = await store.commit(RemoveRun(run_id=child, most=1))
        assert left is not None
        assert (left.turn, left.digest) == (2, digest_of(2))
        assert await store.commit(RemoveRun(run_id=child, most=1)) is None
        assert await store.get_run(RUN) == parent
        assert len(await store.read_turns(RUN)) == 4

    async def test_what_is_played_while_it_is_removed_leaves_nothing_behind(self, store: Store) -> None:
        for most in (2, 256):
            await begun(store, turns=4)
            steps = [stepped(store, number) for number in (5, 6)]
            gone = store.commit(RemoveRun(run_id=RUN, most=most))
            _, _, left = await asyncio.gather(*steps, gone, return_exceptions=True)
            run = await store.get_run(RUN)
            assert run == left
            assert len(await store.read_turns(RUN)) == (0 if run is None else run.turn + 1)
            if run is not None:
                await store.commit(RemoveRun(run_id=RUN))

    @pytest.mark.parametrize("point", [*LOST, *KEPT])
    async def test_a_removal_that_dies_has_removed_a_step_or_nothing(
        self, store: Store, open_store: OpenStore, seams: Seams, plan: FaultPlan, point: str
    ) -> None:
        old = await begun(store, turns=4)
        plan.name = point
        with pytest.raises((StoreFailedError, OutcomeUnknownError)):
            await store.commit(RemoveRun(run_id=RUN, most=2))
        await store.close()
        plan.name = ""
        async with open_store(seams) as again:
            run = await again.get_run(RUN)
            assert run is not None
            assert run.turn == (4 if point in LOST else 2)
            assert run == old or point in KEPT
            assert [turn.turn for turn in await again.read_turns(RUN)] == list(range(run.turn + 1))
            assert await again.commit(RemoveRun(run_id=RUN)) is None

    async def test_a_turn_follows_what_it_was_played_after(self, store: Store) -> None:
        await begun(store, turns=3)
        turn = a_turn(4)
        with pytest.raises(VersionConflictError, match="not as it was when turn 4 was played"):
            await store.commit(RecordTurn(run_id=RUN, turn=turn, follows=digest_of(2)))
        assert await store.get_turn(RUN, 4) is None
        assert (await store.commit(RecordTurn(run_id=RUN, turn=turn, follows=digest_of(3)))).turn == 4

    async def test_what_is_played_anew_while_turns_go_stays(self, store: Store) -> None:
        """All in one commit, if the store likes."""
        await begun(store, turns=6)
        again = a_turn(4, body='{"again":true}')
        found = await asyncio.gather(
            store.commit(RemoveRun(run_id=RUN, most=3)),
            store.commit(MoveRun(run_id=RUN, to=RunState.OPEN)),
            store.commit(RecordTurn(run_id=RUN, turn=again)),
        )
        assert found[2] == await store.get_run(RUN)
        assert await store.get_turn(RUN, 4) == again
        assert [turn.turn for turn in await store.read_turns(RUN)] == [0, 1, 2, 3, 4]
        await asyncio.gather(store.commit(RemoveRun(run_id=RUN)), store.commit(beginning()))
        assert [turn.turn for turn in await store.read_turns(RUN)] == [0]

    async def test_nothing_is_forked_from_a_run_that_is_about_to_go(self, store: Store) -> None:
        await begun(store, turns=4)
        await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, outcome="enough"))
        marked = await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, outcome=REMOVING))
        fork = beginning(UUID(int=0xC), 2, parent_id=RUN, forked_at=2)
        with pytest.raises(InvalidOperationError, match="is being removed and cannot be forked"):
            await store.commit(fork)
        with pytest.raises(VersionConflictError):
            await store.commit(RemoveRun(run_id=RUN, expected_version=marked.version - 1))
        left = await store.commit(RemoveRun(run_id=RUN, most=1, expected_version=marked.version))
        assert left is not None
        assert left.outcome == REMOVING
        back = await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, outcome="enough"))
        assert (back.turn, back.outcome) == (3, "enough")
        await store.commit(fork)

    async def test_a_manager_that_was_replaced_writes_no_turn_as_the_owner(
        self, store: Store, open_store: OpenStore, seams: Seams
    ) -> None:
        await begun(store, turns=1)
        await store.take_lease("manager", ttl=TTL)
        mine = RecordTurn(run_id=RUN, turn=a_turn(2), by_owner=True)
        assert (await store.commit(mine)).turn == 2
        async with open_store(seams) as beside:
            await beside.take_lease("another", ttl=TTL, steal=True)
            with pytest.raises(StaleWriterError, match="another owns this store"):
                await store.commit(RecordTurn(run_id=RUN, turn=a_turn(3), by_owner=True))
            with pytest.raises(StaleWriterError):
                await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, by_owner=True))
            assert (await stepped(store, 3)).turn == 3
            await beside.release_lease()
