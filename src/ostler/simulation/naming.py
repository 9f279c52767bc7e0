"""Which name an agent gets when the one it asked for is taken: the lowest free number behind it, found at once."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

#: A longer row of digits is a name like any other, not a number that was put behind one.
_MOST_DIGITS = 15
_SLACK = 16


class _Numbers:
    """The numbers in use behind one name. The lowest free one is known without looking through them."""

    __slots__ = ("_ahead", "_heap", "_holes", "_next")

    def __init__(self) -> None:
        #: Every number below is in use, or a hole.
        self._next = 1
        self._ahead: set[int] = set()
        self._holes: set[int] = set()
        self._heap: list[int] = []

    @property
    def unused(self) -> bool:
        return self._next == 1 and not self._ahead

    def lowest(self) -> int:
        if not self._holes:
            self._heap.clear()
            return self._next
        while self._heap[0] not in self._holes:
            heappop(self._heap)
        return self._heap[0]

    def take(self, number: int) -> None:
        if number in self._holes:
            self._holes.remove(number)
        elif number == self._next:
            self._next += 1
            while self._next in self._ahead:
                self._ahead.remove(self._next)
                self._next += 1
        else:
            self._ahead.add(number)

    def free(self, number: int) -> None:
        if number >= self._next:
            self._ahead.remove(number)
        elif number == self._next - 1:
            self._next = number
            while self._next - 1 in self._holes:
                self._next -= 1
                self._holes.remove(self._next)
        else:
            self._holes.add(number)
            heappush(self._heap, number)
            if len(self._heap) > 2 * len(self._holes) + _SLACK:  # taken by name, not by number: left in the heap
                self._heap = list(self._holes)
                heapify(self._heap)


class NameBook:
    """Follows every name that comes and goes, so that the ten-thousandth of one name costs what the first did."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[str, _Numbers] = {}

    def numbered(self, name: str) -> str:
        """The first of `name_1`, `name_2`, … that nobody has."""
        known = self._numbers.get(name)
        return f"{name}_{known.lowest() if known else 1}"

    def take(self, name: str) -> None:
        base, number = _split(name)
        if number:
            known = self._numbers.get(base)
            if known is None:
                known = self._numbers[base] = _Numbers()
            known.take(number)

    def free(self, name: str) -> None:
        base, number = _split(name)
        if number:
            known = self._numbers[base]
            known.free(number)
            if known.unused:
                del self._numbers[base]


def _split(name: str) -> tuple[str, int]:
    """`crow_12` is the twelfth of `crow`; 0 for a name that nobody was given by counting."""
    base, _, digits = name.rpartition("_")
    if not base or len(digits) > _MOST_DIGITS or not digits.isascii() or not digits.isdigit() or digits[0] == "0":
        return name, 0
    return base, int(digits)
