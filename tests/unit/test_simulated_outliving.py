"""Nights in which the agents outlive their manager: they happen, and they find what they are there for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from ostler.isolation.base import Exit
from ostler.lifecycle import recover, settle, working
from ostler.model import AttemptOutcome
from ostler.testing.simulated import rehearse

#: Every third night is one of them.
NIGHTS = range(60_002, 60_002 + 3 * 40, 3)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log of a night is long, and only its end matters."""
    logger = logging.getLogger("ostler.lifecycle")
    logger.disabled = True
    yield
    logger.disabled = False


def faults() -> str:
    return "\n".join(fault for seed in NIGHTS for fault in rehearse(seed).faults)


def test_whatever_goes_wrong_nothing_that_lives_is_lost() -> None:
    hits: Counter[str] = Counter()
    for seed in NIGHTS:
        report = rehearse(seed)
        report.require()
        hits.update(report.hits)
    wanted = ("adopted", "rejoined", "unseen_death", "asked_again", "manager_killed", "manager_closed")
    assert not [name for name in wanted if not hits[name]]


def test_the_same_number_gives_the_same_night() -> None:
    for seed in NIGHTS[:5]:
        assert rehearse(seed) == rehearse(seed)


# --- it bites: each of these plants a fault that a hasty change could make ---------------------------


def test_one_that_is_ended_though_it_lived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "_on_its_way_out", Mock(return_value=True))
    assert "lived on, and was not taken up again" in faults()


def test_a_request_that_is_done_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "take_order", Mock())
    assert "is executed twice" in faults()


def test_a_death_that_is_told_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = recover._tell  # noqa: SLF001 - the fault is planted here

    async def guess(house: Any, record: Any, attempt: Any, pause: Any, how: Exit) -> None:
        del how
        await tell(house, record, attempt, pause, Exit(outcome=AttemptOutcome.LOST))

    monkeypatch.setattr(recover, "_tell", guess)
    assert "is written down" in faults()


def test_a_state_that_is_not_put_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "due", Mock(return_value=False))
    assert "is still processing" in faults()
