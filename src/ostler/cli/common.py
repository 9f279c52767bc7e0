"""What commands share: the home, the client that starts its daemon when it is needed, lists, names of options."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from ostler.cli.output import first_line, note, plain, sentence, short_path
from ostler.client.blocking import RECONNECT_SECONDS, BlockingClient, DaemonError, HangError, UnreachableError
from ostler.durations import parse_seconds, write_megabytes
from ostler.errors import ExitCode, exit_code_of
from ostler.home import KEEPER, TOKEN_VARIABLE, chosen_home, project_near, project_of
from ostler.keeper.protocol import MARK, TOKEN

F = TypeVar("F", bound=Callable[..., Any])
ADDRESS_VARIABLE = "OSTLER_ADDRESS"
#: States in which an instance has no process and takes no request; as in `model.states`, which is slow to import.
ENDED = frozenset({"terminated", "failed"})
STATES = ("initializing", "ready", "processing", "waiting", "suspended", "terminating", "terminated", "failed")
HEALTH = ("unknown", "healthy", "degraded", "unhealthy")
_PAUSE_SECONDS = 0.1
#: Verbs whose values do not come from options, so their faults are not told in terms of them.
_MANY = frozenset({"add_tasks"})
_PAGE = 1000


@dataclass
class Options:
    """The options before the command."""

    home: str | None = None
    no_start: bool = False


def the_home() -> Path:
    return chosen_home(_options().home)


def present_directory() -> str | None:
    """As the shell has it; None for one that was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib would be one more import
    except OSError:
        return None


def the_project() -> Path:
    """The directory of the project that this command is about; that of the home where it stands in no other."""
    home, here = the_home(), present_directory()
    return (None if here is None else project_near(Path(here), home)) or project_of(home)


def _options() -> Options:
    return click.get_current_context().find_object(Options) or Options()


class Daemon:
    """The client of this command. It starts the daemon at the first call where none answers.

    Only with `makes_home` does it make a home that is not there: a command that looks leaves no trace.
    """

    def __init__(self, *, makes_home: bool = False, starts: bool = True) -> None:
        self.home = the_home()
        self._makes_home = makes_home
        self._address = os.environ.get(ADDRESS_VARIABLE)
        token = os.environ.get(TOKEN_VARIABLE)
        self._client = BlockingClient(self.home, address=self._address, token=token, directory=present_directory())
        self._may_start = self._starts = starts and not _options().no_start and self._address is None

    def call(self, verb: str, /, **parameters: Any) -> Any:
        try:
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
        except DaemonError as error:
            raise (error if verb in _MANY else _by_options(error)) from error

    def stream(self, verb: str, /, **parameters: Any) -> Any:
        """Follow a stream; the daemon is started where none answers, also when it vanished meanwhile."""
        if not self._client.has_just_answered:
            self.call("health")
        return self._client.stream(verb, on_hang=note, **parameters)

    def call_in_thread(self, verb: str, /, **parameters: Any) -> None:
        """For a handler of a signal: the main thread still follows a stream, which shows what comes of it."""

        def call() -> None:
            try:
                self._client.call(verb, **parameters)
            except DaemonError as error:
                note(str(error))

        threading.Thread(target=call, daemon=True).start()

    def raw(self) -> BlockingClient:
        """Without starting anything."""
        return self._client

    def start_again(self) -> None:
        """The daemon that a stream follows was lost. Where none can be started, the stream gives up by itself."""
        if self._starts and not self._is_inside() and self.home.is_dir():
            from ostler.client.launch import DaemonStartError, start_daemon  # noqa: PLC0415 - seldom needed

            with contextlib.suppress(DaemonStartError, DaemonError, OSError):
                start_daemon(self.home)

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
                self._client.call("health")
            except UnreachableError:
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _start(self) -> None:
        self._may_start = False
        if not self._makes_home and not self.home.is_dir():
            raise fail(
                f"there is no home at {short_path(self.home)}, so nothing has run yet; "
                "`ostler init` prepares a project, `ostler run -- CMD` runs something",
                ExitCode.NOT_FOUND,
            )
        from ostler.client.launch import DaemonStartError, start_daemon  # noqa: PLC0415 - most commands find it running

        try:
            status = start_daemon(self.home)
        except DaemonStartError as error:
            raise fail(f"the daemon could not be started: {error}", ExitCode.UNREACHABLE) from error
        alive = status["statistics"]["active_instances"]
        adopted = f" (found {alive} agent{'s' if alive != 1 else ''} alive)" if alive else ""
        note(f"the daemon was not running; started it{adopted}")
        if status.get("home_notice"):
            note(status["home_notice"])
        if status.get("settings_fault"):
            note(status["settings_fault"])


