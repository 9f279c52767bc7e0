"""Plain tables for a terminal, and the middle of several measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


class Table:
    def __init__(self, title: str, *heads: str) -> None:
        self.title = title
        self._rows: list[tuple[str, ...]] = [heads]

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def __str__(self) -> str:
        widths = [max(len(row[column]) for row in self._rows) for column in range(len(self._rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in self._rows]
        return "\n".join([self.title, "-" * len(self.title), *(line.rstrip() for line in lines), ""])


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)
