"""Runs that are removed while others play them, fork them, or remove them too."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.errors import InvalidOperationError, SimulationNotFoundError, VersionConflictError
from ostler.model import RunState, SimulationRun
from ostler.simulation import (
    AgentGroup,
    AgentView,
    Brains,
    Scenario,
    begin_run,
    fork_run,
    remove_run,
    removing,
    replay,
    resume_run,
)
from ostler.store import Store, open_store
from ostler.store.commands import RemoveRun

pytestmark = pytest.mark.anyio


class Whimsical:
    """Never decides the same twice, as a language model would."""

    def __init__(self, whims: Iterator[int]) -> None:
        self._whims = whims

    def decide(self, _: AgentView) -> Any:
        return {"n": next(self._whims)}


def whimsical(turns: int = 20) -> Scenario:
    whims = itertools.count()
    brains = Brains({"w": lambda: Whimsical(whims)})
    return Scenario(name="x", turns=turns, brains=brains, agents=(AgentGroup(name="w", kind="w", count=2),))


@pytest.fixture
async def store(home: Path) -> AsyncIterator[Store]:
    async with open_store(home) as store:
        yield store


@pytest.fixture
async def beside(home: Path) -> AsyncIterator[Store]:
    async with open_store(home) as beside:
        yield beside


async def test_who_played_what_was_taken_back_does_not_go_on_after_somebody_elses_turns(
    store: Store, beside: Store
) -> None:
    scenario = whimsical()
    async with begin_run(store, scenario) as first:
        await first.run(10)
        await beside.commit(RemoveRun(run_id=first.run_id, most=3))
        async with resume_run(beside, first.run_id, scenario) as second:
            await second.run(3)
        with pytest.raises(VersionConflictError, match="not as it was when turn 11 was played"):
            await first.play_turn()
    assert [one.turn async for one in replay(store, first.run_id)][-1] == 10


@pytest.mark.parametrize("ended", [True, False])
async def test_a_fork_that_slips_in_keeps_the_run(
    store: Store, beside: Store, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    scenario = whimsical(turns=5)
    async with begin_run(store, scenario) as parent:
        await (parent.finish() if ended else parent.run(5))
    before = await store.get_run(parent.run_id)
    assert before is not None
    looked, forks = itertools.count(1), []
    real = removing._forks  # noqa: SLF001 - the moment between looking and removing has no other handle

    async def slow(where: Store, run: SimulationRun) -> AsyncIterator[SimulationRun]:
        async for one in real(where, run):
            yield one
        if next(looked) == 1:
            async with fork_run(beside, parent.run_id, scenario, at=4) as fork:
                await fork.run(2)
            forks.append(fork.run_id)

    monkeypatch.setattr(removing, "_forks", slow)
    with pytest.raises(InvalidOperationError, match="holds the first turns of"):
        await remove_run(store, parent.run_id)
    after = await store.get_run(parent.run_id)
    assert after is not None
    assert (after.turn, after.state, after.outcome) == (5, before.state, before.outcome)
    assert [one.turn async for one in replay(store, forks[0])][-1] == 6


async def test_a_fork_that_comes_after_the_mark_is_refused(
    store: Store, beside: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = whimsical()
    async with begin_run(store, scenario) as parent:
        await parent.run(5)
    looked = itertools.count(1)
    real = removing._forks  # noqa: SLF001 - the moment between looking and removing has no other handle

    async def slow(where: Store, run: SimulationRun) -> AsyncIterator[SimulationRun]:
        async for one in real(where, run):
            yield one
        if next(looked) == 2:
            with pytest.raises(InvalidOperationError, match="is being removed and cannot be forked"):
                async with fork_run(beside, parent.run_id, scenario, at=4):
                    pass

    monkeypatch.setattr(removing, "_forks", slow)
    assert await remove_run(store, parent.run_id) == 5
    assert await store.list_runs() == []


async def test_two_remove_a_run_at_once_while_it_is_played(store: Store, beside: Store) -> None:
    async with begin_run(store, whimsical(turns=2000)) as run:
        await run.run(300)
        gone = [asyncio.create_task(remove_run(one, run.run_id)) for one in (store, beside)]
        with pytest.raises((InvalidOperationError, VersionConflictError, SimulationNotFoundError)):
            await run.run(2000)
        assert all(count >= 300 for count in await asyncio.gather(*gone))
    assert await store.get_run(run.run_id) is None
    assert await store.read_turns(run.run_id) == []


async def test_a_removal_that_was_broken_off_is_begun_again_or_given_up(store: Store) -> None:
    scenario = whimsical()
    async with begin_run(store, scenario) as run:
        await run.run(5)
    left = await store.commit(RemoveRun(run_id=run.run_id, most=2))
    assert left is not None
    assert left.state is RunState.ENDED
    async with resume_run(store, run.run_id, scenario) as again:
        await again.run(1)
    assert await remove_run(store, run.run_id) == 4
