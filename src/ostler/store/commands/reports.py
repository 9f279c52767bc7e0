"""What is observed of an instance, and what it says of itself: its health, what it uses, how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ostler.errors import InvalidOperationError
from ostler.model import (
    AgentHealthChangedEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentMetricsUpdatedEvent,
    AgentProgressEvent,
    AgentSignalEvent,
    Fault,
    HealthState,
    clipped,
    shown,
)
from ostler.model.text import name_faults
from ostler.store.commands.checking import kind_faults, mapping_faults, optional_faults, record_faults
from ostler.store.commands.instances import MAX_ERROR, AgentError, OnInstance
from ostler.store.kinds import Kind
from ostler.store.unit import Unit

#: So much of what an agent says about its progress is kept.
MAX_MESSAGE = 2000
#: What a word of the agent changes on its record.
_SPOKEN = frozenset({"version", "updated_at"})


@dataclass(kw_only=True, eq=False)
class ReportHealth(OnInstance):
    """What a probe found. A change of state is an event; becoming healthy ends a series of restarts."""

    action: ClassVar[str] = "health"

    health: AgentHealthStatus

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from record_faults("health", self.health, AgentHealthStatus)

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if not old.is_active:
            raise InvalidOperationError(
                f"{self.subject} is {old.state}; its health is of no account", current=old.state
            )
        found = self.health
        if found.details is not None:
            found = found.evolve(details=clipped(found.details, MAX_ERROR))
        if found == old.health:
            return old
        if found.state is old.health.state:
            # The same again: only its counts and its time differ, which is no event and no new version.
            same = old.evolve(health=found)
            unit.put(Kind.INSTANCE, same)
            return same
        healed = found.state is HealthState.HEALTHY
        new = old.evolve(
            health=found,
            restart_count=0 if healed else old.restart_count,
            failing_since=None if healed else old.failing_since,
            version=old.version + 1,
            updated_at=unit.now,
        )
        unit.put(Kind.INSTANCE, new)
        unit.emit(
            AgentHealthChangedEvent,
            self.by,
            new,
            previous_health=old.health.state,
            new_health=new.health.state,
            details=new.health.details,
        )
        unit.audit(self.by, self.action, self.subject, detail=f"{old.health.state} to {new.health.state}")
        return new


@dataclass(kw_only=True, eq=False)
class ReportMetrics(OnInstance):
    """A sample. Not audited: it is an observation, not an act."""

    action: ClassVar[str] = "metrics"

    metrics: AgentMetrics

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from record_faults("metrics", self.metrics, AgentMetrics)

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if not old.is_active:
            raise InvalidOperationError(
                f"{self.subject} is {old.state}; there is nothing to measure", current=old.state
            )
        new = old.evolve(metrics=self.metrics, version=old.version + 1, updated_at=unit.now)
        unit.put(Kind.INSTANCE, new)
        unit.emit(AgentMetricsUpdatedEvent, self.by, new, metrics=self.metrics)
        return new


@dataclass(kw_only=True, eq=False)
class _Spoken(OnInstance):
    """A word of the agent itself, which only the log keeps. Not audited: it is a claim, not an act."""

    def _heard(self, unit: Unit) -> AgentInstance:
        new = _once_more(self._speaking(unit), unit)
        unit.put(Kind.INSTANCE, new, _SPOKEN)
        return new

    def _speaking(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if not old.is_active:
            raise InvalidOperationError(f"{self.subject} is {old.state}; it has no more to say", current=old.state)
        return old


@dataclass(kw_only=True, eq=False)
class ReportProgress(_Spoken):
    """How far the agent says it is."""

    action: ClassVar[str] = "progress"

    #: 0 to 1.
    fraction: float | None = None
    message: str | None = None
    details: Mapping[str, Any] | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.fraction is not None:
            yield from _fraction_faults("fraction", self.fraction)
        yield from optional_faults("message", self.message, str)
        if self.details is not None:
            yield from mapping_faults("details", self.details)

    def apply(self, unit: Unit) -> AgentInstance:
        new = self._heard(unit)
        unit.emit(
            AgentProgressEvent,
            self.by,
            new,
            fraction=None if self.fraction is None else float(self.fraction),
            message=clipped(self.message, MAX_MESSAGE) if self.message else None,
            details=self.details,
        )
        return new


@dataclass(kw_only=True, eq=False)
class ReportSignal(_Spoken):
    """A named word of the agent to whoever listens."""

    action: ClassVar[str] = "signal"

    name: str
    payload: Mapping[str, Any] | None = None

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from _signal_faults("", self.name, self.payload)

    def apply(self, unit: Unit) -> AgentInstance:
        new = self._heard(unit)
        unit.emit(AgentSignalEvent, self.by, new, name=self.name, payload=self.payload)
        return new


@dataclass(kw_only=True, eq=False)
class ReportSignals(_Spoken):
    """Several of them in their order, each an event of its own: all of them, or none."""

    action: ClassVar[str] = "signal"

    #: Name and payload of each.
    signals: tuple[tuple[str, Mapping[str, Any] | None], ...]

    @property
    def weight(self) -> int:
        return len(self.signals)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if not _are_pairs(self.signals):
            yield Fault(field="signals", bound="must be pairs of name and payload", value=shown(self.signals))
            return
        for place, (name, payload) in enumerate(self.signals):
            yield from _signal_faults(f"signals.{place}.", name, payload)

    def apply(self, unit: Unit) -> AgentInstance:
        new = self._speaking(unit)
        for name, payload in self.signals:
            new = _once_more(new, unit)
            unit.emit(AgentSignalEvent, self.by, new, name=name, payload=payload)
        unit.put(Kind.INSTANCE, new, _SPOKEN)
        return new


def _once_more(old: AgentInstance, unit: Unit) -> AgentInstance:
    return old.evolve(version=old.version + 1, updated_at=unit.now)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, tuple) and len(one) == 2 for one in value)


def _signal_faults(where: str, name: Any, payload: Any) -> Iterator[Fault]:
    yield from kind_faults(f"{where}name", name, str)
    yield from name_faults(f"{where}name", name)
    if payload is not None:
        yield from mapping_faults(f"{where}payload", payload)


def _fraction_faults(field: str, value: Any) -> Iterator[Fault]:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1  # as no NaN is
    if not fits:
        yield Fault(field=field, bound="must be a number from 0 to 1", value=shown(value))


@dataclass(kw_only=True, eq=False)
class ReportError(OnInstance):
    """Something went wrong inside the agent, and it lives on."""

    action: ClassVar[str] = "error"

    error: AgentError

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from kind_faults("error", self.error, AgentError)
        if isinstance(self.error, AgentError):
            yield from self.error.faults()

    def apply(self, unit: Unit) -> AgentInstance:
        old = self._current(unit)
        if not old.is_active:
            raise InvalidOperationError(
                f"{self.subject} is {old.state}; its errors are of no account", current=old.state
            )
        new = old.evolve(version=old.version + 1, updated_at=unit.now)
        unit.put(Kind.INSTANCE, new)
        self.error.emit(unit, self.by, new)
        return new
