"""Commands on loops: run one, look at its iterations; signals of agents; pull requests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, Group, fail, on_task, output_option
from ostler.cli.live import LiveLines, fetch_loop
from ostler.cli.look import newest_event
from ostler.cli.output import (
    as_json,
    cost_text,
    counted,
    first_line,
    note,
    plain,
    seconds_since,
    sentence,
    tokens_text,
)
from ostler.cli.table import Column, fit_line, show
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration
from ostler.errors import ExitCode

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: How an iteration ended, where its own words are not enough.
_ENDINGS = {
    "exit": "ended without a signal",
    "error": "failed",
    "check": "check failed",
    "limit": "usage limit",
    "stopped": "stopped",
    "hopeless": "cannot be started",
}
#: Options of `loop run` that are settings of the loop; the others are of the task.
_SETTINGS = ("until", "max_iterations", "max_retries", "retry_interval", "max_cost_usd", "max_tokens", "ci", "on_merge")
_key = click.argument("key", shell_complete=completers.tasks())


class _WithRun(Group):
    """`ostler loop PROMPT.md` is `ostler loop run PROMPT.md`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of `run`, which needs not be named."""
        self.commands["run"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its commands, else the options of `run`, else the file of a prompt."""
        run = self.commands["run"]
        own = super().shell_complete(ctx, incomplete)
        return own or run.shell_complete(ctx, incomplete) or completers.files(ctx, run.params[0], incomplete)


@click.group(cls=_WithRun)
def loop() -> None:
    """Drive a task through fresh starts until it is proven done.

    `ostler loop PROMPT.md --agent claude --until ALL_TESTS_PASS` needs nothing else.
    """


@loop.command()
@click.argument("prompt", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--agent", required=True, help="Who works on it.", shell_complete=completers.definitions)
@click.option("--model", help="The model of its agent.")
@click.option("--until", help="What it prints when it is done, where it signals nothing.")
@click.option("--max-iterations", type=click.IntRange(1), help="Fresh starts at most.")
@click.option("--max-retries", type=click.IntRange(0), help="Starts that ended in nothing, at most; 100.")
@click.option("--retry-interval", help="Between such a start and the next; 30s.")
@click.option("--max-cost", "max_cost_usd", type=click.FloatRange(0), help="Dollars at most.")
@click.option("--max-tokens", type=click.IntRange(1), help="Tokens at most.")
@click.option("--check", "checks", multiple=True, help="A command line that must pass on the result; again for more.")
@click.option("--ci", multiple=True, help="A command line that is the CI of its pull request; again for more.")
@click.option(
    "--on-merge", type=click.Choice(["accept", "continue"]), help="What follows the merge of its pull request."
)
@click.option(
    "--after",
    "depends_on",
    multiple=True,
    metavar="KEY",
    help="Only when this task is accepted.",
    shell_complete=completers.tasks(),
)
@click.option("--timeout", help="How long one start may work, such as 45m.")
@click.option("-d", "--detach", is_flag=True, help="Only begin it.")
def run(prompt: Path, detach: bool, **options: Any) -> None:
    """Begin a loop with the prompt in a file; `-` reads it from standard input."""
    try:
        words = sys.stdin.read() if str(prompt) == "-" else prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"the prompt {prompt} cannot be read: {error}") from error
    fields = {name: value for name, value in options.items() if value not in (None, ())}
    settings = {name: fields.pop(name) for name in _SETTINGS if name in fields}
    daemon = Daemon(makes_home=True)
    before = newest_event(daemon)
    body = {"task": words, "near": os.getcwd(), "loop": settings, **fields}  # noqa: PTH109 - as the shell has it
    key = str(daemon.call("add_task", key=os.urandom(16).hex(), new_task=body)["key"])
    if detach:
        click.echo(f"{plain(key)} is in its loop.   Follow it: ostler loop follow {plain(key)}")
        return
    note(f"{key} begins; Ctrl+C stops it")
    raise click.exceptions.Exit(_follow(daemon, key, before))


@loop.command()
@_key
def follow(key: str) -> None:
    """Follow a loop that is under way."""
    daemon = Daemon()
    before = newest_event(daemon)
    task = on_task(daemon, "task", key)
    for wait in task["waits"]:
        click.echo(_wait_line(wait))
    ended = task["attempt"] - (task["state"] == "running")
    raise click.exceptions.Exit(_follow(daemon, str(task["key"]), before, ended))


@loop.command("show")
@_key
@click.option("--prompt", type=click.IntRange(1), metavar="N", help="What start N was told, whole.")
@output_option(name=False)
def show_loop(key: str, prompt: int | None, form: str) -> None:
    """Show the fresh starts of a task, each with how it ended."""
    iterations = on_task(Daemon(), "iterations", key)
    if prompt is None:
        show(iterations, form, _COLUMNS, empty=f"{key} has not been started yet; see why: ostler why {key}")
        return
    for iteration in iterations:
        if iteration["number"] == prompt:
            click.echo(iteration["prompt"])
            return
    raise fail(f"{key} has no start {prompt}; `ostler loop show {key}` lists them", ExitCode.NOT_FOUND)


