"""A population that lives in turns: the run as a whole, and one row per turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from ostler.model.bounds import Interval
from ostler.model.context import json_faults
from ostler.model.moments import Moment
from ostler.model.people import HOME_WORKSPACE_ID
from ostler.model.record import MAX_COUNT, Record, settle
from ostler.model.text import name_faults, plain_text_faults
from ostler.model.validation import Fault, ValidationResult, shown

MAX_OUTCOME = 2000
#: A scenario may hold the whole text of its file.
MAX_SCENARIO_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_SEED = 2**63 - 1

_DIGEST = re.compile(r"[0-9a-f]{64}|")


class RunState(StrEnum):
    #: More turns may be played. Whether somebody plays them now is not known here.
    OPEN = "open"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class SimulationRun(Record):
    """One life of a population, from its seed to where it stands."""

    run_id: UUID
    workspace_id: UUID = HOME_WORKSPACE_ID
    name: str
    #: Every draw of chance follows from it.
    seed: Annotated[int, Interval(ge=0, le=MAX_SEED)]
    state: RunState = RunState.OPEN
    #: The last turn that is complete.
    turn: Annotated[int, Interval(ge=0, le=MAX_COUNT)] = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: What happens to it from outside; None where nothing does.
    scenario: Mapping[str, Any] | None = None
    #: The run that it branched off from, and at which turn.
    parent_id: UUID | None = None
    forked_at: Annotated[int, Interval(ge=0, le=MAX_COUNT)] | None = None
    #: Why it ended.
    outcome: str | None = None
    #: SHA-256 of its history up to its turn.
    digest: str = ""
    created_at: Moment
    updated_at: Moment
    version: Annotated[int, Interval(ge=1, le=MAX_COUNT)] = 1

    def __post_init__(self) -> None:
        settle(self, "settings", "scenario")

    def rules(self) -> Iterator[Fault]:
        yield from name_faults("name", self.name)
        yield from json_faults("settings", self.settings)
        yield from json_faults("scenario", self.scenario, MAX_SCENARIO_BYTES)
        yield from plain_text_faults("outcome", self.outcome, MAX_OUTCOME)
        yield from _digest_faults(self.digest)
        if (self.parent_id is None) != (self.forked_at is None):
            yield Fault(field="forked_at", bound="must be given together with parent_id, or neither of them")


@dataclass(frozen=True, kw_only=True)
class SimulationTurn(Record):
    """What one turn did. Written once and never changed."""

    run_id: UUID
    turn: Annotated[int, Interval(ge=0, le=MAX_COUNT)]
    #: Its body holds the complete state, not only what changed.
    whole: bool
    #: JSON text; nobody below the simulation looks into it.
    body: str
    #: SHA-256 of the history up to this turn.
    digest: str = ""
    occurred_at: Moment

    def validate(self) -> ValidationResult:
        """A body may be large and comes with every turn: it is weighed, and the rest is checked without it."""
        if not isinstance(self.body, str):
            return super().validate()
        rest = super(SimulationTurn, self.evolve(body="")).validate()
        return ValidationResult(faults=(*rest.faults, *_body_faults(self.body)))

    def rules(self) -> Iterator[Fault]:
        yield from _digest_faults(self.digest)


def _digest_faults(digest: Any) -> Iterator[Fault]:
    if isinstance(digest, str) and not _DIGEST.fullmatch(digest):
        yield Fault(field="digest", bound="must be a SHA-256 in 64 hex digits, or empty", value=shown(digest))


def _body_faults(body: str) -> Iterator[Fault]:
    """Its size, and that every store can keep it; both without a step per character."""
    if "\0" in body:
        yield Fault(field="body", bound="must not contain NUL")
    try:
        size = len(body) if body.isascii() else len(body.encode())
    except UnicodeEncodeError:
        yield Fault(field="body", bound="must be text without lone surrogates")
        return
    if size > MAX_BODY_BYTES:
        bound = f"must be at most {MAX_BODY_BYTES >> 20} MiB; let a turn carry only what changed"
        yield Fault(field="body", bound=bound, value=f"{size >> 20} MiB")
