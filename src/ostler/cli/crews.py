"""Commands on crews: up, ps, scale, stop, reload."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import click

from ostler.cli.common import Daemon, output_option
from ostler.cli.output import as_json, moment, note, plain, seconds_since, table
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration
from ostler.errors import ExitCode

_HEAD = ("MEMBER", "GENERATION", "STATE", "TASK", "SINCE", "COST", "LAST ERROR")
_EVENTS = "task_state_changed,crew_changed"
#: How the reason of a crew begins that a person has to look at; as in `model.crew`, which is slow to import.
_MANUAL = "manual intervention required"
#: Ends of attempts that are nobody's fault; as in `tasks.attempt`.
_STOPPED = frozenset({"the daemon is stopping", "its crew is stopping", "its crew begins the member afresh"})


@click.group()
def crew() -> None:
    """Crews: agents of one type that are kept at work on the queue."""


@crew.command()
@click.argument("names", nargs=-1)
@click.option("-d", "--detach", is_flag=True, help="Leave them at work, and come back at once.")
def up(names: tuple[str, ...], detach: bool) -> None:
    """Bring up the crews NAMES of ostler.toml, or all of them, and show what they do.

    Ctrl+C stops them in order, a second one at once; exit code 130. Where a policy stops them it is 1.
    """
    daemon = Daemon()
    queue = _queue(daemon)
    found = daemon.call("crew_up", names=list(names))
    crews = found["crews"]
    click.echo(", ".join(_title(one) for one in crews))
    click.echo(f"{queue}   {'Stop them: ostler crew stop' if detach else 'Ctrl+C stops in order.'}")
    _tell_troubles(crews)
    if not detach:
        raise click.exceptions.Exit(_Follower(daemon, [one["name"] for one in crews]).run(found["cursor"]))


def _title(one: dict[str, Any]) -> str:
    return f"crew {plain(one['name'])} ({plain(one['agent'])} × {one['count']}, on-error {one['on_error']})"  # noqa: RUF001 - times


def _queue(daemon: Daemon) -> str:
    queued = daemon.call("tasks", state="queued", limit=1000)
    waiting = sum(bool(one["next"]) for one in queued)
    many = f"{len(queued)} task{'' if len(queued) == 1 else 's'} queued"
    return f"{many}, {waiting} of them wait." if waiting else f"{many}."


def _tell_troubles(crews: Sequence[dict[str, Any]]) -> None:
    for said in dict.fromkeys(one["trouble"] for one in crews if one["trouble"]):
        note(f"{said} (the last good settings stay in force)")


@crew.command()
@output_option(name=False)
def ps(form: str) -> None:
    """List crews and their members."""
    found = Daemon().call("crews")
    if form == "json":
        as_json(found)
    elif form == "jsonl":
        for one in found:
            as_json(one, indent=None)
    elif not found:
        note('no crew is declared; write one into ostler.toml, such as [crew.coder] with agent = "claude"')
    else:
        for one in found:
            _tell_state(one)
        if any(one["members"] for one in found):
            table(_HEAD, [_row(member) for one in found for member in one["members"]])
        _tell_troubles(found)


def _tell_state(one: dict[str, Any]) -> None:
    state = "up" if one["is_up"] else "stopping" if one["members"] else "not up"
    why = f": {plain(one['reason'])}" if one["reason"] else ""
    more = f"   Bring it up: ostler crew up {plain(one['name'])}" if state == "not up" else ""
    click.echo(f"{_title(one)} is {state}{why}{more}")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    since = rough_duration(seconds_since(one["since"]))
    error = (one["error"] or "").strip().splitlines()
    return (
        one["member"],
        str(one["generation"]),
        one["state"],
        one["task"] or "-",
        since,
        _cost(one["cost_usd"]),
        _short(error[0].removesuffix("; its last lines:")) if error else "",
    )


def _cost(dollars: float | None) -> str:
    return "-" if dollars is None else f"${dollars:.2f}"


def _short(text: str) -> str:
    return plain(text if len(text) <= 70 else text[:69] + "…")


@crew.command()
@click.argument("name")
@click.argument("count", type=click.IntRange(0, 1000))
def scale(name: str, count: int) -> None:
    """Give a crew so many members, until it is brought up anew."""
    found = Daemon().call("crew_scale", crew=name, count=count)
    busy = sum(one["task"] is not None for one in found["members"]) - count
    rest = f" {busy} more finish their task first." if busy > 0 else ""
    click.echo(f"crew {plain(name)} has {count} member{'' if count == 1 else 's'}.{rest}")


@crew.command()
@click.argument("names", nargs=-1)
@click.option("--force", is_flag=True, help="End their agents at once.")
def stop(names: tuple[str, ...], force: bool) -> None:
    """Stop the crews NAMES, or all of them, in order; their tasks go back to the queue."""
    found = Daemon().call("crew_stop", names=list(names), force=force)
    for one in found:
        click.echo(f"crew {plain(one['name'])} is stopped.   Bring it up again: ostler crew up {plain(one['name'])}")
    if not found:
        note("no crew is up; `ostler crew ps` lists them")


@crew.command()
def reload() -> None:
    """Read ostler.toml again. Live members keep their settings; every new one reads them fresh."""
    found = Daemon().call("crew_reload")
    _tell_troubles(found)
    if any(one["trouble"] for one in found):
        raise click.exceptions.Exit(ExitCode.USAGE)
    click.echo("\n".join(_title(one) for one in found) or "no crew is declared")


# --- following ---------------------------------------------------------------------------------------


class _Follower:
    """Shows what crews do until they have stopped; passes Ctrl+C on."""

    def __init__(self, daemon: Daemon, names: list[str]) -> None:
        self._daemon = daemon
        self._names = names
        self._up = set(names)
        self._began: dict[str, str] = {}
        self._asked = 0
        self._reasons: dict[str, str] = {}

    def run(self, cursor: int) -> int:
        before = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for item in self._daemon.stream("events", types=_EVENTS, after=str(cursor)):
                self._tell(item.event, item.data)
                if not self._up:
                    break
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for reason in dict.fromkeys(self._reasons.values()):
            note(reason)
        if self._asked:
            return ExitCode.INTERRUPTED
        return ExitCode.FAILED if any(one.startswith(_MANUAL) for one in self._reasons.values()) else ExitCode.OK

    def _interrupted(self, *_: object) -> None:
        self._asked += 1
        if self._asked > 2:
            raise KeyboardInterrupt
        note("stopping in order; press Ctrl+C again to end them at once" if self._asked == 1 else "ending them at once")
        if os.fork() == 0:  # in a process of its own: the events are still being followed
            code = 0
            try:
                self._daemon.raw().call("crew_stop", names=self._names, force=self._asked > 1)
            except DaemonError:
                code = 1
            os._exit(code)

    def _tell(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "crew_changed" and event["crew"] in self._names:
            if event["is_up"]:
                self._up.add(event["crew"])
            elif not event["is_stopping"]:
                self._up.discard(event["crew"])
                if event["reason"]:
                    self._reasons[event["crew"]] = event["reason"]
        elif kind == "task_state_changed" and event.get("crew") in self._names:
            if event["new_state"] == "running":
                self._began[event["key"]] = event["occurred_at"]
            elif event["previous_state"] == "running":
                self._tell_end(event)

    def _tell_end(self, event: dict[str, Any]) -> None:
        when = moment(event["occurred_at"])
        time = "" if when is None else f"{when.astimezone():%H:%M}"
        began = moment(self._began.pop(event["key"], None))
        lasted = "" if began is None or when is None else rough_duration((when - began).total_seconds())
        try:
            task = self._daemon.call("task", task=event["key"])
        except DaemonError:
            task = {}
        state, said = _how(event, task)
        cost = _cost(task.get("cost_usd")) if task.get("cost_usd") is not None else ""
        line = f"{time}  {plain(event['member'] or ''):<9}  {event['key']:<5} {state:<9}  {_short(said)}"
        click.echo("   ".join(part for part in (line, lasted, cost) if part).rstrip())


def _how(event: dict[str, Any], task: dict[str, Any]) -> tuple[str, str]:
    """The state as a word, and what there is to say of it."""
    reason = str(event.get("reason") or "").strip()
    first = reason.splitlines()[0].removesuffix("; its last lines:") if reason else ""
    if event["new_state"] == "completed":
        return "completed", "checks passed" if task.get("receipts") else "no checks"
    if event["new_state"] != "queued":
        return str(event["new_state"]), first
    if first.startswith("parked: "):
        return "parked", first.removeprefix("parked: ")
    if reason in _STOPPED:
        return "queued", first
    if any(one["kind"] == "quota" for one in task.get("waits", ())):
        return "waits", first
    if task.get("is_held"):
        return "held", first
    spent = f" ({task['failures']} of {task['max_failures']})" if task.get("failures") else ""
    return "failed", f"{first}; requeued{spent}"
