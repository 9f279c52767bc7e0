"""What a run may be told; every value has a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

from ostler.model import Fault, Record
from ostler.model.bounds import Interval
from ostler.model.context import json_faults
from ostler.model.record import MAX_COUNT, settle
from ostler.model.simulation import MAX_SEED
from ostler.simulation.validator import DEFAULT_MAX_AGENTS


class OnFailure(StrEnum):
    """What becomes of an agent that raised, or did not answer in time. Retries come first."""

    PAUSE = "pause"
    REMOVE = "remove"
    #: It stays as it is and is asked again in the next turn.
    KEEP = "keep"


class OnIdle(StrEnum):
    """What becomes of a run in which nobody is active, once the counters of this turn were heard."""

    #: It ends at once.
    END = "end"
    #: Turns pass while a counter runs; where none does, it ends.
    PASS = "pass"  # noqa: S105 - turns pass; no secret
    #: Turns pass while a counter runs; where none does, it waits until somebody joins or goes on.
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(Record):
    #: Two runs of one scenario with one seed have one history.
    seed: Annotated[int, Interval(ge=0, le=MAX_SEED)] = 0
    #: Whatever engine and brains want to be told; JSON values.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_agents: Annotated[int, Interval(ge=1, le=MAX_COUNT)] = DEFAULT_MAX_AGENTS
    #: How long one agent may think in one turn.
    decision_timeout: Annotated[timedelta, Interval(ge=timedelta(milliseconds=10), le=timedelta(days=1))] = timedelta(
        seconds=30
    )
    #: How many may think at a time.
    concurrency: Annotated[int, Interval(ge=1, le=10_000)] = 64
    on_error: OnFailure = OnFailure.PAUSE
    on_timeout: OnFailure = OnFailure.PAUSE
    #: How often one that failed is asked again in the same turn.
    retries: Annotated[int, Interval(ge=0, le=100)] = 0
    #: After so many turns, one that was paused for a failure goes on by itself; None: somebody has to say so.
    failure_pause_turns: Annotated[int, Interval(ge=1, le=MAX_COUNT)] | None = None
    on_idle: OnIdle = OnIdle.PASS
    #: Every so many turns the whole state is written down; in between, what changed.
    snapshot_every: Annotated[int, Interval(ge=1, le=10_000)] = 50

    def __post_init__(self) -> None:
        settle(self, "parameters")

    def rules(self) -> Iterator[Fault]:
        yield from json_faults("parameters", self.parameters)
