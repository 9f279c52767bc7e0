"""The settings of tasks: the table `[tasks]` of ostler.toml."""

from __future__ import annotations

import os
from dataclasses import field
from datetime import timedelta
from typing import Annotated

from ostler.model.record import Record, record
from ostler.model.types import Duration, Interval

_Long = Annotated[Duration, Interval(ge=timedelta(seconds=1), le=timedelta(days=7))]


@record
class TaskSettings(Record):
    #: Tasks that are worked on at the same time.
    at_once: Annotated[int, Interval(ge=0, le=1000)] = field(default_factory=lambda: os.cpu_count() or 1)
    #: How long one attempt may work, where neither the task nor its agent says.
    timeout: _Long = timedelta(hours=2)
    check_timeout: _Long = timedelta(minutes=15)
    #: Failed attempts before a task is rejected.
    max_failures: Annotated[int, Interval(ge=1, le=1000)] = 3
    #: How long accepted and rejected tasks stay before they go to the vault.
    retention: Annotated[Duration, Interval(ge=timedelta(0), le=timedelta(days=3650))] = timedelta(hours=24)
    #: A command that is run on every change of state.
    on_change: str | None = None
