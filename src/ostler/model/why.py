"""The answer to "why is it like that?"."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from ostler.model.record import Record, settle
from ostler.model.states import AgentState


@dataclass(frozen=True, kw_only=True)
class Why(Record):
    """What an instance is doing, what shows it, and what would make it do something else. All of it is to be read."""

    instance_id: UUID
    state: AgentState
    #: One sentence.
    verdict: str
    evidence: tuple[str, ...] = ()
    what_would_change_it: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settle(self, "evidence", "what_would_change_it")
