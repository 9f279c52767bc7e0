"""Commands on tasks: add, list, show, cancel, hold, requeue, send back; and their review."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from ostler.cli import completers
from ostler.cli.common import (
    Daemon,
    Group,
    count_option,
    fail,
    for_each,
    handed_in,
    name_projects,
    on_task,
    output_option,
    present_directory,
)
from ostler.cli.common import list_tasks as list_all_tasks
from ostler.cli.output import (
    as_json,
    cost_text,
    counted,
    diff_lines,
    note,
    page,
    plain,
    seconds_since,
    sentence,
    short_path,
)
from ostler.cli.table import Column, show
from ostler.cli.watch import watch, watch_option
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration
from ostler.errors import ExitCode

#: Of a list of tasks; the last is the next step, which stays whole where it is a command.
COLUMNS = (
    Column("KEY", lambda task: str(task["key"]), least=12),
    Column("STATE", lambda task: str(task["state"])),
    Column("AGENT", lambda task: task["agent"] or "-", least=8, leaves=3),
    Column("PROJECT", lambda task: str(task.get("project_name") or ""), least=8, leaves=4, if_any=True),
    Column("AGE", lambda task: rough_duration(seconds_since(task["created_at"])), leaves=2, is_number=True),
    Column("COST", lambda task: cost_text(task["cost_usd"]), leaves=1, is_number=True),
    Column("ATTEMPT", lambda task: str(task["attempt"]), only_wide=True, is_number=True),
    Column("TAGS", lambda task: ",".join(task["tags"]), only_wide=True, if_any=True),
    Column("TASK", lambda task: str(task["title"]), least=16),
    Column("", lambda task: sentence(task["next"]), least=44),
)
_AGENTS = completers.definitions
_STATES = ("queued", "running", "completed", "accepted", "rejected")
_TASK_EVENTS = ("task_state_changed", "task_wait_opened", "task_wait_ended", "task_iteration")
_key = click.argument("key", shell_complete=completers.tasks())
_open_key = click.argument("key", shell_complete=completers.tasks("queued", "running", "completed"))
_work_key = click.argument("key", shell_complete=completers.tasks("queued", "running"))
_completed_key = click.argument("key", shell_complete=completers.tasks("completed"))


@click.group(cls=Group)
def task() -> None:
    """Tasks: pieces of work that agents do and you review."""


@task.command()
@click.argument("text", required=False)
@click.option("-f", "--file", "file", type=click.Path(dir_okay=False, allow_dash=True), help="A list of tasks in YAML.")
@click.option("--agent", help="Who works on it; without one it waits to be claimed.", shell_complete=_AGENTS)
@click.option("--model", help="The model of its agent.")
@click.option("--check", "checks", multiple=True, help="A command line that must pass on the result; again for more.")
@click.option("--setup", help="A command line that prepares its worktree, such as `uv sync`.")
@click.option(
    "--after",
    "depends_on",
    multiple=True,
    metavar="KEY",
    help="Only when this task is accepted.",
    shell_complete=completers.tasks(),
)
@click.option("--priority", type=click.Choice(["low", "normal", "high", "critical"]), default="normal")
@click.option("--tag", "tags", multiple=True, help="A tag; again for more.", shell_complete=completers.tags)
@click.option("--hold", is_flag=True, help="Keep it back until `ostler task requeue`.")
@click.option("--timeout", help="How long one attempt may work, such as 45m.")
@click.option("--max-failures", type=int, help="Failed attempts before it is parked for you.  [default: 3]")
@click.option("--backoff", help="Before the next attempt after a failure; doubles up to 10m.  [default: 30s]")
@click.option("--key", help="Its key; else the next number, such as T001.")
@click.option("--id", "idempotency", help="Given twice, the task is added once.")
def add(text: str | None, file: str | None, key: str | None, idempotency: str | None, **chosen: Any) -> None:
    """Queue a task. TEXT says what is to be done; `-` reads it from standard input.

    -f adds the tasks of a list: all of them or, where something is wrong, none; `-f -` reads it from standard input.
    Each is its text, or `task` with keys that are named as these options: agent, checks, after, tags.
    """
    if (text is None) == (file is None):
        raise click.UsageError("name what is to be done, or a list of tasks with -f FILE; not both")
    if file is not None:
        _require_no_options("key", *chosen)
        _add_list(file, idempotency)
        return
    words = sys.stdin.read() if text == "-" else text
    body = {"task": words, "key": key, "near": os.getcwd(), **chosen}  # noqa: PTH109 - as the shell has it
    fields = {name: value for name, value in body.items() if value not in (None, (), False)}
    daemon = Daemon(makes_home=True)
    added = daemon.call("add_task", key=idempotency or os.urandom(16).hex(), new_task=fields)
    name = plain(added["key"])
    who = f"queued for {plain(added['agent'])}." if added["agent"] else "queued; it names no agent."
    held = " It is held back." if added["is_held"] else ""
    next_step = f"See why: ostler why {name}" if added["warning"] else f"Follow it: ostler logs -f {name}"
    click.echo(f"{name} {who}{held}   {next_step}")
    if added["warning"]:
        note(added["warning"])


def _require_no_options(*names: str) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        is_default = context.get_parameter_source(parameter.name or "") is ParameterSource.DEFAULT
        if parameter.name in names and not is_default:
            raise click.UsageError(f"{parameter.opts[0]} is for one task; write it into the list")


def _add_list(file: str, idempotency: str | None) -> None:
    from ostler.definitions.task_list import TaskList  # noqa: PLC0415 - loads YAML and pydantic
    from ostler.errors import DefinitionError  # noqa: PLC0415 - likewise

    try:
        with click.open_file(file, encoding="utf-8") as opened:
            words = opened.read()
        tasks = TaskList("standard input" if file == "-" else file, words)
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"{file} cannot be read: {error}", ExitCode.USAGE) from error
    except DefinitionError as error:
        for fault in error.faults:
            note(fault.message)
        raise fail("no task was added", ExitCode.USAGE) from error
    daemon = Daemon(makes_home=True)
    key = idempotency or os.urandom(16).hex()
    try:
        added = daemon.call("add_tasks", key=key, entries=tasks.entries, near=present_directory())
    except DaemonError as error:
        for text in error.faults:
            note(tasks.place(text))
        if not error.faults:
            raise
        raise fail("no task was added", ExitCode.USAGE) from error
    for task in added:
        click.echo(f"{plain(task['key'])}  {plain(task['title'])}")
    for warning in dict.fromkeys(task["warning"] for task in added if task["warning"]):
        note(warning)
    note(f"{counted(len(added), 'task')} queued; see them with: ostler task list")


@task.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also accepted and rejected ones.")
@click.option("--state", type=click.Choice(_STATES), help="Only in this state.")
@click.option("--agent", help="Only for this agent.", shell_complete=_AGENTS)
@click.option("--tag", help="Only with this tag.", shell_complete=completers.tags)
@click.option("--text", help="Only where the task has this text in it.")
@watch_option
@count_option
@output_option()
def list_tasks(everything: bool, is_live: bool, count: int | None, form: str, **filters: Any) -> None:
    """List tasks, newest first; without -a those that are not finished."""
    daemon = Daemon()

    def fetch(count: int | None = None) -> list[dict[str, Any]]:
        return name_projects(list_all_tasks(daemon, count, include_finished=everything, **filters), form)

    if is_live:
        watch(daemon, lambda: fetch()[:count], form, COLUMNS, _TASK_EVENTS)
    tasks = fetch(count)
    narrowed = any(value is not None for value in filters.values())
    show(tasks, form, COLUMNS, name="key", empty=_no_tasks(everything=everything, narrowed=narrowed))


def _no_tasks(*, everything: bool, narrowed: bool) -> str:
    if narrowed:
        return f"no such task{'' if everything else '; -a looks also among the accepted and rejected ones'}"
    rest = "" if everything else ", or see the finished ones: ostler task list -a"
    return f'no task {"is there" if everything else "is open"}; add one with `ostler task add "…" --agent NAME`{rest}'


@task.command("show")
@_key
def show_task(key: str) -> None:
    """Show everything about a task, as JSON."""
    as_json(on_task(Daemon(), "task", key))


@task.command()
@_work_key
@click.option("-m", "--message", help="Why.")
def cancel(key: str, message: str | None) -> None:
    """End the work on a task for good."""
    task = on_task(Daemon(), "cancel_task", key, reason=message)
    kept = f" Its workdir is kept: {short_path(_place(task))}" if task["workdir"] else ""
    click.echo(f"{plain(task['key'])} is cancelled.{kept}")


@task.command()
@_open_key
def requeue(key: str) -> None:
    """Release a held task, or end its present attempt and let it be done again."""
    click.echo(f"{plain(on_task(Daemon(), 'requeue_task', key)['key'])} is queued.")


@task.command()
@_work_key
def hold(key: str) -> None:
    """End the present attempt of a task and keep it back until `ostler task requeue`."""
    name = plain(on_task(Daemon(), "hold_task", key)["key"])
    click.echo(f"{name} is held back. Let it go on with: ostler task requeue {name}")


@task.command("hand-in")
@_completed_key
def hand_in(key: str) -> None:
    """Take in what you have changed in the worktree of a completed task: it is checked and waits for your review."""
    daemon = Daemon()
    before = on_task(daemon, "task", key)
    after = daemon.call("hand_in", task=before["key"])
    click.echo(handed_in(before, after) or f"{plain(before['key'])}: nothing has changed since it was handed in")
    if after["state"] != "completed":
        raise click.exceptions.Exit(ExitCode.FAILED)


@task.command("send-back")
@_completed_key
@click.option(
    "-m", "--message", help="What is to be done better; the next attempt reads it. A conflict says it itself."
)
def send_back(key: str, message: str | None) -> None:
    """Send a completed task back to its agent, with a comment."""
    task = on_task(Daemon(), "send_back", key, comment=message)
    comment = "" if message is None else " with your comment"
    click.echo(f"{plain(task['key'])} goes back to the queue{comment} (attempt {task['attempt'] + 1}).")


# --- review ------------------------------------------------------------------------------------------


@click.command()
@_key
@click.argument("paths", nargs=-1, shell_complete=completers.files)
@click.option("--stat", is_flag=True, help="Only the files and how much of them.")
def diff(key: str, paths: tuple[str, ...], stat: bool) -> None:
    """Show what a task changed; on a terminal in colour, through $OSTLER_PAGER, $PAGER or less."""
    reply = on_task(Daemon(), "diff", key, paths="\0".join(paths), stat=stat)
    if reply["diff"]:
        page(diff_lines(reply["diff"]))
    else:
        note(f"{plain(reply['task']['key'])} changes nothing{' in these paths' if paths else ''}")
    _tell_merge_state(reply["merge"])
    for receipt in reply["task"]["receipts"]:
        passed = receipt["exit_code"] == 0
        how = "passed" if passed else f"failed (exit code {receipt['exit_code']})"
        proof = f"on the submitted tree (receipt {receipt['output_digest'][:8]})"
        note(f"check: {receipt['command']}  {how} in {receipt['seconds']:.0f} s {proof}")
    snapshot = reply["task"]["snapshot"] or {}
    for warning in snapshot.get("warnings", ()):
        note(f"look at this before you accept: {warning}")
    for reason in snapshot.get("left_out", ()):
        note(f"not in it: {reason}")
    if reply["claims_differ"]:
        note(f"its agent names other files than it changed: {', '.join(reply['claims_differ'][:10])}")


def _tell_merge_state(state: dict[str, Any] | None) -> None:
    if not state or state.get("target") is None:
        return
    text, moved = f"based on {state['target']} at {state['base'][:7]}", state["commits"]
    if moved:
        merges = "merges cleanly" if not state["conflicts"] else f"conflicts in {', '.join(state['conflicts'][:5])}"
        text += f" ({state['target']} has moved by {moved} commit{'' if moved == 1 else 's'}; {merges})"
    note(text)


@click.command()
@click.argument("keys", nargs=-1, metavar="[KEY]... [PATH]...", shell_complete=completers.tasks("completed"))
@click.option("--all", "everything", is_flag=True, help="Every completed task, the oldest first.")
@click.option("-m", "--message", help="The message of the commit; else the title and the summary of the task.")
@click.option("--branch-only", is_flag=True, help="Move the branch also where your checkout of it cannot follow.")
def accept(keys: tuple[str, ...], everything: bool, message: str | None, branch_only: bool) -> None:
    """Merge the work of tasks into their branches; after one KEY, PATHS name the only files to take.

    Where you have changed files that the work changes too, nothing is merged: commit or stash them first.
    --branch-only moves the branch all the same and leaves your files as they are; git then shows the difference as
    changes of yours, and committing them would take back what was accepted.
    """
    daemon = Daemon()
    tasks, paths = _keys_and_paths(daemon, keys, everything=everything)
    if message is not None and len(tasks) > 1:
        raise click.UsageError("-m is the message of one commit; name one task")
    for_each(tasks, lambda key: _accept(daemon, key, paths, message, branch_only=branch_only))


def _keys_and_paths(daemon: Daemon, words: tuple[str, ...], *, everything: bool) -> tuple[list[str], list[str]]:
    """The words that are keys of tasks, and the others. A path that looks like a key is written ./KEY."""
    if everything:
        if words:
            raise click.UsageError("--all stands alone; leave the keys and the paths out")
        completed = list_all_tasks(daemon, state="completed")
        if not completed:
            note("no task waits for its review")
        return [str(task["key"]) for task in sorted(completed, key=lambda task: str(task["completed_at"]))], []
    if not words:
        raise click.UsageError("name the task to accept, or --all")
    if len(words) == 1:
        return list(words), []
    existing = {str(task["key"]) for task in list_all_tasks(daemon, include_finished=True)}
    keys = [word for word in words if word == words[0] or word.upper() in existing]
    paths = [word.removeprefix("./") for word in words if word not in keys]
    if paths and len(keys) > 1:
        raise click.UsageError(f"{paths[0]} is no task; files can be chosen of one task at a time")
    return list(dict.fromkeys(keys)), paths


def _accept(daemon: Daemon, key: str, paths: list[str], message: str | None, *, branch_only: bool) -> None:
    try:
        task = on_task(daemon, "accept", key, paths=paths, message=message, branch_only=branch_only)
    except DaemonError as error:
        if error.code != "merge_conflict":
            raise
        by_hand = f"by hand: ostler shell {key}, which hands it in when you leave it"
        raise DaemonError(error.code, f"{error} (ostler task send-back {key}; {by_hand})") from error
    name, merged = plain(task["key"]), task["accepted"]
    if merged is None:
        click.echo(f"{name} accepted. Its files are in {short_path(_place(task))}")
        return
    where = f"merged into {merged['target']} as {merged['commit'][:7]}."
    if merged["left"]:
        part = f"{merged['files'] - merged['left']} of {merged['files']} files"
        click.echo(f"{name}: {part} {where}   Take the rest too: ostler accept {name}")
    else:
        click.echo(f"{name} accepted: {where}   Take it back: ostler undo {name}")
    if not merged["followed"] and merged.get("why_not_followed"):
        note(str(merged["why_not_followed"]))


@click.command()
@_open_key
@click.option("-m", "--message", required=True, help="Why.")
def reject(key: str, message: str) -> None:
    """Reject a task, finally."""
    task = on_task(Daemon(), "reject", key, reason=message)
    name, merged = plain(task["key"]), task["accepted"]
    if merged:
        note(f"{merged['files'] - merged['left']} of {merged['files']} files of it stay in {merged['target']}")
    click.echo(f"{name} rejected. Its workdir goes to the vault tomorrow; bring it back with: ostler unretire {name}")


@click.command()
@click.argument("key", shell_complete=completers.tasks("accepted"))
def undo(key: str) -> None:
    """Take an accepted task back out of its branch."""
    task = on_task(Daemon(), "undo", key)
    click.echo(f"{plain(task['key'])} is taken back; it is completed and can be reviewed again.")
    for part in task["undone"]:
        if not part["followed"] and part["why_not_followed"]:
            note(str(part["why_not_followed"]))


@click.command()
@_key
def retire(key: str) -> None:
    """Put the workdir of a task into the vault, whole."""
    task = on_task(Daemon(), "retire", key)
    if task["vault"] is None:
        note(f"{key} has no workdir")
        return
    if task["vault"].get("not_removed"):
        note(str(task["vault"]["not_removed"]))
    name = plain(task["key"])
    click.echo(f"{name} is in the vault ({short_path(task['vault']['path'])}). Bring it back: ostler unretire {name}")


@click.command()
@_key
def unretire(key: str) -> None:
    """Bring the workdir of a task back from the vault."""
    task = on_task(Daemon(), "unretire", key)
    click.echo(f"The workdir of {plain(task['key'])} is back: {short_path(_place(task))}")


def _place(task: dict[str, Any]) -> str:
    return str((task["workdir"] or {}).get("path") or "(none)")
