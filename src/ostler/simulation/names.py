"""Which number stands behind a name that is taken: the lowest that is free, found without counting up."""

from __future__ import annotations

from collections.abc import Container
from heapq import heappop, heappush

#: A longer row of digits is part of the name.
_MAX_DIGITS = 15


class _Numbers:
    """Behind one name: every number below `next` is taken, or in `freed`."""

    __slots__ = ("freed", "heap", "next")

    def __init__(self) -> None:
        self.next = 1
        self.freed: set[int] = set()
        self.heap: list[int] = []


class NameIndex:
    """Follows the names that come and go. It is a hint: each name that it finds is looked up before it is given."""

    def __init__(self) -> None:
        self._numbers: dict[str, _Numbers] = {}

    def free_name(self, name: str, taken: Container[str]) -> str:
        """The first of `name_1`, `name_2`, … that is not taken."""
        known = self._numbers.get(name) or _Numbers()
        while known.heap:
            candidate = f"{name}_{known.heap[0]}"
            if known.heap[0] in known.freed and candidate not in taken:
                return candidate
            known.freed.discard(heappop(known.heap))
        while (candidate := f"{name}_{known.next}") in taken:
            known.next += 1
            self._numbers[name] = known
        return candidate

    def joined(self, name: str) -> None:
        base, number = _split(name)
        known = self._numbers.get(base)
        if number == 1 and known is None:
            known = self._numbers[base] = _Numbers()
        if known is not None:
            known.freed.discard(number)
            known.next += number == known.next

    def left(self, name: str) -> None:
        base, number = _split(name)
        known = self._numbers.get(base)
        if known is None or not 0 < number < known.next or number in known.freed:
            return
        known.freed.add(number)
        heappush(known.heap, number)
        while known.next - 1 in known.freed:
            known.next -= 1
            known.freed.remove(known.next)
        if known.next == 1:
            del self._numbers[base]
        elif len(known.heap) > 2 * len(known.freed) + 16:
            known.heap = sorted(known.freed)


def _split(name: str) -> tuple[str, int]:
    """`crow_12` is the twelfth of `crow`; 0 for a name that has no number behind it."""
    base, _, digits = name.rpartition("_")
    if not base or len(digits) > _MAX_DIGITS or not digits.isascii() or not digits.isdigit() or digits[0] == "0":
        return name, 0
    return base, int(digits)
