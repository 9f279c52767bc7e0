"""Commands on loops: run one, look at its iterations; signals of agents; pull requests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ostler.cli.common import Daemon, fail, output_option
from ostler.cli.output import as_json, note, plain, seconds_since, show
from ostler.cli.tasks import on_task
from ostler.client.blocking import DaemonError
from ostler.durations import rough_duration
from ostler.errors import ExitCode

_WORDS = {
    "exit": "ended without a signal",
    "error": "failed",
    "check": "check failed",
    "limit": "usage limit",
    "stopped": "stopped",
    "hopeless": "cannot be started",
}


class _WithRun(click.Group):
    """`ostler loop PROMPT.md` is `ostler loop run PROMPT.md`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_WithRun)
def loop() -> None:
    """Drive a task through fresh starts until it is proven done.

    `ostler loop PROMPT.md --agent claude --until ALL_TESTS_PASS` needs nothing else.
    """


@loop.command()
@click.argument("prompt", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--agent", required=True, help="Who works on it.")
@click.option("--model", help="The model of its agent.")
@click.option("--until", help="What it prints when it is done, where it signals nothing.")
@click.option("--max-iterations", type=click.IntRange(1), help="Fresh starts at most.")
@click.option("--max-retries", type=click.IntRange(0), help="Starts that ended in nothing, at most; 100.")
@click.option("--retry-interval", help="Between such a start and the next; 30s.")
@click.option("--max-cost", "max_cost_usd", type=click.FloatRange(0), help="Dollars at most.")
@click.option("--max-tokens", type=click.IntRange(1), help="Tokens at most.")
@click.option("--check", "checks", multiple=True, help="A command line that must pass on the result; again for more.")
@click.option("--ci", multiple=True, help="A command line that is the CI of its pull request; again for more.")
@click.option("--after", "depends_on", multiple=True, metavar="KEY", help="Only when this task is accepted.")
@click.option("--timeout", help="How long one start may work, such as 45m.")
@click.option("-d", "--detach", is_flag=True, help="Only begin it.")
def run(prompt: Path, detach: bool, **chosen: Any) -> None:
    """Begin a loop with the prompt in a file; `-` reads it from standard input."""
    try:
        words = sys.stdin.read() if str(prompt) == "-" else prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"the prompt {prompt} cannot be read: {error}") from error
    given = {name: value for name, value in chosen.items() if value not in (None, ())}
    names = ("until", "max_iterations", "max_retries", "retry_interval", "max_cost_usd", "max_tokens", "ci")
    settings = {name: given.pop(name) for name in names if name in given}
    daemon = Daemon()
    newest = daemon.call("events", limit=1)
    body = {"task": words, "near": os.getcwd(), "loop": settings, **given}  # noqa: PTH109 - as the shell has it
    made = daemon.call("add_task", key=os.urandom(16).hex(), new_task=body)
    key = str(made["key"])
    if detach:
        click.echo(f"{plain(key)} is in its loop.   Follow it: ostler loop follow {plain(key)}")
        return
    note(f"{key} begins; Ctrl+C stops it")
    raise click.exceptions.Exit(_follow(daemon, key, newest[-1]["sequence"] if newest else 0))


@loop.command()
@click.argument("key")
def follow(key: str) -> None:
    """Follow a loop that is under way."""
    daemon = Daemon()
    newest = daemon.call("events", limit=1)
    found = on_task(daemon, "task", key)
    for wait in found["waits"]:
        click.echo(f"waits          {plain(str(wait['reason'] or wait['kind']))}")
    skipped = found["attempt"] - (found["state"] == "running")
    raise click.exceptions.Exit(_follow(daemon, str(found["key"]), newest[-1]["sequence"] if newest else 0, skipped))


@loop.command("show")
@click.argument("key")
@click.option("--prompt", type=click.IntRange(1), metavar="N", help="What start N was told, whole.")
@output_option(name=False)
def show_loop(key: str, prompt: int | None, form: str) -> None:
    """Show the fresh starts of a task, each with how it ended."""
    found = on_task(Daemon(), "iterations", key)
    if prompt is not None:
        chosen = next((one for one in found if one["number"] == prompt), None)
        if chosen is None:
            raise fail(f"{key} has no start {prompt}; `ostler loop show {key}` lists them", ExitCode.NOT_FOUND)
        click.echo(chosen["prompt"])
        return
    show(found, form, ("START", "TOOK", "ENDED BY", "FILES", "TOKENS", "COST", "SUMMARY"), _row)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    took = "" if one["ended_at"] is None else rough_duration(_seconds(one))
    files = "-" if one["changed_files"] is None else str(one["changed_files"])
    cost = "-" if one["cost_usd"] is None else f"${one['cost_usd']:.2f}"
    said = str(one["summary"] or "").splitlines()[:1]
    ended = "running" if one["ended_by"] is None else str(one["ended_by"])
    return str(one["number"]), took, ended, files, str(one["tokens"]), cost, (said[0] if said else "")[:80]


