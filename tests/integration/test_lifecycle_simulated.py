"""The whole lifecycle by seed: whatever goes wrong, every caller is answered and the record stays true."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
from simulated_machine import Misfortune
from simulated_manager import simulate

#: Seeds of one test, and tests of each kind.
BATCH = 10
BATCHES = 2
TORTURE_BATCHES = 150

KINDS = [
    pytest.param(outlives, kills, id=f"{'outliving' if outlives else 'inside'}-{'killed' if kills else 'closed'}")
    for outlives in (False, True)
    for kills in (False, True)
]


def run_batch(batch: int, *, outlives: bool, kills: bool) -> Counter[str]:
    hits: Counter[str] = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        report = simulate(seed, outlives=outlives, kills=kills)
        report.require()
        hits += report.hits
    return hits


@pytest.mark.parametrize(("outlives", "kills"), KINDS)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_goes_wrong_the_record_stays_true(batch: int, outlives: bool, kills: bool) -> None:
    hits = run_batch(batch, outlives=outlives, kills=kills)
    assert bool(hits["manager_killed"]) == kills
    assert hits["death"]


@pytest.mark.parametrize("seed", [109, 132, 156])
@pytest.mark.parametrize(("outlives", "kills"), KINDS)
def test_seeds_that_once_found_a_fault(seed: int, outlives: bool, kills: bool) -> None:
    """Progress that was written late, a termination without an audit entry, a job longer than its time."""
    simulate(seed, outlives=outlives, kills=kills).require()


@pytest.mark.parametrize("outlives", [False, True], ids=["inside", "outliving"])
def test_the_same_seed_gives_the_same_history(outlives: bool) -> None:
    for seed in (1, 2, 3):
        first, second = (simulate(seed, outlives=outlives) for _ in range(2))
        assert first.events > 0
        assert first.digest == second.digest
        assert first.hits == second.hits


@pytest.mark.torture
@pytest.mark.parametrize(("outlives", "kills"), KINDS)
@pytest.mark.parametrize("batch", range(BATCHES, TORTURE_BATCHES))
def test_whatever_goes_wrong_in_thousands_of_runs_the_record_stays_true(
    batch: int, outlives: bool, kills: bool
) -> None:
    run_batch(batch, outlives=outlives, kills=kills)


@pytest.mark.torture
def test_every_misfortune_happens() -> None:
    hits: Counter[str] = Counter()
    for batch in range(10):
        for outlives in (False, True):
            hits += run_batch(batch, outlives=outlives, kills=True)
    names = {one.name for one in fields(Misfortune)}
    names |= {"StoreBusyError", "StoreFullError", "manager_killed", "manager_close", "manager_keep", "clock_jump"}
    names |= {"caller_gone", "died_alone", "joined", "observer", "answered_unwritten"}
    assert not {name for name in names if not hits[name]}