def fail(sentence: str, code: ExitCode = ExitCode.FAILED) -> click.exceptions.Exit:
    note(sentence)
    return click.exceptions.Exit(code)


class Group(click.Group):
    """A group whose help shows what each of its commands takes."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            words = [word for parameter in command.params for word in parameter.get_usage_pieces(ctx)]
            options = [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]
            text = command.get_short_help_str(limit=200)
            rows.append((" ".join((name, *words)), f"{text} {', '.join(options)}".rstrip()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"{ctx.command_path} COMMAND --help says what the options of a command mean.")


# --- lists -------------------------------------------------------------------------------------------


def output_option(*, name: bool = True) -> Callable[[F], F]:
    forms = ["table", "wide", "json", "jsonl", *(["name"] if name else [])]
    text = "How to print it; wide is a table with every column, whole."
    return click.option("-o", "--output", "form", type=click.Choice(forms), default="table", help=text)


def count_option(function: F) -> F:
    return click.option("-n", "count", type=click.IntRange(1), help="At most so many; else all.")(function)


def list_instances(daemon: Daemon, count: int | None = None, **filters: Any) -> list[dict[str, Any]]:
    """Newest first: all of them, or the first `count`, and then a line that says that there are more."""

    def pages() -> Iterator[dict[str, Any]]:
        before, size = None, _PAGE if count is None else min(count + 1, _PAGE)
        while page := daemon.call("instances", before=before, limit=size, **filters):
            yield from page
            before = page[-1]["instance_id"]

    return _first(pages(), count)


def list_tasks(daemon: Daemon, count: int | None = None, **filters: Any) -> list[dict[str, Any]]:
    """The same for tasks. One that is added meanwhile moves the others on: it is left out, and none comes twice."""

    def pages() -> Iterator[dict[str, Any]]:
        keys, size = set[str](), _PAGE if count is None else min(count + 1, _PAGE)
        while page := daemon.call("tasks", offset=len(keys), limit=size, **filters):
            fresh = [task for task in page if task["key"] not in keys]
            keys.update(task["key"] for task in fresh)
            yield from fresh
            if len(page) < size:
                return

    return _first(pages(), count)


def name_projects(records: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """With what the column PROJECT of a table shows: the names of the projects, where there are several."""
    projects = {record.get("project") for record in records}
    if form not in {"table", "wide"} or len(projects) < 2:
        return records
    own = project_of(the_home())
    names = {project: own.name if own != the_home() else "-" for project in projects if project is None}
    names |= {project: Path(project).name for project in projects if project is not None}
    if len(set(names.values())) < len(names):  # two directories of one name
        names |= {project: short_path(project) for project in projects if project is not None}
    return [{**record, "project_name": names[record.get("project")]} for record in records]


def _first(items: Iterator[dict[str, Any]], count: int | None) -> list[dict[str, Any]]:
    if count is None:
        return list(items)
    shown = list(islice(items, count))
    if next(items, None) is not None:
        note(f"these are the newest {count}; without -n all are shown")
    return shown


# --- one agent or one task by its name ---------------------------------------------------------------


def on_agent(daemon: Daemon, verb: str, agent: str, **parameters: Any) -> Any:
    """A verb on one agent by its name or id. An unknown name is refused with the nearest one that exists."""
    try:
        return daemon.call(verb, instance=agent, **parameters)
    except DaemonError as error:
        if error.code != "not_found":
            raise
        names = [str(instance["name"]) for instance in list_instances(daemon, include_terminated=True)]
        hint = _nearest(agent, names)
        raise DaemonError("not_found", f'there is no agent "{agent}".{hint} `ostler ps -a` lists all.') from error


def handed_in(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """What became of changes by hand, in a line; None where there were none."""
    name = plain(after["key"])
    if before["attempt"] == after["attempt"]:
        return None
    if after["state"] == "completed":
        return f"{name}: your changes are checked and wait for your review with the rest: ostler diff {name}"
    return f"{name}: {sentence(first_line(after['error']))}; it is {after['state']} again: ostler why {name}"


def on_task(daemon: Daemon, verb: str, key: str, **parameters: Any) -> Any:
    """A verb on one task by its key."""
    try:
        return daemon.call(verb, task=key, **parameters)
    except DaemonError as error:
        keys = (
            []
            if error.code != "not_found"
            else [str(task["key"]) for task in list_tasks(daemon, include_finished=True)]
        )
        hint = _nearest(key.upper(), keys)
        if key.upper() in keys or not hint:
            raise
        raise DaemonError("not_found", f"{error}.{hint}") from error


def _nearest(name: str, names: list[str]) -> str:
    import difflib  # noqa: PLC0415 - only a mistake needs it

    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def for_each(names: Sequence[str], act: Callable[[str], None]) -> None:
    """Act on each in its turn; what fails for one does not keep the others from it, and is the exit code."""
    failed: DaemonError | None = None
    for name in names:
        try:
            act(name)
        except (UnreachableError, HangError):
            raise
        except DaemonError as error:
            for sentence in error.faults or (str(error),):
                note(sentence if len(names) == 1 or name in sentence else f"{name}: {sentence}")
            failed = failed or error
    if failed is not None:
        raise click.exceptions.Exit(exit_code_of(failed.code))


# --- options -----------------------------------------------------------------------------------------


def seconds_of(option: str, text: str | None) -> float | None:
    """The duration that an option was given; None where it was not given."""
    seconds = None if text is None else parse_seconds(text)
    if text is not None and seconds is None:
        raise click.UsageError(f"{option} must be a duration such as 30s, was {text}")
    return seconds


def since_moment(text: str) -> str:
    """The moment that --since was given, as a duration or as a time."""
    seconds = parse_seconds(re.sub(r"\s*ago$", "", text))
    if seconds is not None:
        return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"--since must be a duration such as 10m, or a time, was {text}") from None
    return (when if when.tzinfo is not None else when.astimezone()).isoformat()


#: Fields of the API by the parameters of the command line, where the two differ.
_PARAMETERS = {
    "graceful_timeout": "grace",
    "max_memory_mb": "memory",
    "max_cpu_percent": "cpus",
    "execution_timeout": "timeout",
    "restart_policy": "restart",
    "isolation_level": "isolation",
    "expires_in": "expires",
    "near": "text",
}
#: Bounds of the API in the unit of the option.
_UNITS: dict[str, Callable[[int], str]] = {
    "memory": write_megabytes,
    "cpus": lambda percent: f"{percent / 100:g}",
}


def _by_options(error: DaemonError) -> DaemonError:
    """The refusal of a value in the words of the command line: its option, its unit, the value as it was typed."""
    if error.faults:
        error.faults = tuple(_by_option(sentence) for sentence in error.faults)
    return error


def _by_option(text: str) -> str:
    field, _, bound = text.partition(" ")
    context = click.get_current_context()
    parameters = {parameter.name: parameter for parameter in context.command.params}
    parts = [_PARAMETERS.get(part, part) for part in field.split(".")]
    place = next((place for place in reversed(range(len(parts))) if parts[place] in parameters), None)
    if place is None:
        return text
    name, inner = parts[place], [part for part in parts[place + 1 :] if not part.isdecimal()]
    parameter = parameters[name]
    label = max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name
    if name in _UNITS and not inner:
        limit, comma, rest = bound.partition(",")
        bound = re.sub(r"\b\d+\b", lambda number: _UNITS[name](int(number[0])), limit) + comma + rest
        bound = bound.replace("must be a whole number", "must be a size such as 512M")
        bound = re.sub(r", was [^,]*$", f", was {_as_typed(context.params[name])}", bound)
    return f"{label} ({'.'.join(inner)}) {bound}" if inner else f"{label} {bound}"


def _as_typed(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
