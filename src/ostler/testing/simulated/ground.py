"""What every night stands on: its settings, who is registered, and what it is told in at the end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ostler.agents import Agent
from ostler.lifecycle import LifecycleSettings
from ostler.policy.retention import RetentionPolicy

AGES = timedelta(days=3650)
#: The watch looks seldom, to save made-up days from real minutes; nothing is removed, though the clock jumps by years.
SETTINGS = LifecycleSettings(
    tick=timedelta(seconds=20),
    lease_ttl=timedelta(minutes=10),
    metrics_interval=timedelta(minutes=10),
    retention=RetentionPolicy(finished=AGES, events=AGES),
    sweep_interval=timedelta(hours=12),
)


class Nobody(Agent):
    """What is registered; the made-up place does all the acting."""

    def process(self, request: Any) -> Any:
        return request


@dataclass(kw_only=True)
class Report:
    """What one night came to."""

    seed: int
    faults: list[str]
    hits: dict[str, int]
    events: int
    #: Of the whole log: equal seeds give equal digests.
    digest: str

    def require(self) -> None:
        if self.faults:
            raise AssertionError(f"seed {self.seed} breaks the rules:\n" + "\n".join(self.faults))