def _seconds(one: dict[str, Any]) -> float:
    return seconds_since(one["started_at"]) - seconds_since(one["ended_at"])


# --- following ---------------------------------------------------------------------------------------


class _Progress:
    """Lines of what has ended; and on a terminal one of what goes on, which is written over."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._last = 0

    def update(self, text: str) -> None:
        if self._is_live:
            click.echo(f"\r\x1b[K{text[:100]}", nl=False, err=True)

    def line(self, text: str) -> None:
        self.update("")
        click.echo(text)

    def iteration(self, number: int, text: str) -> None:
        """Each once."""
        if number > self._last:
            self._last = number
            self.line(text)


def _follow(daemon: Daemon, key: str, after: int, skipped: int = 0) -> int:
    """`skipped` iterations had ended before."""
    progress, agents = _Progress(), dict[str, bool]()
    try:
        for item in daemon.stream("events", after=str(after)) if not _is_over(daemon, key) else ():
            if item.event == "agent_progress" and _is_of(daemon, key, str(item.data["instance_id"]), agents):
                progress.update(f"at work   {plain(str(item.data.get('message') or ''))}")
            elif item.data.get("key") == key:
                _tell(item.event, item.data, progress)
                if _is_over(daemon, key):
                    break
    except KeyboardInterrupt:
        progress.update("")
        return _stop(daemon, key)
    for one in on_task(daemon, "iterations", key):  # the stream may be behind the record
        if one["ended_at"] is not None and int(one["number"]) > skipped:
            progress.iteration(one["number"], _ended(one, _seconds(one)))
    return _last_word(on_task(daemon, "task", key))


def _is_of(daemon: Daemon, key: str, instance: str, known: dict[str, bool]) -> bool:
    """Whether the instance works on this task; it is called by its key."""
    if instance not in known:
        known[instance] = str(daemon.call("instance", instance=instance)["name"] or "").startswith(f"{key}-")
    return known[instance]


def _tell(kind: str, event: dict[str, Any], progress: _Progress) -> None:
    """Print what happened to the task."""
    if kind == "task_iteration" and event["ended_by"] is not None:
        progress.iteration(event["number"], _ended(event, float(event["seconds"] or 0)))
    elif kind == "task_iteration":
        progress.update(f"iteration {event['number']}   runs")
    elif kind == "task_wait_opened" and event["kind"] != "backoff":
        progress.line(f"waits          {plain(str(event['reason'] or event['kind']))}")
    elif kind == "task_state_changed":
        progress.update("")


def _ended(one: dict[str, Any], seconds: float) -> str:
    summary = str(one["summary"] or "").splitlines()
    said = plain(summary[0]) if summary else ""
    word = _WORDS.get(str(one["ended_by"]))
    how = said if word is None else f"{word}: {said}" if said and one["ended_by"] != "exit" else word
    files = one["changed_files"]
    changed = "" if files is None else f"{files} file{'s' if files != 1 else ''} changed"
    return f"iteration {one['number']:<3} {rough_duration(seconds):<8} {how[:70]:<40}  {changed}".rstrip()


def _is_over(daemon: Daemon, key: str) -> bool:
    """Whether nothing more happens to the task without a person."""
    found = on_task(daemon, "task", key)
    if found["state"] == "queued":
        return found["is_held"] or _parked(found) is not None
    waits_for_merge = any(wait["kind"] == "pull_request" for wait in found["waits"])
    return found["state"] in {"accepted", "rejected"} or (found["state"] == "completed" and not waits_for_merge)


def _parked(found: dict[str, Any]) -> dict[str, Any] | None:
    """The wait that a limit of the loop opened, not a question of its agent."""
    return next((wait for wait in found["waits"] if (wait["detail"] or {}).get("cause")), None)


def _last_word(found: dict[str, Any]) -> int:
    key, starts = plain(found["key"]), found["attempt"]
    cost = "" if found["cost_usd"] is None else f", ${found['cost_usd']:.2f}"
    took = rough_duration(seconds_since(found["created_at"]))
    spent = f"after {starts} iteration{'s' if starts != 1 else ''}, {took}{cost}"
    parked = _parked(found)
    if found["state"] in {"completed", "accepted"}:
        click.echo(f"Complete {spent}.   Look at it: ostler diff {key}")
        return ExitCode.OK
    if found["state"] == "rejected":
        note(f"{key} was rejected {spent}: {found['error']}")
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


@click.group()
def signal() -> None:
    """For agents: say where you stand. Works only inside an agent of this home."""


def _say(name: str, **payload: Any) -> None:
    given = {key: value for key, value in payload.items() if value not in (None, ())}
    found = Daemon().call("signal", name=name, payload=given)
    click.echo(
        f"{plain(str(found['task'] or found['instance']))}: {plain(str(found['signal']))} is noted; you may end."
    )


@signal.command()
@click.option("-m", "--message", "summary", help="What you did.")
def complete(summary: str | None) -> None:
    """The task is done."""
    _say("complete", summary=summary)


@signal.command()
@click.option("--on", "blocked_on", multiple=True, help="A task, ci, or `human: a question`; again for more.")
@click.option("-m", "--message", "summary", help="Why.")
def blocked(blocked_on: tuple[str, ...], summary: str | None) -> None:
    """Something else has to happen first."""
    _say("blocked", blocked_on=blocked_on, summary=summary)


@signal.command("pr")
@click.option("--url", "pr_url", help="Where it is, if not with Ostler.")
@click.option("-m", "--message", "summary", help="What is to be reviewed.")
def signal_pr(pr_url: str | None, summary: str | None) -> None:
    """The work is ready for review."""
    _say("pr", pr_url=pr_url, summary=summary)


# --- pull requests -----------------------------------------------------------------------------------


@click.group()
def pr() -> None:
    """Pull requests that loops opened: reviews of their branches."""


@pr.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also merged and closed ones.")
@output_option(name=False)
def list_pulls(everything: bool, form: str) -> None:
    """List pull requests, newest first."""
    found = Daemon().call("pull_requests", include_ended=everything)
    show(found, form, ("NUMBER", "TASK", "STATE", "CI", "APPROVED BY", "TITLE"), _pull_row)


def _pull_row(one: dict[str, Any]) -> tuple[str, ...]:
    who = ", ".join(one["approved_by"]) or "-"
    return f"#{one['number']}", one["task_key"], one["state"], one["ci"] or "-", who, one["title"]


@pr.command("show")
@click.argument("number", type=int)
def show_pull(number: int) -> None:
    """Show a pull request with its comments, as JSON; its diff is `ostler diff TASK`."""
    as_json(Daemon().call("pull_request", number=number))


@pr.command()
@click.argument("number", type=int)
@click.option("-m", "--message", required=True, help="What is to be done better; a fresh agent reads it.")
def comment(number: int, message: str) -> None:
    """Comment on a pull request; its task goes back to a fresh agent."""
    found = Daemon().call("comment", number=number, comment=message)
    click.echo(f"#{number} has your comment; {plain(found['task_key'])} goes back to a fresh agent.")


@pr.command()
@click.argument("number", type=int)
def approve(number: int) -> None:
    """Approve a pull request."""
    Daemon().call("approve", number=number)
    click.echo(f"#{number} is approved.   Merge it: ostler pr merge {number}")


@pr.command()
@click.argument("number", type=int)
def merge(number: int) -> None:
    """Merge a pull request; its task is accepted."""
    found = Daemon().call("merge", number=number)
    click.echo(f"#{number} is merged; {plain(found['task_key'])} is accepted.")


@pr.command()
@click.argument("number", type=int)
@click.option("-m", "--message", help="Why.")
def close(number: int, message: str | None) -> None:
    """Close a pull request without a merge."""
    found = Daemon().call("close", number=number, reason=message)
    click.echo(f"#{number} is closed; see {plain(found['task_key'])}: ostler task show {plain(found['task_key'])}")


@pr.command()
@click.argument("commit")
@click.argument("result", type=click.Choice(["passed", "failed"]))
@click.option("-m", "--message", default="", help="Its output; a fresh agent reads it.")
def ci(commit: str, result: str, message: str) -> None:
    """Tell what a CI elsewhere said of a commit; what waits for it goes on."""
    found = Daemon().call("report_ci", commit=commit, passed=result == "passed", output=message)
    click.echo(f"{plain(found['commit'])} {result}.")