def _seconds(iteration: dict[str, Any]) -> float:
    return seconds_since(iteration["started_at"]) - seconds_since(iteration["ended_at"])


def _took(iteration: dict[str, Any]) -> str:
    return "" if iteration["ended_at"] is None else rough_duration(_seconds(iteration))


def _files(iteration: dict[str, Any]) -> str:
    return "-" if iteration["changed_files"] is None else str(iteration["changed_files"])


_COLUMNS = (
    Column("START", lambda iteration: str(iteration["number"])),
    Column("TOOK", _took, leaves=2),
    Column("ENDED BY", lambda iteration: str(iteration["ended_by"] or "running")),
    Column("FILES", _files, leaves=1),
    Column("TOKENS", lambda iteration: str(iteration["tokens"]), leaves=3, is_number=True),
    Column("COST", lambda iteration: cost_text(iteration["cost_usd"]), leaves=4, is_number=True),
    Column("SUMMARY", lambda iteration: first_line(iteration["summary"]), least=20),
)


# --- following ---------------------------------------------------------------------------------------


class _Progress:
    """Prints each iteration once when it has ended, above the line of what works now."""

    def __init__(self, live: LiveLines, skipped: int) -> None:
        self._live = live
        self._last = skipped

    def iteration(self, iteration: dict[str, Any], seconds: float) -> None:
        if iteration["number"] > self._last:
            self._last = iteration["number"]
            self._live.echo(_iteration_line(iteration, seconds))

    def event(self, kind: str, event: dict[str, Any]) -> None:
        """What happened to the task."""
        if kind == "task_iteration" and event["ended_by"] is not None:
            self.iteration(event, float(event["seconds"] or 0))
        elif kind == "task_wait_opened" and event["kind"] != "backoff":
            self._live.echo(_wait_line(event))


def _follow(daemon: Daemon, key: str, after: int, skipped: int = 0) -> int:
    """Show what happens from event `after` on, without the first `skipped` iterations; then the exit code."""
    live = LiveLines(lambda: fetch_loop(daemon.raw(), key))
    progress = _Progress(live, skipped)
    try:
        with live:
            for item in daemon.stream("events", after=str(after)) if not _is_over(daemon, key) else ():
                if item.data.get("key") == key:
                    progress.event(item.event, item.data)
                    if _is_over(daemon, key):
                        break
    except KeyboardInterrupt:
        return _stop(daemon, key)
    for iteration in on_task(daemon, "iterations", key):  # the stream may be behind the record
        if iteration["ended_at"] is not None:
            progress.iteration(iteration, _seconds(iteration))
    return _tell_result(on_task(daemon, "task", key))


def _wait_line(wait: dict[str, Any]) -> str:
    return f"waits          {sentence(str(wait['reason'] or wait['kind']))}"


def _iteration_line(iteration: dict[str, Any], seconds: float) -> str:
    summary, ending = plain(first_line(iteration["summary"])), _ENDINGS.get(str(iteration["ended_by"]))
    if ending is None:
        how = summary
    else:
        how = f"{ending}: {summary}" if summary and iteration["ended_by"] != "exit" else ending
    files = iteration["changed_files"]
    changed = "" if files is None else f"{counted(files, 'file')} changed"
    tokens, cost = tokens_text(iteration["tokens"]), iteration["cost_usd"]
    head = f"iteration {iteration['number']:<3} {rough_duration(seconds):<8} "
    return fit_line(head, how, changed, f"{tokens} tokens" if tokens else "", "" if cost is None else cost_text(cost))


def _is_over(daemon: Daemon, key: str) -> bool:
    """Whether nothing more happens to the task without a person."""
    task = on_task(daemon, "task", key)
    if task["state"] == "queued":
        return task["is_held"] or _parked(task) is not None
    waits_for_merge = any(wait["kind"] == "pull_request" for wait in task["waits"])
    return task["state"] in {"accepted", "rejected"} or (task["state"] == "completed" and not waits_for_merge)


def _parked(task: dict[str, Any]) -> dict[str, Any] | None:
    """The wait that a limit of the loop opened, not a question of its agent."""
    return next((wait for wait in task["waits"] if (wait["detail"] or {}).get("cause")), None)


def _tell_result(task: dict[str, Any]) -> int:
    key, parked = plain(task["key"]), _parked(task)
    cost = "" if task["cost_usd"] is None else f", {cost_text(task['cost_usd'])}"
    took = rough_duration(seconds_since(task["created_at"]))
    spent = f"after {counted(task['attempt'], 'iteration')}, {took}{cost}"
    if task["state"] in {"completed", "accepted"}:
        click.echo(f"Complete {spent}.   Look at it: ostler diff {key}")
        return ExitCode.OK
    if task["state"] == "rejected":
        note(f"{key} was rejected {spent}: {task['error']}")
    elif parked is not None:
        note(f"{key} stopped {spent}: {parked['reason']}")
    else:
        note(f"{key} is held back {spent}. Let it go on with: ostler task requeue {key}")
    return ExitCode.FAILED


