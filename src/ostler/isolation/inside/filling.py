"""Before the first fork: the holes in memory are filled.

Python gives a new object the first free place among older ones of its size. In a forked child that place lies on a
page which it shares with its siblings, and writing there copies the page; the places are scattered, so it would copy
hundreds. With no hole left, what a child makes stands side by side on new pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

#: Python's allocator hands out places of one size from a pool; a pool begins with a header.
_POOL, _HEADER = 16 * 1024, 48
_STEP, _LARGEST = 16, 512
#: What bytes take beyond their content.
_BYTES = b"".__sizeof__()
#: Enough by far; where the allocator is another one, nothing is found and this is the end of it.
_MOST = 1000


def fill_holes() -> list[object]:
    """What fills them; keep it for as long as there are forks."""
    kept: list[object] = []
    for size, make in _of_every_size():
        for _ in range(_MOST):
            one = make()
            if id(one) % _POOL == _HEADER and id(make()) == id(one) + size:
                break  # the first two places of a new pool: all older ones are full
            kept.append(one)
    return kept


def _of_every_size() -> Iterator[tuple[int, Callable[[], object]]]:
    yield _STEP, object
    yield 2 * _STEP, partial(complex, 1)  # to the most: the numbers by which we look are of this size themselves
    for size in range(3 * _STEP, _LARGEST + 1, _STEP):
        yield size, partial(bytes, size - _BYTES)
