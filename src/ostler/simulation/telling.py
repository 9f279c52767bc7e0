"""The log of a population: structured events over the standard `logging`, with the names and fields of the contract."""

from __future__ import annotations

import logging
from typing import Any

from ostler.telemetry.log import text

LOGGER_NAME = "ostler.simulation"


class SimulationLog:
    """A reader takes `record.event` and `record.fields`. Costs one question to the logger while the level is off."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(LOGGER_NAME)

    def info(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.WARNING, event, fields)

    def _tell(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            said = " ".join([event, *(f"{name}={text(value)}" for name, value in fields.items())])
            self._logger.log(level, "%s", said, extra={"event": event, "fields": fields}, stacklevel=3)
