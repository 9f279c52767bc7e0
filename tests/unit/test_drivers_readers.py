"""What each driver makes of lines that its program really wrote (tests/unit/recorded), ended well or badly."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ostler.agents.command import Ending
from ostler.agents.messages import Message, MetricReported, Progress, TokensUsed
from ostler.drivers import NAMES, driver_named
from ostler.drivers.base import Reader, SessionUsage, Tokens, clock_time
from ostler.errors import AgentExecutionError, UsageLimitError

NOW = datetime(2026, 11, 17, 19, 0, tzinfo=UTC)
DONE = Ending(code=0)


def lines_of(name: str) -> list[str]:
    return (Path(__file__).with_name("recorded") / f"{name}.jsonl").read_text().splitlines()


def fed(name: str, before: SessionUsage | None = None) -> tuple[Reader, list[Message]]:
    reader = driver_named(name.partition("-")[0]).reader(before)
    return reader, [message for line in lines_of(name) for message in reader.feed(line)]


def failed(name: str, ending: Ending) -> AgentExecutionError:
    with pytest.raises(AgentExecutionError) as caught:
        fed(name)[0].finish(ending, now=NOW)
    return caught.value


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_ended_well_is_answered(name: str) -> None:
    reader, messages = fed(f"{name}-done")
    answer = reader.finish(DONE, now=NOW, seconds=1.5, dropped=7)
    assert answer["message"] == "I made it.\nAll is well."
    assert (answer["exit_code"], answer["meaning"]) == (0, "done")
    assert answer["tokens"] == {"input": 1100, "output": 110, "cached": 200}
    assert (answer["duration_seconds"], answer["dropped_bytes"]) == (1.5, 7)
    assert answer["session"] is not None
    assert answer["turns"] == {"claude": 2, "codex": 1, "pi": 2}[name]
    assert answer["cost_usd"] == {"claude": 0.00292, "codex": None, "pi": pytest.approx(0.00112)}[name]
    doing = [message.message for message in messages if isinstance(message, Progress)]
    shell = {"claude": "Bash", "codex": "shell", "pi": "bash"}[name]
    assert doing[0] == f"{shell}: echo hi > made.txt; false"
    assert doing[-1] == "All is well."
    assert sum(message.count for message in messages if isinstance(message, TokensUsed)) == 1010
    costs = [message.value for message in messages if isinstance(message, MetricReported)]
    assert costs[-1:] == ([] if name == "codex" else [answer["cost_usd"]])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_lines_say_the_same_again(name: str) -> None:
    one, other = fed(f"{name}-done"), fed(f"{name}-done")
    assert one[1] == other[1]
    assert one[0].finish(DONE, now=NOW) == other[0].finish(DONE, now=NOW)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_shown_as_a_person_reads_it(name: str) -> None:
    driver = driver_named(name)
    shown = [text for line in lines_of(f"{name}-done") if (text := driver.render(line)) is not None]
    shell = {"claude": "Bash", "codex": "shell", "pi": "bash"}[name]
    start = shown.index(f"• {shell}: echo hi > made.txt; false")
    assert shown[start + 1].startswith("  ! ")
    assert shown[-1] == "I made it.\nAll is well."
    assert not any(text.startswith("{") for text in shown)
    assert driver.render("warning: \x1b[31mred") == "warning: [31mred"
    assert driver.render('{"type":"cut') is None


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_session_is_counted_by_difference(name: str) -> None:
    first, _ = fed(f"{name}-done")
    reader, messages = fed(f"{name}-resumed", first.session_usage())
    answer = reader.finish(DONE, now=NOW)
    assert answer["session"] == first.session
    assert answer["tokens"] == {"input": 1500, "output": 50, "cached": 300}
    assert answer["session_usage"]["tokens"] == {"input": 2600, "output": 160, "cached": 500}
    assert sum(message.count for message in messages if isinstance(message, TokensUsed)) == 1250
    assert answer["cost_usd"] == {"claude": 0.00293, "codex": None, "pi": pytest.approx(0.0013)}[name]


def test_an_older_claude_tells_its_cost_only_from_the_beginning() -> None:
    reader = driver_named("claude").reader(SessionUsage(cost_usd=0.00292))
    for line in lines_of("claude-resumed"):
        data = json.loads(line)
        data.pop("model_usage_since_last_result", None)
        reader.feed(json.dumps(data))
    assert reader.cost_usd == pytest.approx(0.00293)
    assert reader.tokens == Tokens(input=1500, output=50, cached=300)


@pytest.mark.parametrize(("name", "code"), [("claude", 1), ("codex", 1), ("pi", 0)])
def test_a_rate_limit_has_a_guess_when_it_ends(name: str, code: int) -> None:
    error = failed(f"{name}-limit", Ending(code=code))
    assert isinstance(error, UsageLimitError)
    assert error.retry_at == NOW + timedelta(minutes=5)
    assert error.session is not None
    assert str(error).startswith(f"{name} was refused by its model: ")
    assert str(error).endswith("; try again at 2026-11-17 19:05 UTC")
    assert error.answer is not None
    assert (error.answer["meaning"], error.answer["exit_code"]) == ("limited", code)


@pytest.mark.parametrize(
    ("name", "retry_at"),
    [
        ("claude", datetime.fromtimestamp(1794960000, UTC)),
        ("codex", datetime.fromtimestamp(1794960000, UTC)),
        ("pi", NOW + timedelta(hours=1)),
    ],
)
def test_a_usage_limit_has_the_time_that_the_program_tells(name: str, retry_at: datetime) -> None:
    error = failed(f"{name}-usage", Ending(code=1))
    assert isinstance(error, UsageLimitError)
    assert error.retry_at == retry_at


@pytest.mark.parametrize(
    ("name", "ending", "says"),
    [
        ("claude-interrupted", Ending(code=143), "claude failed with exit code 143; its last lines:\n• Bash: echo hi"),
        ("codex-interrupted", Ending(signal_name="SIGTERM"), "codex was killed by SIGTERM; its last lines:\n"),
        ("pi-interrupted", Ending(code=143), "pi failed with exit code 143; its last lines:\n• bash: echo hi"),
        ("pi-interrupted", DONE, "pi ended without a result, so it was interrupted; its last lines:\n"),
        ("claude-aborted", DONE, "claude failed: it was interrupted (aborted_tools)"),
    ],
)
def test_one_without_a_result_was_interrupted(name: str, ending: Ending, says: str) -> None:
    error = failed(name, ending)
    assert str(error).startswith(says)
    assert error.answer is not None
    assert error.answer["meaning"] == "interrupted"
    assert error.answer["session"] is not None


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (Ending(code=3), "claude failed with exit code 3 after it had said that it was done"),
        (Ending(signal_name="SIGKILL"), "claude was killed by SIGKILL after it had said that it was done"),
        (Ending(), "claude ended, and its exit code is not known after it had said that it was done"),
    ],
)
def test_exit_status_and_last_line_must_agree(ending: Ending, says: str) -> None:
    error = failed("claude-done", ending)
    assert str(error).startswith(says)
    assert error.answer is not None
    assert error.answer["meaning"] == "failed"


def test_one_that_says_nothing_says_what_it_wrote_instead() -> None:
    reader = driver_named("codex").reader()
    reader.feed("error: unexpected argument '--colour' found")
    with pytest.raises(
        AgentExecutionError, match=r"^codex failed with exit code 2; its last lines:\nerror: unexpected"
    ):
        reader.finish(Ending(code=2), now=NOW)
    with pytest.raises(AgentExecutionError, match=r"^codex failed with exit code 2 and said nothing$"):
        driver_named("codex").reader().finish(Ending(code=2), now=NOW)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "plain",
        "{",
        "[]",
        "null",
        '{"type":7}',
        '{"type":"assistant","message":7}',
        '{"type":"result","usage":[],"model_usage_since_last_result":{"x":3}}',
        '{"type":"item.completed","item":[]}',
        '{"type":"turn.failed","error":"x"}',
        '{"type":"turn.completed","usage":{"input_tokens":-3,"output_tokens":"x"}}',
        '{"type":"message_end","message":{"role":"assistant","content":{},"usage":{"cost":3}}}',
        '{"type":"tool_execution_start"}',
        "[" * 100_000,
        '{"a":' * 20_000,
    ],
)
def test_a_line_of_any_shape_is_borne(name: str, line: str) -> None:
    driver = driver_named(name)
    reader = driver.reader()
    reader.feed(line)
    driver.render(line)
    with pytest.raises(AgentExecutionError):
        reader.finish(Ending(code=1), now=NOW)


def test_a_message_of_several_blocks_is_counted_once() -> None:
    reader = driver_named("claude").reader()
    usage = {"input_tokens": 100, "output_tokens": 1}
    for text in ("a", "b"):
        message = {"id": "m1", "content": [{"type": "text", "text": text}], "usage": usage}
        reader.feed(json.dumps({"type": "assistant", "message": message}))
    assert reader.tokens.count == 101
    assert reader.message == "b"


def test_what_is_kept_of_a_long_run_is_bounded() -> None:
    reader = driver_named("claude").reader(None, 10_000)
    for number in range(2000):
        block = {"type": "text", "text": f"{number} {'x' * 50}"}
        reader.feed(json.dumps({"type": "assistant", "message": {"id": str(number), "content": [block]}}))
    reader.feed(json.dumps({"type": "result", "subtype": "success", "result": "y" * 200_000, "num_turns": 1}))
    answer = reader.finish(DONE, now=NOW)
    assert len(answer["output"]) < 11_000
    assert len(answer["message"]) < 110_000
    assert answer["dropped_bytes"] > 90_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("try again at 7:34 PM.", datetime(2026, 11, 17, 19, 34, tzinfo=UTC)),
        ("try again at 6:58 PM.", datetime(2026, 11, 17, 18, 58, tzinfo=UTC)),  # read late: it is over
        ("try again at 3:19 AM.", datetime(2026, 11, 18, 3, 19, tzinfo=UTC)),
        ("try again at Nov 21st, 2026 12:05 AM.", datetime(2026, 11, 21, 0, 5, tzinfo=UTC)),
        ("try again at Xyz 41st, 2026 12:05 AM.", None),
        ("try again at 27:80 PM", None),
        ("try again later", None),
    ],
)
def test_a_time_of_day_is_understood(text: str, expected: datetime | None) -> None:
    assert clock_time(text, NOW) == expected


def test_what_a_session_has_used_is_read_back() -> None:
    usage = SessionUsage(tokens=Tokens(input=3, output=2, cached=1), cost_usd=0.5)
    assert SessionUsage.from_dict(json.loads(json.dumps(usage.to_dict()))) == usage
    odd: list[Any] = [None, 7, {"tokens": 3, "cost_usd": "x"}, {"tokens": {"input": -1}}]
    assert [SessionUsage.from_dict(one).tokens for one in odd] == [Tokens()] * 4
