"""What a driver is: how one run of a coding agent is started, and what its output says.

A run has ended well only when three things agree: the exit status, the last structured line, and the program's own
word for an error. Each of them alone is wrong for at least one program: pi fails with exit code 0, Claude Code calls a
failure `success`, and a program that was interrupted says nothing at all.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from ostler.agents.command import Ending, KeptOutput
from ostler.agents.messages import Message, MetricReported, Progress, TokensUsed
from ostler.errors import AgentExecutionError, UsageLimitError
from ostler.model.text import clipped

#: The name under which the cost of a run is reported, in US dollars.
COST = "cost_usd"
#: When to try again where a program does not say it: after a rate limit, and after a limit of the plan.
RATE_RETRY = timedelta(minutes=5)
USAGE_RETRY = timedelta(hours=1)
#: Of the last thing that an agent said.
MAX_MESSAGE = 100_000
#: Characters of a text that is shown as what the agent does now, and of an error.
_DOING = 100
_ERROR = 500
_LAST_LINES, _LAST_CHARACTERS = 20, 2000
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_CLOCK = re.compile(
    r"(?:(?P<month>[A-Z][a-z]{2}) (?P<day>\d{1,2})(?:st|nd|rd|th)?,? (?P<year>\d{4}),? )?"
    r"(?P<time>\d{1,2}:\d{2}) ?(?P<half>[AaPp][Mm])"
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: The argument of a tool that says most, in the order in which they are looked for.
_TELLING = ("command", "cmd", "file_path", "path", "pattern", "query", "url", "description", "prompt")
#: What a line raises that has a shape which no version had so far.
_ODD = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    #: Of all that was sent to the model, what it had in its cache included.
    input: int = 0
    output: int = 0
    #: Of the input.
    cached: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            input=self.input + other.input, output=self.output + other.output, cached=self.cached + other.cached
        )

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(
            input=max(self.input - other.input, 0),
            output=max(self.output - other.output, 0),
            cached=max(self.cached - other.cached, 0),
        )

    @property
    def count(self) -> int:
        """What is counted against a limit: input that was not in the cache, and output."""
        return max(self.input - self.cached, 0) + self.output

    def to_dict(self) -> dict[str, int]:
        return {"input": self.input, "output": self.output, "cached": self.cached}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionUsage:
    """What a session has used from its beginning. Of a session that is resumed some programs tell only this."""

    tokens: Tokens = field(default_factory=Tokens)
    cost_usd: float | None = None

    @classmethod
    def from_dict(cls, data: Any) -> SessionUsage:
        """As `to_dict` wrote it; what is missing or of another kind counts as nothing."""
        data = data if isinstance(data, Mapping) else {}
        counts = data.get("tokens")
        tokens = counts if isinstance(counts, Mapping) else {}
        cost = data.get("cost_usd")
        return cls(
            tokens=Tokens(**{name: whole(tokens.get(name)) for name in ("input", "output", "cached")}),
            cost_usd=number(cost) if cost is not None else None,
        )

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens.to_dict(), "cost_usd": self.cost_usd}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What one run is to be: everything that the driver makes its command line from. The prompt comes by stdin."""

    program: str
    #: Further words, as the definition has them.
    arguments: tuple[str, ...] = ()
    model: str | None = None
    #: An earlier session that is to go on.
    session: str | None = None
    #: The environment as it is without the driver.
    env: Mapping[str, str] = field(default_factory=dict)
    #: The home of the instance; None where it sees the user's own.
    private_home: Path | None = None
    is_root: bool = False


