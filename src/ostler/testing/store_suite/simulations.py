"""Simulations: a run and its turns, written together, each turn once, by one writer at a time."""

# ruff: noqa: S101 - a suite speaks by assert

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import (
    InvalidOperationError,
    OutcomeUnknownError,
    SimulationNotFoundError,
    StoreFailedError,
    ValidationError,
    VersionConflictError,
    WorkspaceNotFoundError,
)
from ostler.model import RunState, SimulationRun, SimulationTurn, Tier, from_micros
from ostler.seams import FaultPlan
from ostler.store import Seams, Store
from ostler.store.commands import Command, CreateRun, MoveRun, RecordTurn, RemoveRun
from ostler.testing.clock import ManualClock
from ostler.testing.store_suite.crashing import KEPT, LOST
from ostler.testing.store_suite.ground import ALICE, HOME, OpenStore, StoreGround, new_workspace

RUN = UUID(int=0x51)
LATER = from_micros(10**15)


def digest_of(turn: int) -> str:
    return hashlib.sha256(str(turn).encode()).hexdigest()


def a_turn(number: int, *, run_id: UUID = RUN, whole: bool = False, **fields: Any) -> SimulationTurn:
    known: dict[str, Any] = {"body": json.dumps({"turn": number, "word": "é"}), "digest": digest_of(number)}
    return SimulationTurn(run_id=run_id, turn=number, whole=whole, occurred_at=LATER, **(known | fields))


def a_run(run_id: UUID = RUN, turn: int = 0, **fields: Any) -> SimulationRun:
    known: dict[str, Any] = {"name": "meadow", "seed": 2**63 - 1, "digest": digest_of(turn)}
    return SimulationRun(run_id=run_id, turn=turn, created_at=LATER, updated_at=LATER, **(known | fields))


def beginning(run_id: UUID = RUN, turn: int = 0, **fields: Any) -> CreateRun:
    return CreateRun(run=a_run(run_id, turn, **fields), first=a_turn(turn, run_id=run_id, whole=True))


async def begun(store: Store, run_id: UUID = RUN, turns: int = 0, **fields: Any) -> SimulationRun:
    """A run that has come so far; every third turn is whole."""
    run = await store.commit(beginning(run_id, **fields))
    for number in range(1, turns + 1):
        run = await stepped(store, number, run_id=run_id, whole=number % 3 == 0)
    return run


async def stepped(store: Store, number: int, *, ended: str | None = None, **fields: Any) -> SimulationRun:
    turn = a_turn(number, **fields)
    return await store.commit(RecordTurn(turn=turn, run_id=turn.run_id, ended=ended))


async def said_by_audit(store: Store, workspace_id: UUID = HOME) -> list[tuple[str, str, str, str | None]]:
    entries = await store.read_audit(workspace_id)
    return [(one.action, one.subject, one.outcome, one.detail) for one in entries]


