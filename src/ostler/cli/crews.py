"""Commands on crews: up, ps, scale, stop, reload."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, Group, list_tasks, output_option
from ostler.cli.live import LiveLines, fetch_crews
from ostler.cli.output import cost_text, counted, first_line, moment, note, plain, seconds_since, sentence, tokens_text
from ostler.cli.table import Column, fit_line, print_table, show
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration
from ostler.errors import ExitCode

_COLUMNS = (
    Column("MEMBER", lambda member: str(member["member"]), least=14),
    Column("GENERATION", lambda member: str(member["generation"]), leaves=1, is_number=True),
    Column("STATE", lambda member: str(member["state"])),
    Column("TASK", lambda member: member["task"] or "-", least=12),
    Column("SINCE", lambda member: rough_duration(seconds_since(member["since"])), leaves=2),
    Column("COST", lambda member: cost_text(member["cost_usd"]), leaves=3, is_number=True),
    Column("LAST ERROR", lambda member: sentence(first_line(member["error"])), least=20),
)
_EVENTS = "task_state_changed,crew_changed"
#: How the reason of a crew begins that a person has to look at; as in `model.crew`, which is slow to import.
_MANUAL = "manual intervention required"
#: Ends of attempts that are no failure of the agent; as in `tasks.attempt`.
_STOPPED = frozenset({"the daemon is stopping", "its crew is stopping", "its crew begins the member afresh"})


@click.group(cls=Group)
def crew() -> None:
    """Crews: agents of one type that are kept at work on the queue."""


@crew.command()
@click.argument("names", nargs=-1, shell_complete=completers.crews)
@click.option("-d", "--detach", is_flag=True, help="Leave them at work, and come back at once.")
def up(names: tuple[str, ...], detach: bool) -> None:
    """Bring up the crews NAMES of ostler.toml, or all of them, and show what they do.

    Ctrl+C stops them in order, a second one at once; exit code 130. Where a policy stops them it is 1.
    """
    daemon = Daemon(makes_home=True)
    queued = list_tasks(daemon, state="queued")
    reply = daemon.call("crew_up", names=list(names))
    crews = reply["crews"]
    click.echo(", ".join(map(_title, crews)))
    waiting = sum(task["next"].startswith("waits for") for task in queued)
    queue = f"{counted(len(queued), 'task')} queued{f', {waiting} wait for others' if waiting else ''}."
    click.echo(f"{queue}   {'Stop them: ostler crew stop' if detach else 'Ctrl+C stops in order.'}")
    _tell_faults(crews)
    if not detach:
        raise click.exceptions.Exit(_Follower(daemon, crews).run(reply["cursor"]))


def _title(crew: dict[str, Any]) -> str:
    return f"crew {plain(crew['name'])} ({plain(crew['agent'])} × {crew['count']}, on-error {crew['on_error']})"  # noqa: RUF001 - times


def _tell_faults(crews: Sequence[dict[str, Any]]) -> None:
    for text in dict.fromkeys(crew["trouble"] for crew in crews if crew["trouble"]):
        note(f"{text} (the last good settings stay in force)")


@crew.command()
@output_option(name=False)
def ps(form: str) -> None:
    """List crews and their members."""
    crews = Daemon().call("crews")
    if form not in {"table", "wide"}:
        show(crews, form, (), empty="")
        return
    if not crews:
        note('no crew is declared; write one into ostler.toml, such as [crew.coder] with agent = "claude"')
    for crew in crews:
        state = "up" if crew["is_up"] else "stopping" if crew["members"] else "not up"
        reason = f": {sentence(crew['reason'])}" if crew["reason"] else ""
        advice = f"   Bring it up: ostler crew up {plain(crew['name'])}" if state == "not up" else ""
        click.echo(f"{_title(crew)} is {state}{reason}{advice}")
    if any(crew["members"] for crew in crews):
        members = [member for crew in crews for member in crew["members"]]
        print_table(_COLUMNS, members, wide=form == "wide")
    _tell_faults(crews)


@crew.command()
@click.argument("name", shell_complete=completers.crews)
@click.argument("count", type=click.IntRange(0, 1000))
def scale(name: str, count: int) -> None:
    """Give a crew so many members, until it is brought up anew."""
    members = Daemon().call("crew_scale", crew=name, count=count)["members"]
    busy = sum(member["task"] is not None for member in members) - count
    rest = f" {busy} more finish their task first." if busy > 0 else ""
    click.echo(f"crew {plain(name)} has {counted(count, 'member')}.{rest}")


@crew.command()
@click.argument("names", nargs=-1, shell_complete=completers.crews)
@click.option("--force", is_flag=True, help="End their agents at once.")
def stop(names: tuple[str, ...], force: bool) -> None:
    """Stop the crews NAMES, or all of them, in order; their tasks go back to the queue."""
    crews = Daemon().call("crew_stop", names=list(names), force=force)
    for crew in crews:
        name = plain(crew["name"])
        click.echo(f"crew {name} is stopped.   Bring it up again: ostler crew up {name}")
    if not crews:
        note("no crew is up; `ostler crew ps` lists them")


@crew.command()
def reload() -> None:
    """Read ostler.toml again. Live members keep their settings; every new one reads them fresh."""
    crews = Daemon().call("crew_reload")
    _tell_faults(crews)
    if any(crew["trouble"] for crew in crews):
        raise click.exceptions.Exit(ExitCode.USAGE)
    click.echo("\n".join(map(_title, crews)) or "no crew is declared")


# --- following ---------------------------------------------------------------------------------------


class _Follower:
    """Shows what crews do until they have stopped; passes Ctrl+C on."""

    def __init__(self, daemon: Daemon, crews: Sequence[dict[str, Any]]) -> None:
        names = [str(crew["name"]) for crew in crews]
        self._daemon = daemon
        self._names = names
        #: Crews of one project come up together; those of another may have the same names.
        self._project = (crews[0]["project"] if crews else None) or ""
        self._up = set(names)
        self._began: dict[str, str] = {}
        self._interrupts = 0
        self._reasons: dict[str, str] = {}
        self._live = LiveLines(lambda: fetch_crews(daemon.raw(), names))

    def run(self, cursor: int) -> int:
        before = {number: signal.signal(number, self._on_interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._live:
                for item in self._daemon.stream("events", types=_EVENTS, after=str(cursor)):
                    self._tell(item.event, item.data)
                    if not self._up:
                        break
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for reason in dict.fromkeys(self._reasons.values()):
            note(reason)
        if self._interrupts:
            return ExitCode.INTERRUPTED
        needs_person = any(reason.startswith(_MANUAL) for reason in self._reasons.values())
        return ExitCode.FAILED if needs_person else ExitCode.OK

    def _on_interrupt(self, *_: object) -> None:
        self._interrupts += 1
        if self._interrupts > 2:
            raise KeyboardInterrupt
        first = self._interrupts == 1
        self._live.note("stopping in order; press Ctrl+C again to end them at once" if first else "ending them at once")
        self._daemon.call_in_thread("crew_stop", names=self._names, force=not first)

    def _tell(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "crew_changed" and event["crew"] in self._names and event.get("project", "") == self._project:
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
        ended, began = moment(event["occurred_at"]), moment(self._began.pop(event["key"], None))
        clock = "" if ended is None else f"{ended.astimezone():%H:%M}"
        lasted = "" if began is None or ended is None else rough_duration((ended - began).total_seconds())
        try:
            task = self._daemon.call("task", task=event["key"])
        except DaemonError:
            task = {}
        state, reason = _ending(event, task)
        tokens = tokens_text(task.get("tokens") or 0)
        cost = "" if task.get("cost_usd") is None else cost_text(task["cost_usd"])
        head = f"{clock}  {plain(event['member'] or ''):<9}  {event['key']:<5} {state:<9}  "
        spent = (lasted, f"{tokens} tokens" if tokens else "", cost)
        self._live.echo(fit_line(head, sentence(reason), *spent, usual=0))


def _ending(event: dict[str, Any], task: dict[str, Any]) -> tuple[str, str]:
    """The state of a task after its attempt as a word, and the reason."""
    reason = first_line(event.get("reason"))
    if event["new_state"] == "completed":
        return "completed", "checks passed" if task.get("receipts") else "no checks"
    if event["new_state"] != "queued":
        return str(event["new_state"]), reason
    if reason.startswith("parked: "):
        return "parked", reason.removeprefix("parked: ")
    if reason in _STOPPED:
        return "queued", reason
    if any(wait["kind"] == "quota" for wait in task.get("waits", ())):
        return "waits", reason
    if task.get("is_held"):
        return "held", reason
    spent = f" ({task['failures']} of {task['max_failures']})" if task.get("failures") else ""
    return "failed", f"{reason}; requeued{spent}"
