"""The events of the lifecycle over the standard `logging`.

An event has a name, a level and a template. A value from outside can hold anything, so it is escaped: one event is
one line, whatever an agent says. A program that reads the log takes `record.event` and `record.fields`, or the lines
of `JsonLines`.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from ostler.durations import duration_text
from ostler.model.record import Record
from ostler.model.text import clipped

LOGGER_NAME = "ostler.lifecycle"
#: Of one value; a stack trace is cut there too, and says how much is missing.
MAX_VALUE = 8000
_MISSING = "?"
_FIELD = re.compile(r"\{(\w+)\}")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEvent:
    """One row of the table. The fields are those of the template, in the spelling of Python."""

    name: str
    level: int
    template: str
    fields: tuple[str, ...] = field(init=False)
    _pattern: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        spelled = {name: _HUMP.sub("_", name).lower() for name in _FIELD.findall(self.template)}
        object.__setattr__(self, "fields", tuple(spelled.values()))
        object.__setattr__(self, "_pattern", _FIELD.sub(lambda match: f"{{{spelled[match[1]]}}}", self.template))

    def render(self, fields: Mapping[str, Any]) -> str:
        # A missing field shows as a question mark: a log must not break the work.
        texts = {name: text(fields[name]) if name in fields else _MISSING for name in self.fields}
        return self._pattern.format_map(texts)


def _event(name: str, level: int, template: str) -> LogEvent:
    return LogEvent(name=name, level=level, template=f"[LCM] {template}")


_ID = "InstanceId: {InstanceId}"
_DEBUG, _INFO, _WARN, _ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

LOG_EVENTS: Mapping[str, LogEvent] = MappingProxyType(
    {
        event.name: event
        for event in (
            _event(
                "spawn_requested",
                _DEBUG,
                "Spawn request received. DefinitionId: {DefinitionId}, Options: {Options}",
            ),
            _event("spawned", _INFO, f"Agent spawned. {_ID}, DefinitionId: {{DefinitionId}}, Isolation: {{Isolation}}"),
            _event("state_changed", _INFO, f"Agent state changed. {_ID}, From: {{FromState}}, To: {{ToState}}"),
            _event("terminated", _INFO, f"Agent terminated. {_ID}, WasGraceful: {{WasGraceful}}, Uptime: {{Uptime}}"),
            _event(
                "spawn_rejected",
                _WARN,
                "Spawn rejected: concurrent limit exceeded. Current: {Current}, Max: {Max}",
            ),
            _event("over_limit", _WARN, "More agents than the plan admits. Current: {Current}, Max: {Max}"),
            _event("shutdown_timeout", _WARN, f"Graceful shutdown timeout. {_ID}, Forcing termination."),
            _event("initialization_failed", _ERROR, f"Agent initialization failed. {_ID}, Error: {{Error}}"),
            _event("crashed", _ERROR, f"Agent crashed. {_ID}, Error: {{Error}}, StackTrace: {{StackTrace}}"),
            _event("suspended", _INFO, f"Agent suspended. {_ID}, Depth: {{Depth}}, ResumesAt: {{ResumesAt}}"),
            _event("resumed", _INFO, f"Agent resumed. {_ID}, To: {{ToState}}"),
            _event("execution_timeout", _WARN, f"Execution timeout. {_ID}, Limit: {{Limit}}"),
            _event(
                "health_changed",
                _INFO,
                f"Agent health changed. {_ID}, From: {{FromHealth}}, To: {{ToHealth}}, Details: {{Details}}",
            ),
            _event("stalled", _WARN, f"Agent stalled. {_ID}, Evidence: {{Evidence}}"),
            _event(
                "restart_scheduled",
                _WARN,
                f"Restart scheduled. {_ID}, Attempt: {{Attempt}}, Delay: {{Delay}}, Reason: {{Reason}}",
            ),
            _event("restart_given_up", _ERROR, f"Restart given up. {_ID}, Reason: {{Reason}}"),
            _event("cleanup_failed", _WARN, f"Cleanup hook failed. {_ID}, Error: {{Error}}"),
            _event("left_behind", _ERROR, f"Agent left behind. {_ID}, What: {{What}}"),
            _event("report_lost", _WARN, f"Report not written down. {_ID}, Error: {{Error}}"),
            _event("look_failed", _WARN, f"Look at the agent failed. {_ID}, Error: {{Error}}"),
            _event("resume_failed", _ERROR, f"Resume failed. {_ID}, Error: {{Error}}"),
            _event("restart_failed", _ERROR, f"Restart failed. {_ID}, Error: {{Error}}"),
            _event("recovery_failed", _ERROR, f"Recovery failed. {_ID}, Error: {{Error}}"),
            _event("death_unwritten", _ERROR, f"End of the agent not written down. {_ID}, Error: {{Error}}"),
            _event("audit_failed", _ERROR, "Audit entry not written down. Error: {Error}"),
            _event("ownership_lost", _ERROR, "Ownership of the home lost. Error: {Error}"),
            _event("background_error", _ERROR, "Background task failed. Task: {Task}, Error: {Error}"),
            _event("recovered", _INFO, f"Agent recovered. {_ID}, Outcome: {{Outcome}}"),
        )
    }
)


class LifecycleLog:
    """Emits the events of the table. While the level is off it costs one check of the logger."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(LOGGER_NAME)

    def emit(self, name: str, /, **fields: Any) -> None:
        """Log an event. Fields that the template does not show travel with the record all the same.

        A name that is not in the table is logged as a warning under that name: a test finds such a slip, and until
        then it must not break the work that is logged.
        """
        event = LOG_EVENTS.get(name) or _event(name, _WARN, "Event without a template.")
        if self._logger.isEnabledFor(event.level):
            extra = {"event": event.name, "fields": fields}
            self._logger.log(event.level, event.render(fields), extra=extra, stacklevel=2)


class JsonLines(logging.Formatter):
    """One JSON object on one line for each record, those of other loggers included."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if isinstance(event := getattr(record, "event", None), str):
            line["event"] = event
        if isinstance(fields := getattr(record, "fields", None), Mapping):
            line["fields"] = {str(name): _scalar(value) for name, value in fields.items()}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = clipped(self.formatException(record.exc_info), MAX_VALUE)
        # ASCII alone: every line separator that a reader may know leaves as an escape.
        return json.dumps(line, ensure_ascii=True)


def one_line(value: str) -> str:
    """The text with everything escaped that would end a line, move a cursor or hide."""
    return value if value.isprintable() else "".join(map(_shown, value))


def text(value: Any) -> str:
    """A value as a message may carry it: short, printable, on one line."""
    return one_line(clipped(_plain(value), MAX_VALUE))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        if isinstance(value, tuple | list):
            return "; ".join(map(_plain, value))
        return value.to_json() if isinstance(value, Record) else str(value)
    except Exception:  # noqa: BLE001 - the __str__ of a foreign object may raise anything
        return f"an unprintable {type(value).__name__}"


def _message(record: logging.LogRecord) -> str:
    try:
        return clipped(record.getMessage(), MAX_VALUE)
    except Exception:  # noqa: BLE001 - a message that does not fit its arguments is still a line
        return clipped(_plain(record.msg), MAX_VALUE)


def _scalar(value: Any) -> Any:
    """A value of JSON stays as it is, any other becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and abs(value) < 2**63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    return clipped(_plain(value), MAX_VALUE)
