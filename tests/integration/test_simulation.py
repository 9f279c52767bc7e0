"""Nights made up from numbers: whatever goes wrong, the record stays true and nothing is left behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from unittest.mock import AsyncMock, Mock

import pytest

from ostler.isolation.base import StopReport
from ostler.lifecycle import settle, suspend, watch
from ostler.testing.simulated import Misfortune, rehearse

#: Each test takes so many seeds from its own place on.
NIGHTS = 40
MANY = 2500


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log of a night is long, and only its end matters."""
    logger = logging.getLogger("ostler.lifecycle")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.parametrize("first", range(0, 8 * NIGHTS, NIGHTS))
def test_whatever_goes_wrong_the_record_stays_true(first: int) -> None:
    for seed in range(first, first + NIGHTS):
        rehearse(seed).require()


@pytest.mark.parametrize("seed", [73, 76, 96, 147, 297, 426, 871, 1006, 5010, 30900, 31689])
def test_nights_that_once_went_wrong(seed: int) -> None:
    """Twins, lost slots, waits that nobody ended: each was found by its number, and is kept by it."""
    rehearse(seed).require()


@pytest.mark.parametrize("seed", range(1000, 1010))
def test_the_same_number_gives_the_same_night(seed: int) -> None:
    once, again = rehearse(seed), rehearse(seed)
    assert once == again
    assert once.events > 10


def test_every_kind_of_misfortune_really_happens() -> None:
    hits: Counter[str] = Counter()
    for seed in range(2000, 2060):
        hits.update(rehearse(seed).hits)
    more = {"death", "clock_jump", "manager_killed", "manager_closed", "caller_gone", "observer"}
    store = {"StoreBusyError", "StoreFullError"}
    expected = set(Misfortune.__dataclass_fields__) | more | store
    assert not [name for name in sorted(expected) if not hits[name]]


# --- it bites: each of these plants a fault that a hasty change could make, and the nights must find it ------------


def nights_with_faults(first: int, count: int = 60) -> int:
    return sum(bool(rehearse(seed).faults) for seed in range(first, first + count))


def test_a_parked_agent_that_is_left_running_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend, "stop_cell", AsyncMock(return_value=StopReport(graceful=True)))
    assert nights_with_faults(3000)


def test_a_watch_that_does_not_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost notices of a death are then never made up for."""
    monkeypatch.setattr(watch.Watch, "look", Mock())
    assert nights_with_faults(3000)


def test_a_state_that_is_not_written_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy store refused once must be tried again."""
    monkeypatch.setattr(settle, "due", Mock(return_value=False))
    assert nights_with_faults(3000)


@pytest.mark.torture
@pytest.mark.parametrize("first", range(10_000, 10_000 + 8 * MANY, MANY))
def test_thousands_of_nights(first: int) -> None:
    for seed in range(first, first + MANY):
        rehearse(seed).require()
