"""What commands share: the home, the client that starts its daemon when it is needed, the form of the output."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from ostler.cli.output import note
from ostler.client.blocking import RECONNECT_SECONDS, BlockingClient, DaemonError, UnreachableError
from ostler.client.launch import DaemonStartError, start_daemon
from ostler.errors import ExitCode
from ostler.home import KEEPER, chosen_home
from ostler.keeper.protocol import MARK, TOKEN

F = TypeVar("F", bound=Callable[..., Any])
TOKEN_VARIABLE = "OSTLER_TOKEN"  # noqa: S105 - the name of a variable, not a token
ADDRESS_VARIABLE = "OSTLER_ADDRESS"
_PAUSE_SECONDS = 0.1


@dataclass
class Options:
    """The options before the command."""

    home: str | None = None
    no_start: bool = False


def the_home() -> Path:
    return chosen_home(_options().home)


def _options() -> Options:
    found = click.get_current_context().find_object(Options)
    return found or Options()


class Daemon:
    """The client of this command. It starts the daemon at the first call where none answers."""

    def __init__(self) -> None:
        self.home = the_home()
        self._address = os.environ.get(ADDRESS_VARIABLE)
        self._client = BlockingClient(self.home, address=self._address, token=os.environ.get(TOKEN_VARIABLE))
        self._may_start = not _options().no_start and self._address is None

    def call(self, verb: str, /, **parameters: Any) -> Any:
        try:
            return self._client.call(verb, **parameters)
        except UnreachableError:
            if not self._may_start:
                raise
        if self._is_inside():
            self._await()
        else:
            self._start()
        return self._client.call(verb, **parameters)

    def stream(self, verb: str, /, **parameters: Any) -> Any:
        """Follow a stream; the daemon is started where none answers, also when it vanished meanwhile."""
        self.call("status")
        return self._client.stream(verb, **parameters)

    def raw(self) -> BlockingClient:
        """Without starting anything."""
        return self._client

    def _is_inside(self) -> bool:
        """Whether this is a process of an agent of the home: a daemon that it started would end with the agent."""
        token = os.environ.get(MARK, "").partition(":")[0]
        try:
            return bool(token) and (self.home / KEEPER / TOKEN).read_text().strip() == token
        except OSError:
            return False

    def _await(self) -> None:
        """The daemon comes back, or is not needed any more; in both cases the agent lives on without it."""
        note("the daemon does not answer; waiting for it")
        until = time.monotonic() + RECONNECT_SECONDS
        while time.monotonic() < until:
            try:
                self._client.call("status")
            except UnreachableError:
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _start(self) -> None:
        self._may_start = False
        try:
            status = start_daemon(self.home)
        except DaemonStartError as error:
            note(f"the daemon could not be started: {error}")
            sys.exit(ExitCode.UNREACHABLE)
        alive = status["statistics"]["active_instances"]
        found = f" (found {alive} agent{'s' if alive != 1 else ''} alive)" if alive else ""
        note(f"the daemon was not running; started it{found}")


def output_option(*, name: bool = True) -> Callable[[F], F]:
    forms = ["table", "json", "jsonl", *(["name"] if name else [])]
    return click.option("-o", "--output", "form", type=click.Choice(forms), default="table", help="How to print it.")


def fail(sentence: str, code: ExitCode = ExitCode.FAILED) -> click.exceptions.Exit:
    note(sentence)
    return click.exceptions.Exit(code)


def did_you_mean(error: DaemonError, agent: str, daemon: Daemon) -> DaemonError:
    """The refusal of an unknown name, with the nearest one that exists."""
    import difflib  # noqa: PLC0415 - only a mistake needs it

    if error.code != "not_found":
        return error
    names = [str(one["name"]) for one in daemon.call("instances", include_terminated=True, limit=1000)]
    close = difflib.get_close_matches(agent, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return DaemonError("not_found", f'there is no agent "{agent}".{hint} `ostler ps -a` lists all.')


def on_agent(daemon: Daemon, verb: str, agent: str, **parameters: Any) -> Any:
    """A verb on one agent by its name or id."""
    try:
        return daemon.call(verb, instance=agent, **parameters)
    except DaemonError as error:
        raise did_you_mean(error, agent, daemon) from error
