from __future__ import annotations

import ast
import json
import logging
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState
from ostler.telemetry import LOG_EVENTS, LOGGER_NAME, JsonLines, LifecycleLog, one_line
from ostler.telemetry.log import MAX_VALUE

ID = UUID(int=7)
SRC = Path(__file__).resolve().parents[2] / "src"
#: The templates that were promised from the beginning.
PROMISED = {
    "spawn_requested": (
        logging.DEBUG,
        "[LCM] Spawn request received. DefinitionId: {DefinitionId}, Options: {Options}",
    ),
    "spawned": (
        logging.INFO,
        "[LCM] Agent spawned. InstanceId: {InstanceId}, DefinitionId: {DefinitionId}, Isolation: {Isolation}",
    ),
    "state_changed": (
        logging.INFO,
        "[LCM] Agent state changed. InstanceId: {InstanceId}, From: {FromState}, To: {ToState}",
    ),
    "terminated": (
        logging.INFO,
        "[LCM] Agent terminated. InstanceId: {InstanceId}, WasGraceful: {WasGraceful}, Uptime: {Uptime}",
    ),
    "spawn_rejected": (
        logging.WARNING,
        "[LCM] Spawn rejected: concurrent limit exceeded. Current: {Current}, Max: {Max}",
    ),
    "shutdown_timeout": (
        logging.WARNING,
        "[LCM] Graceful shutdown timeout. InstanceId: {InstanceId}, Forcing termination.",
    ),
    "initialization_failed": (
        logging.ERROR,
        "[LCM] Agent initialization failed. InstanceId: {InstanceId}, Error: {Error}",
    ),
    "crashed": (
        logging.ERROR,
        "[LCM] Agent crashed. InstanceId: {InstanceId}, Error: {Error}, StackTrace: {StackTrace}",
    ),
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def last(self) -> Any:
        return self.records[-1]


def kept_by(name: str, level: int = logging.DEBUG) -> tuple[logging.Logger, Kept]:
    logger, kept = logging.Logger(name, level), Kept()  # noqa: LOG001 - each test has one of its own
    logger.addHandler(kept)
    return logger, kept


def told(level: int = logging.DEBUG) -> tuple[LifecycleLog, Kept]:
    logger, kept = kept_by("test", level)
    return LifecycleLog(logger), kept


class Untellable:
    asked = False

    def __str__(self) -> str:
        self.asked = True
        raise RuntimeError("no")


def test_the_promised_templates_are_there_with_their_levels() -> None:
    assert {name: (LOG_EVENTS[name].level, LOG_EVENTS[name].template) for name in PROMISED} == PROMISED


def test_every_event_is_under_its_own_name_and_in_the_same_style() -> None:
    for name, event in LOG_EVENTS.items():
        assert name == event.name
        assert event.template.startswith("[LCM] ")
        assert event.fields
        assert all(field == field.lower() for field in event.fields)


def test_an_event_is_told_with_name_fields_and_message() -> None:
    log, kept = told()
    log.emit("state_changed", instance_id=ID, from_state=AgentState.READY, to_state=AgentState.PROCESSING, by="test")
    assert kept.last.getMessage() == f"[LCM] Agent state changed. InstanceId: {ID}, From: ready, To: processing"
    assert kept.last.levelno == logging.INFO
    assert kept.last.event == "state_changed"
    assert kept.last.fields == {"instance_id": ID, "from_state": "ready", "to_state": "processing", "by": "test"}
    assert kept.last.funcName == "test_an_event_is_told_with_name_fields_and_message"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "true"),
        (None, "null"),
        (timedelta(seconds=90), "90 s"),
        (datetime(2026, 3, 1, tzinfo=UTC), "2026-03-01T00:00:00+00:00"),
        (("one", "two"), "one; two"),
        ("100 %s {Error} {0}", "100 %s {Error} {0}"),
        ("a\nb\r\x1b[31m\u2028\u202e\x85", "a\\nb\\r\\x1b[31m\\u2028\\u202e\\x85"),
        ("\0\udc80", "\ufffd?"),
        (ValueError("bad\nthing"), "bad\\nthing"),
        (Untellable(), "an unprintable Untellable"),
        pytest.param(10**5000, "an unprintable int", id="huge"),
    ],
)
def test_values_are_short_printable_and_on_one_line(value: object, shown: str) -> None:
    log, kept = told()
    log.emit("initialization_failed", instance_id=ID, error=value)
    assert kept.last.getMessage() == f"[LCM] Agent initialization failed. InstanceId: {ID}, Error: {shown}"


def test_a_record_is_told_as_json() -> None:
    log, kept = told()
    log.emit("spawn_requested", definition_id=ID, options=AgentSpawnOptions(name="scribe"))
    assert '"name":"scribe"' in kept.last.getMessage()


def test_a_long_value_is_cut_and_says_so() -> None:
    log, kept = told()
    log.emit("crashed", instance_id=ID, error="x", stack_trace="line\n" * 10_000)
    assert len(kept.last.getMessage()) < 2 * MAX_VALUE
    assert "more characters" in kept.last.getMessage()


