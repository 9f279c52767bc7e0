"""A turn that was played, as it is shown, exported and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """Everything about one turn, and the state after it. All values are JSON values."""

    turn: int
    #: Who went on by itself at the start.
    resumed: tuple[str, ...] = ()
    #: In the order of coming; those who failed are not in it.
    decisions: Mapping[str, Any] = field(default_factory=dict)
    #: Who failed, how, and what became of it.
    failures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Who joined, left, was paused or resumed, and what was refused, in the order in which it was done.
    operations: tuple[Mapping[str, Any], ...] = ()
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Turns that are left to each that is paused; None for one without a term.
    paused: Mapping[str, int | None] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    global_state: Any = None
    #: Of the whole history up to here: two runs with the same digest had the same history.
    digest: str = ""
