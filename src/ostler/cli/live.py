"""What works now: lines at the end of a terminal that are drawn again each second, below what is printed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import click

from ostler.cli.agents import cost_of, doing_of, tokens_of
from ostler.cli.output import note, plain, seconds_since
from ostler.cli.table import Column, Table, terminal_width
from ostler.client.blocking import BlockingClient, DaemonError
from ostler.durations import rough_duration

_TICK_SECONDS = 1.0
#: A daemon that takes longer leaves the lines as they are.
_ANSWER_SECONDS = 5.0
_MOST_LINES = 10
_UP, _BELOW = "\x1b[{}A\r", "\x1b[J"


class LiveLines:
    """Draws what `fetch` gives, each second. In a pipe there are none: only what is printed."""

    def __init__(self, fetch: Callable[[], list[str]]) -> None:
        self._fetch = fetch
        self._is_live = sys.stdout.isatty()
        self._lines: list[str] = []
        self._drawn = 0
        self._lock = threading.RLock()  # a handler of a signal may come while its own thread draws
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Also in the midst of a fetch: it is not waited for, and draws nothing any more."""
        with self._lock:
            self._has_ended.set()
            self._erase()

    def echo(self, text: str) -> None:
        """A line that stays."""
        self._above(lambda: click.echo(text))

    def note(self, text: str) -> None:
        self._above(lambda: note(text))

    def _above(self, write: Callable[[], None]) -> None:
        with self._lock:
            self._erase()
            write()
            self._draw()

    def _run(self) -> None:
        while not self._has_ended.is_set():
            try:
                lines = self._fetch()
            except DaemonError:  # what follows the events tells of it
                lines = self._lines
            with self._lock:
                if self._has_ended.is_set():
                    return
                self._erase()
                self._lines = lines
                self._draw()
            self._has_ended.wait(_TICK_SECONDS)

    def _erase(self) -> None:
        if self._drawn:
            _write(_UP.format(self._drawn) + _BELOW)
        self._drawn = 0

    def _draw(self) -> None:
        if self._lines and not self._has_ended.is_set():
            _write("".join(f"{line}\n" for line in self._lines))
            self._drawn = len(self._lines)


def _write(text: str) -> None:
    with suppress(RuntimeError):  # a handler of a signal came while its own thread wrote
        sys.stdout.write(text)
        sys.stdout.flush()


# --- agents at work ----------------------------------------------------------------------------------


def _tokens_text(agent: dict[str, Any]) -> str:
    count = tokens_of(agent)
    return f"{count} tokens" if count else ""


#: A line for each agent at work; without heads.
_COLUMNS = (
    Column("", lambda row: str(row["who"]), least=10),
    Column("", lambda row: str(row["task"] or ""), least=8, if_any=True),
    Column("", lambda row: rough_duration(seconds_since(row["since"])), is_number=True),
    Column("", lambda row: _tokens_text(row["agent"]), if_any=True, is_number=True),
    Column("", lambda row: cost_of(row["agent"]), if_any=True, is_number=True),
    Column("", lambda row: doing_of(row["agent"]), least=20),
)


def work_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for rows of who, task, since and agent; those that there is no room for are counted."""
    shown = rows[: _MOST_LINES - 1] if len(rows) > _MOST_LINES else rows
    lines = Table(_COLUMNS, shown, terminal_width()).lines()[1:]
    return [*lines, f"and {len(rows) - len(shown)} more"] if len(shown) < len(rows) else lines


def fetch_loop(client: BlockingClient, key: str) -> list[str]:
    """The agent of a task: what it does, for how long, with what it has used."""
    agents = client.call("instances", name_pattern=f"{key}-*", within=_ANSWER_SECONDS)
    return work_lines(
        [{"who": plain(agent["name"]), "task": "", "since": agent["created_at"], "agent": agent} for agent in agents]
    )


def fetch_crews(client: BlockingClient, names: Sequence[str]) -> list[str]:
    """The members of crews that are at work."""
    crews = client.call("crews", within=_ANSWER_SECONDS)
    members = [member for crew in crews if crew["name"] in names for member in crew["members"] if member["task"]]
    agents = client.call("instances", limit=1000, within=_ANSWER_SECONDS) if members else []
    by_task = {str(agent["name"] or "").rpartition("-")[0]: agent for agent in agents if agent["task_id"]}
    return work_lines(
        [
            {
                "who": member["member"],
                "task": member["task"],
                "since": member["since"],
                "agent": by_task.get(member["task"], {}),
            }
            for member in members
        ]
    )
