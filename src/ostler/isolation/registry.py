"""From the name of a level to the level itself, loaded at its first use."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from ostler.clock import Clock
from ostler.errors import InvalidOperationError, MissingExtraError
from ostler.isolation.base import Isolation, Site
from ostler.model.states import IsolationLevel

#: Where an installed package names the levels that it brings, by the value of `IsolationLevel`.
GROUP = "ostler.isolation"

_log = logging.getLogger("ostler.isolation")


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelSource:
    """Where the class of a level stands, as "module:Class", and which extra brings what it imports."""

    path: str
    extra: str | None = None


#: The levels that come with Ostler. They cannot be taken over by an installed package, only by `use`.
BUILT_IN: Mapping[IsolationLevel, LevelSource] = MappingProxyType(
    {
        IsolationLevel.NONE: LevelSource(path="ostler.isolation.none:NoIsolation"),
        IsolationLevel.THREAD: LevelSource(path="ostler.isolation.thread:ThreadIsolation"),
        IsolationLevel.PROCESS: LevelSource(path="ostler.isolation.process.level:ProcessIsolation"),
    }
)


class IsolationLevels:
    """The levels of one manager. Each is made once, when it is first asked for."""

    def __init__(
        self, clock: Clock, sources: Mapping[IsolationLevel, LevelSource] = BUILT_IN, site: Site | None = None
    ) -> None:
        self._clock = clock
        #: All levels share it, so that what becomes known later is known to those already made.
        self._site = site or Site()
        self._sources = sources
        self._levels: dict[IsolationLevel, Isolation] = {}
        #: Those that another one took the place of: their agents may still live, so they are closed at the end.
        self._replaced: list[Isolation] = []

    @property
    def site(self) -> Site:
        return self._site

    def get(self, level: IsolationLevel) -> Isolation:
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = self._class_of(level)(self._clock, self._site)
        return found

    def use(self, level: IsolationLevel, isolation: Isolation) -> None:
        """Put in another one, from now on."""
        before = self._levels.get(level)
        if before is not None and before is not isolation:
            self._replaced.append(before)
        self._levels[level] = isolation

    def known(self) -> tuple[IsolationLevel, ...]:
        """Every level that can be asked for, weakest first. That its extra is installed is not looked at."""
        names = {*self._levels, *self._sources, *_outside()}
        return tuple(level for level in IsolationLevel if level in names)

    async def close(self) -> None:
        """Close every level that was made. One that fails does not keep the others from it."""
        levels, self._levels = [*self._replaced, *self._levels.values()], {}
        self._replaced = []
        for isolation in levels:
            try:
                await isolation.close()
            except Exception:  # noqa: BLE001 - logged, and the others have their turn
                _log.exception("isolation level %s failed to close", isolation.level)

    def _class_of(self, level: IsolationLevel) -> type[Isolation]:
        source = self._sources.get(level)
        if source is not None:
            return _checked(level, _load(level, source))
        entry = _outside().get(level)
        if entry is not None:
            return _checked(level, _loaded_from(level, entry))
        known = " or ".join(one.value for one in self.known())
        raise InvalidOperationError(
            f"isolation level {level} is not part of this version and no installed package brings it; use {known}"
        )


def _outside() -> dict[IsolationLevel, EntryPoint]:
    """What installed packages bring; of two for the same level the first by name of its package."""
    found: dict[IsolationLevel, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda one: (one.dist.name if one.dist else "", one.value)):
        if entry.name in set(IsolationLevel):
            found.setdefault(IsolationLevel(entry.name), entry)
    return found


def _load(level: IsolationLevel, source: LevelSource) -> Any:
    module, _, name = source.path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        ours = (error.name or "").partition(".")[0] == "ostler"
        if ours or source.extra is None:
            raise
        raise MissingExtraError(f"isolation level {level}", source.extra) from error


def _loaded_from(level: IsolationLevel, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        brought = f" by package {entry.dist.name}" if entry.dist else ""
        raise InvalidOperationError(f"isolation level {level}, brought{brought}, does not load: {error}") from error


def _checked(level: IsolationLevel, found: Any) -> type[Isolation]:
    if not (isinstance(found, type) and issubclass(found, Isolation)):
        raise InvalidOperationError(f"what is registered as isolation level {level} is no Isolation: {found!r:.100}")
    return found
