"""The kinds of row that a command may read and write, each with its record and its key."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from ostler.model import (
    ACTIVE_STATES,
    GENESIS,
    AgentInstance,
    AgentState,
    Attempt,
    Definition,
    HealthState,
    Lease,
    Principal,
    Record,
    SimulationRun,
    SimulationTurn,
    Task,
    Token,
    Wait,
    Workspace,
)

Key = tuple[Any, ...]

#: Sums of times are counted from here, so that a million of them fit into 64 bits.
_BASE = datetime(2025, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def _milliseconds(moment: datetime) -> int:
    return (moment - _BASE) // _MILLISECOND


def _lived_ms(instance: AgentInstance) -> int:
    ended = instance.terminated_at or instance.created_at
    return max((ended - instance.created_at) // _MILLISECOND, 0)  # the clock may have been set back


@dataclass(frozen=True, kw_only=True)
class IdempotencyRow(Record):
    """The answer that was given to a request, for as long as it may be repeated."""

    workspace_id: UUID
    key: str
    fingerprint: str
    result_json: str
    created_at: datetime


@dataclass(kw_only=True)
class Ledger:
    """The running totals of a workspace: quota, statistics and the end of its audit chain, in one row.

    The only record that is changed in place: the unit of work owns it, and throws it away with the batch.
    """

    workspace_id: UUID
    active: int = 0
    states: dict[AgentState, int] = field(default_factory=lambda: dict.fromkeys(AgentState, 0))
    healths: dict[HealthState, int] = field(default_factory=lambda: dict.fromkeys(HealthState, 0))
    spawned: int = 0
    terminated: int = 0
    restarts: int = 0
    #: Sums from which the average uptime follows at any moment without reading an instance.
    running: int = 0
    running_created_ms: int = 0
    ended: int = 0
    ended_uptime_ms: int = 0
    audit_number: int = 0
    audit_hash: str = GENESIS
    #: The last entry that retention removed; the chain that is kept begins after it.
    anchor_number: int = 0
    anchor_hash: str = GENESIS

    def copy(self) -> Ledger:
        """By hand: one is made for every commit, and `copy.copy` takes its time."""
        twin = object.__new__(Ledger)
        twin.__dict__.update(self.__dict__)
        twin.states, twin.healths = self.states.copy(), self.healths.copy()
        return twin

    def account(self, old: AgentInstance | None, new: AgentInstance | None) -> None:
        """Follow one instance from what it was to what it is; None stands for not there."""
        if old is not None and new is not None and new.health is old.health:
            before, after = old.state, new.state
            if before in ACTIVE_STATES and after in ACTIVE_STATES:
                # By far the most common change, a move between two living states, touches two counts only.
                self.states[before] -= 1
                self.states[after] += 1
                return
        if old is not None:
            self._weigh(old, -1)
        if new is not None:
            self._weigh(new, +1)
        if old is None and new is not None:
            self.spawned += 1
        if old is not None and new is not None:
            self.restarts += new.lifetime_restarts - old.lifetime_restarts
            if new.state is AgentState.TERMINATED and old.state is not AgentState.TERMINATED:
                self.terminated += 1
        if old is not None and new is None:
            self._keep_uptime(old)

    def average_uptime(self, now: datetime) -> timedelta:
        lives = self.running + self.ended
        if not lives:
            return timedelta(0)
        lived = self.ended_uptime_ms + self.running * _milliseconds(now) - self.running_created_ms
        return timedelta(milliseconds=max(lived, 0) / lives)

    def _weigh(self, instance: AgentInstance, sign: int) -> None:
        self.states[instance.state] += sign
        self.healths[instance.health.state] += sign
        self.active += sign * instance.is_active
        if instance.terminated_at is None:
            self.running += sign
            self.running_created_ms += sign * _milliseconds(instance.created_at)
        else:
            self.ended += sign
            self.ended_uptime_ms += sign * _lived_ms(instance)

    def _keep_uptime(self, removed: AgentInstance) -> None:
        """Retention takes the record; the average over all lives stays true."""
        if removed.terminated_at is not None:
            self.ended += 1
            self.ended_uptime_ms += _lived_ms(removed)


class Kind(Enum):
    __hash__ = object.__hash__  # members are unique objects, and the default hash is a Python call

    INSTANCE = AgentInstance
    TASK = Task
    ATTEMPT = Attempt
    WAIT = Wait
    LEASE = Lease
    WORKSPACE = Workspace
    PRINCIPAL = Principal
    TOKEN = Token
    DEFINITION = Definition
    IDEMPOTENCY = IdempotencyRow
    LEDGER = Ledger
    SIMULATION_RUN = SimulationRun
    SIMULATION_TURN = SimulationTurn


_KEY_FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.INSTANCE: ("instance_id",),
    Kind.TASK: ("task_id",),
    Kind.ATTEMPT: ("instance_id", "number"),
    Kind.WAIT: ("wait_id",),
    Kind.LEASE: ("name",),
    Kind.WORKSPACE: ("workspace_id",),
    Kind.PRINCIPAL: ("principal_id",),
    Kind.TOKEN: ("token_id",),
    Kind.DEFINITION: ("definition_id",),
    Kind.IDEMPOTENCY: ("workspace_id", "key"),
    Kind.LEDGER: ("workspace_id",),
    Kind.SIMULATION_RUN: ("run_id",),
    Kind.SIMULATION_TURN: ("run_id", "turn"),
}


def key_fields(kind: Kind) -> tuple[str, ...]:
    return _KEY_FIELDS[kind]


_KEY_READERS = {kind: operator.attrgetter(*names) for kind, names in _KEY_FIELDS.items()}


def key_of(kind: Kind, record: Any) -> Key:
    found: Any = _KEY_READERS[kind](record)
    return found if type(found) is tuple else (found,)
