"""Where an agent lives: one contract, and a level for each kind of place. The levels are loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.lazy_imports import opener

if TYPE_CHECKING:
    from ostler.isolation.base import (
        Capabilities,
        Cell,
        Exit,
        Isolation,
        Listener,
        Site,
        StartPlan,
        StopReport,
        Usage,
        Verb,
    )
    from ostler.isolation.registry import BUILT_IN, IsolationLevels, LevelSource
else:  # a type checker would believe in any name
    __getattr__, __dir__ = opener(
        __name__,
        {
            "base": "Capabilities Cell Exit Isolation Listener Site StartPlan StopReport Usage Verb",
            "registry": "BUILT_IN IsolationLevels LevelSource",
        },
    )

__all__ = [
    "BUILT_IN",
    "Capabilities",
    "Cell",
    "Exit",
    "Isolation",
    "IsolationLevels",
    "LevelSource",
    "Listener",
    "Site",
    "StartPlan",
    "StopReport",
    "Usage",
    "Verb",
]