class Driver(ABC):
    """One program."""

    name: ClassVar[str]
    #: A command line that installs it.
    install: ClassVar[str]
    #: Names of variables that the program is known to read; they are passed on from the manager's environment.
    variables: ClassVar[tuple[str, ...]] = ()
    #: Of these, those that say where its own files are; not for a private home.
    places: ClassVar[tuple[str, ...]] = ()
    reader_class: ClassVar[type[Reader]]

    @abstractmethod
    def argv(self, order: Order) -> list[str]:
        """The whole command line. The program reads its prompt from standard input."""

    @abstractmethod
    def session_argv(self, order: Order) -> list[str]:
        """The command line that opens `order.session` for a person, in a terminal."""

    def environment(self, order: Order) -> dict[str, str]:
        """Variables that the program gets besides, or instead of those in `order.env`."""
        del order
        return {}

    def home_files(self, order: Order) -> dict[str, str]:
        """What a new private home needs to hold, by path within it."""
        del order
        return {}

    def reader(self, before: SessionUsage | None = None, max_output_bytes: int = 64 * 1024) -> Reader:
        """Of one run; `before` is what a session that is resumed had used when the run began."""
        return self.reader_class(self, before, max_output_bytes)

    def render(self, line: str) -> str | None:
        """A line of output as a person reads it; None where it says nothing to a person. Never raises.

        What a model says may hold anything; nothing of it is left that a terminal would act upon.
        """
        data = json_of(line)
        if data is None:
            text = None if line.startswith("{") else line
        else:
            try:
                text = self._render(data)
            except _ODD:
                return None
        return None if text is None else _CONTROL.sub("", text)

    @abstractmethod
    def _render(self, data: Mapping[str, Any]) -> str | None:
        """The same of a structured line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The model refuses more work."""

    #: When it ends, where the program says so.
    retry_at: datetime | None = None
    #: The plan is used up; otherwise there were too many requests at once.
    is_usage: bool = False


class Reader(ABC):
    """Makes messages of the output of one run, line by line, and its answer at the end.

    The same lines give the same messages and the same answer, so that the next manager can read a log again.
    """

    #: Words of an error that tell of a limit: of the plan, or of the rate of requests.
    usage_words: ClassVar[re.Pattern[str]] = re.compile("usage limit|quota", re.IGNORECASE)
    rate_words: ClassVar[re.Pattern[str]] = re.compile(r"\b429\b|rate.?limit", re.IGNORECASE)

    def __init__(self, driver: Driver, before: SessionUsage | None, max_output_bytes: int) -> None:
        self._driver = driver
        self._before = before or SessionUsage()
        self._output = KeptOutput(max_output_bytes)
        self._doing: str | None = None
        self.session: str | None = None
        #: The last thing that it said.
        self.message: str | None = None
        self.turns = 0
        self.tokens = Tokens()
        self.cost_usd: float | None = None
        #: The program's own word for what went wrong; None while it works or when all went well.
        self.error: str | None = None
        self.limit: Limit | None = None
        #: The program says that it was told to stop.
        self.was_interrupted = False
        #: The line that the program ends with was seen.
        self.is_complete = False

    # --- while it runs -------------------------------------------------------------------------------

    def feed(self, line: str) -> list[Message]:
        """What the next line of output means. Never raises: the line is foreign."""
        text = self._driver.render(line)
        if text is not None:
            self._output.feed(f"{text}\n".encode())
        data = json_of(line)
        if data is None:
            return []
        tokens, cost = self.tokens, self.cost_usd
        try:
            self._read(data)
        except _ODD:
            return []
        return list(self._messages(tokens, cost))

    def _messages(self, tokens: Tokens, cost: float | None) -> Iterator[Message]:
        doing, self._doing = self._doing, None
        if doing:
            yield Progress(message=doing)
        more = self.tokens.count - tokens.count
        if more > 0:
            yield TokensUsed(count=more)
        if self.cost_usd is not None and self.cost_usd != cost:
            yield MetricReported(name=COST, value=self.cost_usd)

    @abstractmethod
    def _read(self, data: Mapping[str, Any]) -> None:
        """Take note of one structured line."""

    def _does(self, text: str) -> None:
        self._doing = first_words(text, _DOING) or self._doing

    def _says(self, text: str) -> None:
        if text.strip():
            self.message = clipped(text, MAX_MESSAGE)
            self._does(last_sentence(text))

    def _fails(self, error: Any) -> None:
        self.error = first_words(str(error), _ERROR) or "it gave no reason"

    def _fails_with_words(self, error: str) -> None:
        """Of a program that tells of a limit only in the words of an error."""
        self._fails(error)
        is_usage = self.usage_words.search(error) is not None
        if is_usage or self.rate_words.search(error) is not None:
            self.limit = Limit(is_usage=is_usage)

    # --- at its end ----------------------------------------------------------------------------------

    def finish(self, ending: Ending, *, now: datetime, seconds: float = 0.0, dropped: int = 0) -> dict[str, Any]:
        """The answer of the run. Raises for one that did not end well.

        `dropped` bytes of its output never reached us; `now` is when it ended.
        """
        failure = self._failure(ending)
        if failure is None:
            return self._answer(ending, "done", seconds, dropped)
        name = self._driver.name
        if self.limit is not None:
            default = USAGE_RETRY if self.limit.is_usage else RATE_RETRY
            retry_at = (self._retry_at(self.limit, now) or (now + default).replace(microsecond=0)).astimezone(UTC)
            raise UsageLimitError(
                f"{name} was refused by its model: {failure}; try again at {retry_at:%Y-%m-%d %H:%M} UTC",
                retry_at=retry_at,
                session=self.session,
                exit_code=ending.code,
                answer={**self._answer(ending, "limited", seconds, dropped), "retry_at": retry_at.isoformat()},
            )
        cut_off = self.was_interrupted or (self.error is None and not self.is_complete)
        meaning = "interrupted" if cut_off else "failed"
        raise AgentExecutionError(
            f"{name} {failure if self.error is None else f'failed: {failure}'}",
            exit_code=ending.code,
            signal=ending.signal_name,
            out_of_memory=ending.memory_limit_mb is not None,
            answer=self._answer(ending, meaning, seconds, dropped),
        )

    def _retry_at(self, limit: Limit, now: datetime) -> datetime | None:
        """As the program says it; some say it only in the words of `error`."""
        del now
        return limit.retry_at

    def _failure(self, ending: Ending) -> str | None:
        """In words, what went wrong; None for nothing."""
        if self.error is not None:
            return self.error
        how = ending.failure
        if how is not None:
            pass
        elif ending.code != 0:
            how = f"failed with exit code {ending.code}"
        elif not self.is_complete:
            how = "ended without a result, so it was interrupted"
        else:
            return None
        if self.is_complete:
            how += " after it had said that it was done"
        last = self._output.last_lines(_LAST_LINES, _LAST_CHARACTERS)
        return f"{how}; its last lines:\n{last}" if last else f"{how} and said nothing"

    def _answer(self, ending: Ending, meaning: str, seconds: float, dropped: int) -> dict[str, Any]:
        return {
            "exit_code": ending.code,
            "meaning": meaning,
            "message": self.message,
            "session": self.session,
            "tokens": self.tokens.to_dict(),
            "cost_usd": self.cost_usd,
            "turns": self.turns,
            "session_usage": self.session_usage().to_dict(),
            "output": self._output.text(),
            "dropped_bytes": self._output.dropped + dropped,
            "duration_seconds": seconds,
        }

    def session_usage(self) -> SessionUsage:
        """From its beginning; to be given when the session is resumed."""
        before = self._before.cost_usd
        cost = None if self.cost_usd is None and before is None else (self.cost_usd or 0.0) + (before or 0.0)
        return SessionUsage(tokens=self._before.tokens + self.tokens, cost_usd=cost)


