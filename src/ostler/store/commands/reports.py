"""What is observed of an instance: its health, and what it uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ostler.errors import InvalidOperationError
from ostler.model import (
    AgentHealthChangedEvent,
    AgentHealthStatus,
    AgentInstance,
    AgentMetrics,
    AgentMetricsUpdatedEvent,
    Fault,
    HealthState,
    clipped,
)
from ostler.store.commands.instances import MAX_ERROR, OnInstance
from ostler.store.kinds import Kind
from ostler.store.unit import Unit


@dataclass(kw_only=True, eq=False)
class ReportHealth(OnInstance):
    """What a probe found. A change of state is an event; becoming healthy ends a series of restarts."""

    action: ClassVar[str] = "health"

    health: AgentHealthStatus

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from self.health.validate()

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
        yield from self.metrics.validate()

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
