"""Where an agent lives: one contract, and a level for each kind of place. The levels are loaded when first used."""

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
from ostler.isolation.finding import BUILT_IN, IsolationLevels, LevelSource

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
