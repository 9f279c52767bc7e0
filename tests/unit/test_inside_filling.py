"""What is made after the holes are filled stands together: in a forked agent, on few pages of its own."""

from __future__ import annotations

import sys

from ostler.isolation.inside.filling import fill_holes

_POOL = 16 * 1024


def _full_of_holes() -> list[bytes]:
    """Many of one size, of which every other one has gone."""
    return [bytes(200) for _ in range(600)][::2]


def test_what_is_made_after_the_holes_are_filled_stands_together() -> None:
    holes = _full_of_holes()
    scattered = {id(one) // _POOL for one in [bytes(200) for _ in range(30)]}
    filling = fill_holes()
    together = {id(one) // _POOL for one in [bytes(200) for _ in range(30)]}
    assert len(together) <= 2
    assert len(together) <= len(scattered)
    assert holes
    assert filling


def test_the_filling_is_small() -> None:
    assert sum(map(sys.getsizeof, fill_holes())) < 16 * 1024 * 1024