# --- foreign text ------------------------------------------------------------------------------------


def json_of(line: str) -> Mapping[str, Any] | None:
    """The object of a line; a warning without a line end may stand before it."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        data = json.loads(line[start:])
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0.0


def first_words(text: str, limit: int = _DOING) -> str:
    """The first line that says something, cut to `limit`."""
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


def last_sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _SENTENCE_END.split(lines[-1])[-1] if lines else ""


def tool_words(name: str, arguments: Any, limit: int = _DOING) -> str:
    """A tool and what it is about: `Bash: pytest -q`."""
    values_by_name = arguments if isinstance(arguments, Mapping) else {}
    values = [values_by_name[key] for key in _TELLING if key in values_by_name] or list(values_by_name.values())
    about = next((value for value in values if isinstance(value, str) and value.strip()), "")
    return first_words(f"{name}: {first_words(about, limit)}" if about else name, limit)


def clock_time(text: str, now: datetime) -> datetime | None:
    """A time of day as a program writes it, "7:34 PM" or "Nov 18th, 2026 7:34 AM", in the zone of this machine.

    Without a day it is the one nearest to `now`: a text that is read late may tell of a time that is over.
    """
    match = _CLOCK.search(text)
    if match is None:
        return None
    local = now.astimezone()
    try:
        if match["day"] is not None:
            day = datetime.strptime(f"{match['month']} {match['day']} {match['year']}", "%b %d %Y")  # noqa: DTZ007 - the zone follows
            local = local.replace(year=day.year, month=day.month, day=day.day)
        time = datetime.strptime(f"{match['time']} {match['half'].upper()}", "%I:%M %p")  # noqa: DTZ007 - as above
    except ValueError:
        return None
    moment = local.replace(hour=time.hour, minute=time.minute, second=0, microsecond=0)
    if match["day"] is None and now - moment > timedelta(hours=12):
        moment += timedelta(days=1)
    return moment.astimezone(UTC)
