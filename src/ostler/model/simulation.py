"""Runs of turn-based populations: their settings, the run as a whole, and the rows of its turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from ostler.model.access import HOME_WORKSPACE_ID
from ostler.model.context import json_faults
from ostler.model.record import Record, record
from ostler.model.text import MAX_REASON, name_faults, plain_text_faults
from ostler.model.types import MAX_COUNT, Duration, Interval, Moment
from ostler.model.validation import Fault

MAX_SEED = 2**63 - 1
#: A scenario may hold the whole text of its file.
MAX_SCENARIO_BYTES = 4 * 1024 * 1024

_Count = Annotated[int, Interval(ge=1, le=MAX_COUNT)]
_Turn = Annotated[int, Interval(ge=0, le=MAX_COUNT)]


class OnFailure(StrEnum):
    """What becomes of an agent that raised, or did not answer in time."""

    PAUSE = "pause"
    REMOVE = "remove"
    KEEP = "keep"  #: it is asked again in the next turn


class OnIdle(StrEnum):
    """What becomes of a run in which no agent is active."""

    END = "end"
    PASS = "pass"  # noqa: S105 - turns pass while a counter runs; without a counter the run ends
    WAIT = "wait"  #: turns pass while a counter runs; without a counter the run waits for an operation from outside


@record
class SimulationSettings(Record):
    #: Two runs of one scenario with one seed have one history.
    seed: Annotated[int, Interval(ge=0, le=MAX_SEED)] = 0
    #: For the engine and the brains; JSON values.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_agents: _Count = 25
    #: How long one agent may take to decide.
    decision_timeout: Annotated[Duration, Interval(ge=timedelta(milliseconds=10), le=timedelta(days=1))] = timedelta(
        seconds=30
    )
    #: How many agents may decide at a time.
    concurrency: Annotated[int, Interval(ge=1, le=10_000)] = 64
    on_error: OnFailure = OnFailure.PAUSE
    on_timeout: OnFailure = OnFailure.PAUSE
    #: The turns after which an agent that was paused for a failure resumes; None: it does not resume by itself.
    failure_pause_turns: _Count | None = None
    on_idle: OnIdle = OnIdle.PASS
    #: Every so many turns the whole state is written, in between only what changed.
    snapshot_every: Annotated[int, Interval(ge=1, le=10_000)] = 50

    def rules(self) -> Iterator[Fault]:
        yield from json_faults("parameters", self.parameters)


class RunState(StrEnum):
    OPEN = "open"  #: more turns may be played
    ENDED = "ended"
    REMOVING = "removing"  #: its turns are being removed; it takes no more turns and no forks


@record
class SimulationRun(Record):
    """One run of a population, as far as it has come."""

    run_id: UUID
    workspace_id: UUID = HOME_WORKSPACE_ID
    name: str
    state: RunState = RunState.OPEN
    #: Why it ended.
    outcome: str | None = None
    #: The last complete turn.
    turn: _Turn = 0
    #: SHA-256 of the history up to that turn.
    digest: str
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    #: Where the scenario came from, with the text of its file; None for a run that a program began.
    scenario: Mapping[str, Any] | None = None
    #: The run that it was forked from, and after which turn.
    parent_id: UUID | None = None
    forked_at: _Turn | None = None
    created_at: Moment
    updated_at: Moment

    @property
    def seed(self) -> int:
        return self.settings.seed

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from plain_text_faults("outcome", self.outcome, MAX_REASON)
        yield from json_faults("scenario", self.scenario, MAX_SCENARIO_BYTES)
        if (self.parent_id is None) != (self.forked_at is None):
            yield Fault(field="forked_at", bound="must be given together with parent_id")


@record
class SimulationTurn(Record):
    """What one turn did. Written once."""

    run_id: UUID
    turn: int
    #: JSON: what two equal histories agree in.
    core: str
    #: JSON: the words of errors, which may differ between equal histories; None where there are none.
    notes: str | None = None
    #: SHA-256 of the digest before and of the core.
    digest: str


@record
class SimulationWhole(Record):
    """The whole state after a turn, so that reading does not begin at turn 0."""

    run_id: UUID
    turn: int
    #: The digest of the history up to this turn.
    digest: str
    #: JSON.
    body: str
    #: SHA-256 of turn, digest and body.
    seal: str