def test_a_forgotten_field_does_not_break_the_work() -> None:
    log, kept = told()
    log.emit("recovered", instance_id=ID)
    assert kept.last.getMessage() == f"[LCM] Agent recovered. InstanceId: {ID}, Outcome: ?"


def test_an_event_that_is_not_in_the_table_is_told_all_the_same() -> None:
    log, kept = told()
    log.emit("exploded", instance_id=ID)
    assert kept.last.getMessage() == "[LCM] Event without a template."
    assert (kept.last.event, kept.last.fields, kept.last.levelno) == ("exploded", {"instance_id": ID}, logging.WARNING)


def emitted() -> Iterator[tuple[str, str, set[str]]]:
    """Every `emit("name", field=...)` of the package: where, the name, the fields."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "emit":
                continue
            if node.args and isinstance(name := node.args[0], ast.Constant):
                fields = {keyword.arg or "" for keyword in node.keywords}
                yield f"{path.relative_to(SRC)}:{node.lineno}", str(name.value), fields


def test_every_event_that_is_emitted_is_in_the_table_with_all_its_fields() -> None:
    slips = []
    for where, name, fields in emitted():
        if name not in LOG_EVENTS:
            slips.append(f"{where}: there is no event {name}")
        elif missing := set(LOG_EVENTS[name].fields) - fields:
            slips.append(f"{where}: {name} lacks {', '.join(sorted(missing))}")
    assert not slips, "\n" + "\n".join(slips)


def test_every_event_of_the_table_is_emitted() -> None:
    assert set(LOG_EVENTS) - {name for _, name, _ in emitted()} == set()


def test_nothing_is_rendered_while_the_level_is_off() -> None:
    log, kept = told(logging.WARNING)
    value = Untellable()
    log.emit("recovered", instance_id=value, outcome=value)
    assert not kept.records
    assert not value.asked


def test_the_default_logger_is_the_one_of_the_lifecycle(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER_NAME):
        LifecycleLog().emit("resumed", instance_id=ID, to_state="ready")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        (LOGGER_NAME, f"[LCM] Agent resumed. InstanceId: {ID}, To: ready")
    ]


def test_records_can_travel_to_another_process() -> None:
    log, kept = told()
    log.emit("recovered", instance_id=ID, outcome="alive")
    assert pickle.loads(pickle.dumps(kept.last.__dict__))["fields"]["outcome"] == "alive"  # noqa: S301 - our own


LINES = st.text(st.characters(), max_size=200)


@given(LINES, LINES)
def test_one_event_is_one_line_whatever_an_agent_says(error: str, trace: str) -> None:
    log, kept = told()
    log.emit("crashed", instance_id=ID, error=error, stack_trace=trace)
    assert len(kept.last.getMessage().splitlines()) == 1
    assert kept.last.getMessage().isprintable()
    line = JsonLines().format(kept.last)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["event"] == "crashed"
    assert line.isascii()


def attacks() -> Iterator[str]:
    fake = '{"level": "error", "event": "crashed"}'
    for separator in ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"):
        yield f"fine{separator}{fake}"
        yield f'fine"}}{separator}[LCM] Agent crashed.'


def test_as_many_lines_are_read_as_were_written() -> None:
    log, kept = told()
    said = list(attacks())
    for text in said:
        log.emit("crashed", instance_id=ID, error=text, stack_trace=text)
    text_log = "\n".join(record.getMessage() for record in kept.records)
    json_log = "\n".join(JsonLines().format(record) for record in kept.records)
    assert len(text_log.splitlines()) == len(json_log.splitlines()) == len(said)
    read = [json.loads(line) for line in json_log.splitlines()]
    assert [line["fields"]["error"] for line in read] == said


def test_json_keeps_what_it_has_words_for() -> None:
    log, kept = told()
    log.emit("over_limit", instance_id=ID, dropped=3, rate=0.5, odd=float("nan"), huge=2**70, last=None, ok=True)
    line = json.loads(JsonLines().format(kept.last))
    assert line["fields"] == {
        "instance_id": str(ID),
        "dropped": 3,
        "rate": 0.5,
        "odd": "nan",
        "huge": str(2**70),
        "last": None,
        "ok": True,
    }
    assert (line["level"], line["logger"]) == ("warning", "test")
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)


def test_json_lines_bears_the_records_of_others() -> None:
    logger, kept = kept_by("other")
    try:
        int("bad\nthing")
    except ValueError:
        logger.exception("it %s", "broke")
    line = json.loads(JsonLines().format(kept.last))
    assert line["message"] == "it broke"
    assert "ValueError" in line["exception"]
    logger.warning("%d of %d", 1)  # noqa: PLE1206 - the mistake in question
    assert json.loads(JsonLines().format(kept.last))["message"] == "%d of %d"
    logger.warning("plain", extra={"fields": "not a mapping", "event": 7})
    assert set(json.loads(JsonLines().format(kept.last))) == {"time", "level", "logger", "message"}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_escaping_is_idle_on_printable_text_and_final(text: str) -> None:
    assert one_line(one_line(text)) == one_line(text)
    if text.isprintable():
        assert one_line(text) == text
