"""Lists that stay on the screen: drawn again when the daemon tells of a change; `ostler top`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ostler.cli.common import ADDRESS_VARIABLE, Daemon
from ostler.cli.look import newest_event
from ostler.cli.output import as_json, has_colour, note, silence_text
from ostler.cli.table import Column, Table, terminal_width
from ostler.client.blocking import DaemonError
from ostler.home import TOKEN_VARIABLE

#: Changes that come together are one drawing.
_TOGETHER_SECONDS = 0.1
_TICK_SECONDS = 1.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TOP, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_USUAL_HEIGHT = 24

watch_option = click.option("-w", "--watch", "is_live", is_flag=True, help="Stay, and show changes as they happen.")


class Changes:
    """Listens to the events of the daemon in a thread."""

    def __init__(self, daemon: Daemon, types: Sequence[str]) -> None:
        self._after = str(newest_event(daemon))  # what happens from now on is not missed
        self._client, self._types = daemon.raw(), ",".join(types) or None
        self._has_changed = threading.Event()
        self._error: DaemonError | None = None
        #: Since when no daemon answers, by the monotonic clock.
        self._lost_at: float | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            for _ in self._client.stream(
                "events",
                after=self._after,
                on_hang=lambda _: self._mark(False),
                on_link=self._mark,
                types=self._types,
                metrics=True,
            ):
                self._lost_at = None
                self._has_changed.set()
        except DaemonError as error:
            self._error = error
            self._has_changed.set()

    def _mark(self, answers: bool) -> None:
        if not answers:
            self._lost_at = self._lost_at or time.monotonic()
        elif self._lost_at is not None:
            self._lost_at = None
            self._has_changed.set()

    @property
    def trouble(self) -> str | None:
        """That no daemon answers, and since when; None where one does."""
        lost_at = self._lost_at
        return None if lost_at is None else silence_text(time.monotonic() - lost_at)

    def wait(self, seconds: float) -> bool:
        """Whether something has changed since the last time, within so many seconds."""
        if not self._has_changed.wait(seconds):
            return False
        time.sleep(_TOGETHER_SECONDS)
        self._has_changed.clear()
        if self._error is not None:
            raise self._error
        return True


def watch(
    daemon: Daemon,
    fetch: Callable[[], list[dict[str, Any]]],
    form: str,
    columns: Sequence[Column],
    types: Sequence[str] = (),
) -> None:
    """Until Ctrl+C. In a pipe the whole list is printed again at each change."""
    if form not in {"table", "wide", "jsonl"}:
        raise click.UsageError(f"-w goes on without an end, which -o {form} cannot show; use -o jsonl")
    changes = Changes(daemon, types)
    if form == "jsonl" or not sys.stdout.isatty():
        while True:
            _print(fetch(), form, columns)
            has_told = False
            while not changes.wait(_TICK_SECONDS):
                if not has_told and (trouble := changes.trouble) is not None:
                    note(trouble)
                    has_told = True
    items = fetch()
    try:
        with _screen():
            while True:
                lines = Table(columns, items, terminal_width(), wide=form == "wide").lines(colour=has_colour())
                trouble = changes.trouble
                _draw(lines if trouble is None else [trouble, *lines])
                if changes.wait(_TICK_SECONDS):
                    items = fetch()
    finally:
        _print(items, form, columns)


@click.command()
def top() -> None:
    """Show agents and tasks over the whole terminal, live, with keys for logs, why, pause, stop, diff and accept."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal; in a pipe use `ostler ps -w` or `ostler task list -w`")
    daemon = Daemon()
    daemon.call("health")  # starts it where none runs
    import asyncio  # noqa: PLC0415 - no other command needs these

    from ostler.cli.top import run_top  # noqa: PLC0415 - Textual takes long to import
    from ostler.client.client import Client  # noqa: PLC0415 - likewise

    address, token = os.environ.get(ADDRESS_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    asyncio.run(run_top(Client(daemon.home, address=address, token=token)))


def _print(items: list[dict[str, Any]], form: str, columns: Sequence[Column]) -> None:
    if form == "jsonl":
        for item in items:
            as_json(item, indent=None)
        return
    for line in Table(columns, items, terminal_width(), wide=form == "wide").lines(colour=has_colour()):
        click.echo(line)
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[None]:
    """The other screen of the terminal; what was on it before comes back."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _draw(lines: list[str]) -> None:
    """From the top, over what is there: so nothing flickers."""
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines or _USUAL_HEIGHT
    except OSError:
        height = _USUAL_HEIGHT
    if len(lines) > height:
        lines = [*lines[: height - 1], f"and {len(lines) - height + 1} more"]
    sys.stdout.write(_TOP + "\r\n".join(f"{line}{_END_OF_LINE}" for line in lines) + _BELOW)
    sys.stdout.flush()