def unfit() -> list[tuple[str, Command[Any]]]:
    """What is said, and the command that it is said of."""
    wrong: Any = "wrong"
    other, half = UUID(int=9), a_turn(0)
    first = a_turn(0, whole=True)
    return [
        ("run must be of type SimulationRun", CreateRun(run=wrong, first=first)),
        ("first must be of type SimulationTurn", CreateRun(run=a_run(), first=wrong)),
        ("run.name must have 1 to 200 characters", beginning(name="")),
        ("run.seed must be 0 to", beginning(seed=2**63)),
        ("run.settings must be at most 256 KiB", beginning(settings={"a": "x" * 2**18})),
        ("run.scenario must be at most 4096 KiB", beginning(scenario={"text": "x" * 2**22})),
        ("run.scenario.a must be a finite number", beginning(scenario={"a": float("nan")})),
        ("run.forked_at must be given together with parent_id", beginning(parent_id=other)),
        ("run.forked_at must be the turn", beginning(parent_id=other, forked_at=1)),
        ("run.state must be open", beginning(state=RunState.ENDED)),
        ("first.whole must be true", CreateRun(run=a_run(), first=half)),
        ("first.run_id must be that of the run", CreateRun(run=a_run(other), first=first)),
        ("first.digest must be that of the run", CreateRun(run=a_run(digest=""), first=first)),
        ("turn must be of type SimulationTurn", RecordTurn(run_id=RUN, turn=wrong)),
        ("turn.turn must be 0 to", RecordTurn(run_id=RUN, turn=a_turn(-1))),
        ("turn.body must be text", RecordTurn(run_id=RUN, turn=a_turn(1, body=7))),
        ("turn.body must not contain NUL", RecordTurn(run_id=RUN, turn=a_turn(1, body="\0"))),
        ("turn.body must be text without lone", RecordTurn(run_id=RUN, turn=a_turn(1, body="\ud800"))),
        ("turn.digest must be a SHA-256", RecordTurn(run_id=RUN, turn=a_turn(1, digest="abc"))),
        ("turn.run_id must be that of the run", RecordTurn(run_id=other, turn=a_turn(1))),
        ("run_id must be a UUID", MoveRun(run_id=wrong, to=RunState.ENDED)),
        ("to must be RunState.ENDED", MoveRun(run_id=RUN, to="ended")),  # type: ignore[arg-type]  # wrong on purpose
        ("outcome must have at most 2000", MoveRun(run_id=RUN, to=RunState.ENDED, outcome="x" * 2001)),
        ("most must be 1 or more", RemoveRun(run_id=RUN, most=0)),
        ("most must be a whole number", RemoveRun(run_id=RUN, most=wrong)),
        ("by_owner must be true or false", RemoveRun(run_id=RUN, by_owner=wrong)),
        ("follows must be text", RecordTurn(run_id=RUN, turn=first, follows=7)),  # type: ignore[arg-type]  # wrong on purpose
        ("outcome is only for a run that ends", MoveRun(run_id=RUN, to=RunState.OPEN, outcome="so")),
    ]


