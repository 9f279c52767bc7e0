"""A progress bar, where somebody sits at a terminal that can draw one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

_USUAL_WIDTH = 80
_WIDEST_BAR = 30
_NARROWEST_BAR = 5
#: Everything but the bar in `turns  [###]  5/12`, without the numbers; and the time that is left, with its gap.
_AROUND = len("turns  []  /")
_TIME_LEFT = len("  00:00:00")


def has_terminal() -> bool:
    """Whether a line can be written anew on standard error."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(turns: int, begun: int) -> Iterator[Callable[[], None]]:
    """Call what it gives after each turn."""
    bar: Any = click.progressbar(
        length=turns,
        label="turns",
        file=sys.stderr,
        show_pos=True,
        update_min_steps=max((turns - begun) // 200, 1),
        # The time that is left would be reckoned with the turns that were played before.
        **fitted(columns(), turns, timed=not begun),
    )
    bar.pos = begun
    with bar:
        yield lambda: bar.update(1)


def fitted(room: int, turns: int, *, timed: bool) -> dict[str, Any]:
    """As much of it as one line bears: what is written over the edge cannot be written anew."""
    left = room - 1 - _AROUND - 2 * len(str(turns))
    if timed and left - _TIME_LEFT >= _NARROWEST_BAR:
        return {"show_eta": True, "width": min(_WIDEST_BAR, left - _TIME_LEFT)}
    if left >= _NARROWEST_BAR:
        return {"show_eta": False, "width": min(_WIDEST_BAR, left)}
    return {"show_eta": False, "width": 1, "bar_template": "%(info)s"}


def columns() -> int:
    """Of the terminal that the bar is drawn on; standard output may lead elsewhere."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH
