"""Level process: cells held by our keeper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ostler.clock import Clock
from ostler.isolation.base import Site
from ostler.isolation.held.level import HeldIsolation
from ostler.isolation.process.keeper_client import KeeperHolder
from ostler.isolation.process.limits import likely_enforcement
from ostler.model.states import IsolationLevel


class ProcessIsolation(HeldIsolation):
    level: ClassVar[IsolationLevel] = IsolationLevel.PROCESS

    def __init__(self, clock: Clock, site: Site | None = None) -> None:
        site = site or Site()
        super().__init__(clock, site, KeeperHolder(site))
        self._likely: Mapping[str, str] | None = None

    def _likely_enforcement(self) -> Mapping[str, str]:
        if self._likely is None:
            self._likely = likely_enforcement()
        return self._likely