class SimulationsContract(StoreGround):
    # --- writing --------------------------------------------------------------------------------

    async def test_a_run_begins_with_its_first_turn(
        self, store: Store, clock: ManualClock, open_store: OpenStore, seams: Seams
    ) -> None:
        settings: dict[str, Any] = {"growth": [0.1, None], "name": "é"}
        command = beginning(settings=settings, scenario={"text": "x" * 2**20}, version=7)
        command.by = ALICE
        before = await store.head()
        made = await store.commit(command)
        settings["growth"].append("too late")
        assert (made.created_at, made.updated_at, made.version) == (clock.wall(), clock.wall(), 1)
        assert (made.state, made.turn, made.outcome, made.seed) == (RunState.OPEN, 0, None, 2**63 - 1)
        assert made.settings == {"growth": [0.1, None], "name": "é"}
        assert (await store.head()).commit_number == before.commit_number + 1
        assert await said_by_audit(store) == [("simulation.create", f"simulation:{RUN}", "ok", None)]
        assert (await store.read_audit())[0].actor == "alice"
        async with open_store(seams) as again:
            assert await again.get_run(RUN) == made
            assert await again.get_turn(RUN, 0) == command.first

    async def test_a_turn_moves_its_run_and_nothing_else(self, store: Store, clock: ManualClock) -> None:
        made = await begun(store, scenario={"text": "rain"})
        audit = await store.audit_head()
        clock.advance(5)
        new = await stepped(store, 1, whole=True)
        assert new == made.evolve(turn=1, digest=digest_of(1), updated_at=clock.wall(), version=2)
        assert await store.get_run(RUN) == new
        assert await store.get_turn(RUN, 1) == a_turn(1, whole=True)
        assert await store.audit_head() == audit
        assert (await store.head()).sequence == 0

    async def test_turns_come_one_after_the_other(self, store: Store) -> None:
        await begun(store, turns=2)
        for number in (0, 1, 2, 4):
            with pytest.raises(VersionConflictError, match=r"is at turn 2, so .* somebody else may be running it"):
                await stepped(store, number, body="{}")
        assert await store.get_turn(RUN, 2) == a_turn(2)
        assert (await store.get_turn(RUN, 4)) is None
        assert (await stepped(store, 3)).turn == 3

    async def test_of_many_who_run_the_same_turn_one_writes_it(self, store: Store) -> None:
        await begun(store)
        bodies = [json.dumps({"by": one}) for one in range(10)]
        answers = await asyncio.gather(*(stepped(store, 1, body=body) for body in bodies), return_exceptions=True)
        assert sum(isinstance(one, SimulationRun) for one in answers) == 1
        assert sum(isinstance(one, VersionConflictError) for one in answers) == 9
        kept = await store.get_turn(RUN, 1)
        assert kept is not None
        assert isinstance(answers[bodies.index(kept.body)], SimulationRun)

    async def test_two_runs_at_once_do_not_meet(self, store: Store) -> None:
        ids = [UUID(int=number) for number in range(1, 6)]
        await asyncio.gather(*(begun(store, run_id, turns=4) for run_id in ids))
        for run_id in ids:
            assert [turn.turn for turn in await store.read_turns(run_id)] == [0, 1, 2, 3, 4]
        assert {run.turn for run in await store.list_runs()} == {4}

    async def test_a_run_may_end_with_a_turn(self, store: Store) -> None:
        await begun(store)
        over = await stepped(store, 1, ended="nobody\0 is left")
        assert (over.state, over.turn, over.outcome, over.version) == (RunState.ENDED, 1, "nobody\ufffd is left", 2)
        assert await store.get_run(RUN) == over
        assert (await said_by_audit(store))[1:] == [
            ("simulation.end", f"simulation:{RUN}", "ok", "nobody\ufffd is left"),
        ]
        with pytest.raises(InvalidOperationError, match=r"is ended and takes no more turns; reopen it first"):
            await stepped(store, 2)
        assert await store.get_turn(RUN, 2) is None

    async def test_a_run_is_ended_and_reopened_where_it_stands(self, store: Store, clock: ManualClock) -> None:
        made = await begun(store, turns=1)
        clock.advance(1)
        over = await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, outcome="enough", expected_version=2))
        wanted = made.evolve(state=RunState.ENDED, outcome="enough", updated_at=clock.wall(), version=3)
        assert over == await store.get_run(RUN) == wanted
        back = await store.commit(MoveRun(run_id=RUN, to=RunState.OPEN))
        assert (back.state, back.outcome, back.turn, back.version) == (RunState.OPEN, None, 1, 4)
        assert (await stepped(store, 2)).version == 5
        acts = [(action, detail) for action, _, _, detail in await said_by_audit(store)]
        assert acts == [("simulation.create", None), ("simulation.end", "enough"), ("simulation.reopen", None)]

    async def test_a_run_is_not_moved_to_where_it_is_nor_by_one_who_read_an_older_version(self, store: Store) -> None:
        await begun(store)
        with pytest.raises(InvalidOperationError, match="is open already"):
            await store.commit(MoveRun(run_id=RUN, to=RunState.OPEN))
        with pytest.raises(VersionConflictError, match="is at version 1, not 2"):
            await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED, expected_version=2))
        await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED))
        with pytest.raises(InvalidOperationError, match="is ended already"):
            await store.commit(MoveRun(run_id=RUN, to=RunState.ENDED))

    async def test_what_does_not_exist_is_not_run(self, store: Store) -> None:
        lost: list[Command[SimulationRun]] = [
            RecordTurn(run_id=RUN, turn=a_turn(1)),
            MoveRun(run_id=RUN, to=RunState.ENDED),
        ]
        for command in lost:
            with pytest.raises(SimulationNotFoundError, match=f"there is no simulation {RUN}"):
                await store.commit(command)
        with pytest.raises(WorkspaceNotFoundError):
            await store.commit(beginning(workspace_id=UUID(int=404)))
        await begun(store)
        with pytest.raises(InvalidOperationError, match="exists already"):
            await store.commit(beginning())

    async def test_unfit_runs_and_turns_are_refused_by_field(self, store: Store) -> None:
        before = await store.head()
        for said, command in unfit():
            with pytest.raises(ValidationError) as refused:
                await store.commit(command)
            assert any(fault.message.startswith(said) for fault in refused.value.faults), (said, refused.value)
        assert await store.head() == before

    # --- forks ----------------------------------------------------------------------------------

    async def test_a_fork_begins_at_a_turn_of_its_parent(self, store: Store) -> None:
        parent = await begun(store, turns=3)
        child = UUID(int=0xC)
        fork = await store.commit(beginning(child, 2, parent_id=RUN, forked_at=2))
        assert (fork.turn, fork.parent_id, fork.forked_at) == (2, RUN, 2)
        await stepped(store, 3, run_id=child)
        assert [turn.turn for turn in await store.read_turns(child)] == [2, 3]
        assert await store.get_run(RUN) == parent
        assert (await said_by_audit(store))[-1][3] == f"from {RUN} at turn 2"

    async def test_nothing_forks_from_what_is_not_there(self, store: Store) -> None:
        elsewhere = await new_workspace(store, Tier.TEAMS)
        await begun(store, turns=1)
        child = UUID(int=0xC)
        with pytest.raises(SimulationNotFoundError):
            await store.commit(beginning(child, parent_id=UUID(int=404), forked_at=0))
        with pytest.raises(SimulationNotFoundError):
            await store.commit(beginning(child, parent_id=RUN, forked_at=0, workspace_id=elsewhere))
        with pytest.raises(InvalidOperationError, match="is at turn 1 and cannot be forked at turn 2"):
            await store.commit(beginning(child, 2, parent_id=RUN, forked_at=2))
        assert await store.get_run(child) is None

    # --- crashes --------------------------------------------------------------------------------

    @pytest.mark.parametrize("point", [*LOST, *KEPT])
    async def test_a_turn_that_dies_is_there_whole_or_not_at_all(
        self, store: Store, open_store: OpenStore, seams: Seams, plan: FaultPlan, point: str
    ) -> None:
        old = await begun(store, turns=1)
        plan.name = point
        with pytest.raises((StoreFailedError, OutcomeUnknownError)):
            await stepped(store, 2, ended="done")
        await store.close()
        plan.name = ""
        async with open_store(seams) as again:
            run, turn = await again.get_run(RUN), await again.get_turn(RUN, 2)
            assert run is not None
            if point in LOST:
                assert (run, turn) == (old, None)
                assert (await stepped(again, 2, ended="done")).turn == 2
            else:
                assert (run.turn, run.state, run.digest) == (2, RunState.ENDED, digest_of(2))
                assert turn == a_turn(2)
            assert [action for action, *_ in await said_by_audit(again)] == ["simulation.create", "simulation.end"]

    @pytest.mark.parametrize("point", [*LOST, *KEPT])
    async def test_a_run_that_dies_at_its_beginning_is_there_whole_or_not_at_all(
        self, store: Store, open_store: OpenStore, seams: Seams, plan: FaultPlan, point: str
    ) -> None:
        plan.name = point
        with pytest.raises((StoreFailedError, OutcomeUnknownError)):
            await begun(store)
        await store.close()
        plan.name = ""
        async with open_store(seams) as again:
            assert (await again.get_run(RUN) is not None) == (point in KEPT)
            assert await again.get_turn(RUN, 0) == (a_turn(0, whole=True) if point in KEPT else None)