def _stop(daemon: Daemon, key: str) -> int:
    """Its agent is ended in order; the task is held back, and nothing is lost."""
    note("stopping it")
    try:
        on_task(daemon, "hold_task", key)
    except DaemonError as error:
        note(str(error))
    else:
        note(f"{key} is held back. Let it go on with: ostler task requeue {key}")
    return ExitCode.INTERRUPTED


# --- signals of agents -------------------------------------------------------------------------------


@click.group(cls=Group)
def signal() -> None:
    """For agents: say where you stand. Works only inside an agent of this home."""


def _send(name: str, **fields: Any) -> None:
    payload = {field: value for field, value in fields.items() if value not in (None, ())}
    reply = Daemon().call("signal", name=name, payload=payload)
    who = plain(str(reply["task"] or reply["instance"]))
    click.echo(f"{who}: {plain(str(reply['signal']))} is noted; you may end.")


@signal.command()
@click.option("-m", "--message", "summary", help="What you did.")
def complete(summary: str | None) -> None:
    """The task is done."""
    _send("complete", summary=summary)


@signal.command()
@click.option("--on", "blocked_on", multiple=True, help="A task, ci, or `human: a question`; again for more.")
@click.option("-m", "--message", "summary", help="Why.")
def blocked(blocked_on: tuple[str, ...], summary: str | None) -> None:
    """Something else has to happen first."""
    _send("blocked", blocked_on=blocked_on, summary=summary)


@signal.command("pr")
@click.option("--url", "pr_url", help="Where it is, if not with Ostler.")
@click.option("-m", "--message", "summary", help="What is to be reviewed.")
def signal_pr(pr_url: str | None, summary: str | None) -> None:
    """The work is ready for review."""
    _send("pr", pr_url=pr_url, summary=summary)


# --- pull requests -----------------------------------------------------------------------------------

_number = click.argument("number", type=int, shell_complete=completers.pull_requests)


@click.group(cls=Group)
def pr() -> None:
    """Pull requests that loops opened: reviews of their branches."""


@pr.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also merged and closed ones.")
@output_option(name=False)
def list_pulls(everything: bool, form: str) -> None:
    """List pull requests, newest first."""
    pulls = Daemon().call("pull_requests", include_ended=everything)
    rest = "" if everything else "; -a lists also merged and closed ones"
    show(pulls, form, _PULL_COLUMNS, empty=f"no pull request is {'there' if everything else 'open'}{rest}")


_PULL_COLUMNS = (
    Column("NUMBER", lambda pull: f"#{pull['number']}", is_number=True),
    Column("TASK", lambda pull: str(pull["task_key"]), least=12),
    Column("STATE", lambda pull: str(pull["state"])),
    Column("CI", lambda pull: pull["ci"] or "-"),
    Column("APPROVED BY", lambda pull: ", ".join(pull["approved_by"]) or "-", least=11, leaves=1),
    Column("TITLE", lambda pull: str(pull["title"]), least=20),
)


@pr.command("show")
@_number
def show_pull(number: int) -> None:
    """Show a pull request with its comments, as JSON; its diff is `ostler diff TASK`."""
    as_json(Daemon().call("pull_request", number=number))


def _on_pull(verb: str, number: int, **fields: Any) -> str:
    """The key of its task."""
    return plain(Daemon().call(verb, number=number, **fields)["task_key"])


@pr.command()
@_number
@click.option("-m", "--message", required=True, help="What is to be done better; a fresh agent reads it.")
def comment(number: int, message: str) -> None:
    """Comment on a pull request; its task goes back to a fresh agent."""
    key = _on_pull("comment", number, comment=message)
    click.echo(f"#{number} has your comment; {key} goes back to a fresh agent.")


@pr.command()
@_number
def approve(number: int) -> None:
    """Approve a pull request."""
    _on_pull("approve", number)
    click.echo(f"#{number} is approved.   Merge it: ostler pr merge {number}")


@pr.command()
@_number
def merge(number: int) -> None:
    """Merge a pull request; its task is accepted."""
    click.echo(f"#{number} is merged; {_on_pull('merge', number)} is accepted.")


@pr.command()
@_number
@click.option("-m", "--message", help="Why.")
def close(number: int, message: str | None) -> None:
    """Close a pull request without a merge."""
    key = _on_pull("close", number, reason=message)
    click.echo(f"#{number} is closed; see {key}: ostler task show {key}")


@pr.command()
@click.argument("commit")
@click.argument("result", type=click.Choice(["passed", "failed"]))
@click.option("-m", "--message", default="", help="Its output; a fresh agent reads it.")
def ci(commit: str, result: str, message: str) -> None:
    """Tell what a CI elsewhere said of a commit; what waits for it goes on."""
    reply = Daemon().call("report_ci", commit=commit, passed=result == "passed", output=message)
    click.echo(f"{plain(reply['commit'])} {result}.")
