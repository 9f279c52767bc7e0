"""A line of what an agent wrote."""

from __future__ import annotations

from typing import Literal

from ostler.model.record import Record, record
from ostler.model.types import Moment

Stream = Literal["stdout", "stderr"]


@record
class LogLine(Record):
    """One line of output. `cursor` is the place behind it: reading after it goes on with the next line."""

    attempt: int
    text: str
    cursor: str
    time: Moment | None = None
    #: None where it is not known: a terminal, the log of an agent inside the program, a line of an earlier version.
    stream: Stream | None = None
