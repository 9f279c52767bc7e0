"""Commands on tasks: add, list, show, cancel, hold, requeue, send back; and their review."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ostler.cli.common import Daemon, output_option
from ostler.cli.output import as_json, note, plain, seconds_since, short_path, show
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration

_HEAD = ("KEY", "STATE", "AGENT", "AGE", "COST", "TASK", "")


def on_task(daemon: Daemon, verb: str, key: str, **parameters: Any) -> Any:
    try:
        return daemon.call(verb, task=key, **parameters)
    except DaemonError as error:
        if error.code != "not_found":
            raise
        import difflib  # noqa: PLC0415 - only a mistake needs it

        keys = [str(one["key"]) for one in daemon.call("tasks", include_finished=True, limit=1000)]
        close = difflib.get_close_matches(key.upper(), keys, n=1)
        if key.upper() in keys or not close:
            raise
        raise DaemonError("not_found", f"{error}. Did you mean {close[0]}?") from error


@click.group()
def task() -> None:
    """Tasks: pieces of work that agents do and you review."""


@task.command()
@click.argument("text")
@click.option("--agent", help="Who works on it; without one it waits to be claimed.")
@click.option("--model", help="The model of its agent.")
@click.option("--check", "checks", multiple=True, help="A command line that must pass on the result; again for more.")
@click.option("--after", "depends_on", multiple=True, metavar="KEY", help="Only when this task is accepted.")
@click.option("--priority", type=click.Choice(["low", "normal", "high", "critical"]), default="normal")
@click.option("--tag", "tags", multiple=True, help="A tag; again for more.")
@click.option("--hold", is_flag=True, help="Keep it back until `ostler task requeue`.")
@click.option("--timeout", help="How long one attempt may work, such as 45m.")
@click.option("--max-failures", type=int, help="Failed attempts before it is parked for you.  [default: 3]")
@click.option("--backoff", help="Before the next attempt after a failure; doubles up to 10m.  [default: 30s]")
@click.option("--key", help="Its key; else the next number, such as T001.")
@click.option("--id", "idempotency", help="Given twice, the task is added once.")
def add(text: str, key: str | None, idempotency: str | None, **chosen: Any) -> None:
    """Queue a task. TEXT says what is to be done; `-` reads it from standard input."""
    words = sys.stdin.read() if text == "-" else text
    body = {"task": words, "key": key, "near": os.getcwd(), **chosen}  # noqa: PTH109 - as the shell has it
    given = {name: value for name, value in body.items() if value not in (None, (), False)}
    found = Daemon().call("add_task", key=idempotency or os.urandom(16).hex(), new_task=given)
    name = plain(found["key"])
    who = f"queued for {plain(found['agent'])}." if found["agent"] else "queued; it names no agent."
    held = " It is held back." if found["is_held"] else ""
    click.echo(f"{name} {who}{held}   Follow it: ostler logs -f {name}")


@task.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also accepted and rejected ones.")
@click.option("--state", help="Only in this state.")
@click.option("--agent", help="Only for this agent.")
@click.option("--tag", help="Only with this tag.")
@click.option("--text", help="Only where the task has this text in it.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many.")
@output_option()
def list_tasks(everything: bool, count: int, form: str, **chosen: Any) -> None:
    """List tasks, newest first; without -a those that are not finished."""
    found = Daemon().call("tasks", include_finished=everything, limit=count, **chosen)
    show(found, form, _HEAD, _row, name="key")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    cost = "-" if one["cost_usd"] is None else f"${one['cost_usd']:.2f}"
    age = rough_duration(seconds_since(one["created_at"]))
    title = one["title"] if len(one["title"]) <= 60 else one["title"][:59] + "…"
    return one["key"], one["state"], one["agent"] or "-", age, cost, title, one["next"]


@task.command("show")
@click.argument("key")
def show_task(key: str) -> None:
    """Show everything about a task, as JSON."""
    as_json(on_task(Daemon(), "task", key))


@task.command()
@click.argument("key")
@click.option("-m", "--message", help="Why.")
def cancel(key: str, message: str | None) -> None:
    """End the work on a task for good."""
    found = on_task(Daemon(), "cancel_task", key, reason=message)
    click.echo(f"{plain(found['key'])} is cancelled. Its workdir is kept: {short_path(_place(found))}")


@task.command()
@click.argument("key")
def requeue(key: str) -> None:
    """Release a held task, or end its present attempt and let it be done again."""
    found = on_task(Daemon(), "requeue_task", key)
    click.echo(f"{plain(found['key'])} is queued.")


@task.command()
@click.argument("key")
def hold(key: str) -> None:
    """End the present attempt of a task and keep it back until `ostler task requeue`."""
    name = plain(on_task(Daemon(), "hold_task", key)["key"])
    click.echo(f"{name} is held back. Let it go on with: ostler task requeue {name}")


@task.command("send-back")
@click.argument("key")
@click.option(
    "-m", "--message", help="What is to be done better; the next attempt reads it. A conflict says it itself."
)
def send_back(key: str, message: str | None) -> None:
    """Send a completed task back to its agent, with a comment."""
    found = on_task(Daemon(), "send_back", key, comment=message)
    click.echo(f"{plain(found['key'])} goes back to the queue with your comment (attempt {found['attempt'] + 1}).")


# --- review ------------------------------------------------------------------------------------------


@click.command()
@click.argument("key")
@click.argument("paths", nargs=-1)
@click.option("--stat", is_flag=True, help="Only the files and how much of them.")
def diff(key: str, paths: tuple[str, ...], stat: bool) -> None:
    """Show what a task changed."""
    found = on_task(Daemon(), "diff", key, paths="\0".join(paths), stat=stat)
    click.echo("\n".join(plain(line) for line in found["diff"].splitlines()))
    _about_merge(found["merge"])
    for receipt in found["task"]["receipts"]:
        passed = receipt["exit_code"] == 0
        how = "passed" if passed else f"failed (exit code {receipt['exit_code']})"
        proof = f"on the submitted tree (receipt {receipt['output_digest'][:8]})"
        note(f"check: {receipt['command']}  {how} in {receipt['seconds']:.0f} s {proof}")
    if found["claims_differ"]:
        note(f"its agent names other files than it changed: {', '.join(found['claims_differ'][:10])}")


def _about_merge(state: dict[str, Any] | None) -> None:
    if not state or state.get("target") is None:
        return
    moved = state["commits"]
    said = f"based on {state['target']} at {state['base'][:7]}"
    if moved:
        merges = "merges cleanly" if not state["conflicts"] else f"conflicts in {', '.join(state['conflicts'][:5])}"
        said += f" ({state['target']} has moved by {moved} commit{'' if moved == 1 else 's'}; {merges})"
    note(said)


@click.command()
@click.argument("key")
@click.argument("paths", nargs=-1)
def accept(key: str, paths: tuple[str, ...]) -> None:
    """Merge the work of a task into its branch; with PATHS only these files."""
    try:
        found = on_task(Daemon(), "accept", key, paths=list(paths))
    except DaemonError as error:
        if error.code != "merge_conflict":
            raise
        raise DaemonError(error.code, f"{error} (ostler task send-back {key})") from error
    name, merged = plain(found["key"]), found["accepted"]
    if merged is None:
        click.echo(f"{name} accepted. Its files are in {short_path(_place(found))}")
        return
    click.echo(
        f"{name} accepted: merged into {merged['target']} as {merged['commit'][:7]}.   Take it back: ostler undo {name}"
    )
    if not merged["followed"] and merged.get("why_not_followed"):
        note(str(merged["why_not_followed"]))


@click.command()
@click.argument("key")
@click.option("-m", "--message", required=True, help="Why.")
def reject(key: str, message: str) -> None:
    """Reject a task, finally."""
    name = plain(on_task(Daemon(), "reject", key, reason=message)["key"])
    click.echo(f"{name} rejected. Its workdir goes to the vault tomorrow; bring it back with: ostler unretire {name}")


@click.command()
@click.argument("key")
def undo(key: str) -> None:
    """Take an accepted task back out of its branch."""
    found = on_task(Daemon(), "undo", key)
    click.echo(f"{plain(found['key'])} is taken back; it is completed and can be reviewed again.")


@click.command()
@click.argument("key")
def retire(key: str) -> None:
    """Put the workdir of a task into the vault, whole."""
    found = on_task(Daemon(), "retire", key)
    if found["vault"] is None:
        note(f"{key} has no workdir")
        return
    name = plain(found["key"])
    click.echo(f"{name} is in the vault ({short_path(found['vault']['path'])}). Bring it back: ostler unretire {name}")


@click.command()
@click.argument("key")
def unretire(key: str) -> None:
    """Bring the workdir of a task back from the vault."""
    found = on_task(Daemon(), "unretire", key)
    click.echo(f"The workdir of {plain(found['key'])} is back: {short_path(_place(found))}")


def _place(found: dict[str, Any]) -> str:
    return str((found["workdir"] or {}).get("path") or "(none)")
