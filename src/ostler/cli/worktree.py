"""Commands in the worktree of a task: a shell, an editor, the session of its coding agent."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, fail, handed_in, on_task
from ostler.cli.output import first_line, note, plain, sentence, short_path
from ostler.client.blocking import DaemonError
from ostler.errors import ExitCode
from ostler.home import TOKEN_VARIABLE
from ostler.keeper.rlimit_tag import RLIMIT_LOCKS

_key = click.argument("key", shell_complete=completers.tasks())
_SHELL = "/bin/sh"
#: Below the bounds that carry tags (`keeper.rlimit_tag`): who has it is an agent to the daemon, but none of its own.
_AGENT_BOUND = (1 << 62) - 1
#: As a shell has it for a program that is not there.
_NOT_FOUND = 127
#: Likewise for one that a signal ended, with the number of the signal added.
_SIGNALLED = 128


@click.command()
@_key
def shell(key: str) -> None:
    """Open your $SHELL in the worktree of a task, with the OSTLER_PORT and OSTLER_SLUG that its agent has.

    What you change there in a completed task is checked when you leave, and waits for your review with the rest.
    """
    task = on_task(Daemon(), "task", key)
    path = _require_worktree(task)
    program = os.environ.get("SHELL") or _SHELL
    _warn_of_agent(task)
    note(f"{program} in {short_path(path)}; leave it with exit")
    code = _run_here([program], path, os.environ | _variables(task))
    _hand_in(task["key"])
    raise click.exceptions.Exit(code)


@click.command()
@_key
def edit(key: str) -> None:
    """Open the worktree of a task in $VISUAL or $EDITOR.

    What you have changed in a completed task when the editor returns is checked, and waits for your review with the
    rest; `ostler task hand-in` takes in what you change later.
    """
    words = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if not words:
        raise fail("neither $VISUAL nor $EDITOR is set; set one, such as EDITOR=vim", ExitCode.USAGE)
    task = on_task(Daemon(), "task", key)
    path = _require_worktree(task)
    _warn_of_agent(task)
    code = _run_here([*words, path], path, os.environ | _variables(task))
    if _hand_in(task["key"]):
        note(f"what you change later is taken in by: ostler task hand-in {task['key']}")
    raise click.exceptions.Exit(code)


@click.command("resume-session")
@_key
@click.option("--to-agent", is_flag=True, help="Give it back to its agent, also where you have changed something.")
def resume_session(key: str, to_agent: bool) -> None:
    """Go on in the session of a coding agent yourself: `claude --resume` and the like, in the worktree of the task.

    Its agent is ended, and nothing works on the task until you leave. Then what has changed is checked and waits for
    your review; where nothing has, the task goes back to the queue. What the program in the session starts is not
    you: it may not accept, answer or change tasks.
    """
    daemon = Daemon()
    session = on_task(daemon, "take_over", key)
    name = plain(session["task"]["key"])
    note(f"{name} is taken over by hand; it is given back when you leave the session")
    code = _run_session(session)
    if code == _NOT_FOUND:
        note(f"{session['argv'][0]} is not installed here, or not on your PATH")
    task = daemon.call("give_back", task=session["task"]["key"], to_agent=to_agent or code == _NOT_FOUND)
    _tell_outcome(task)
    if code == _NOT_FOUND:
        raise click.exceptions.Exit(ExitCode.FAILED)


def _require_worktree(task: dict[str, Any]) -> str:
    name, path = plain(task["key"]), str((task["workdir"] or {}).get("path") or "")
    if path and Path(path).is_dir():
        return path
    if task["vault"]:
        text = f"the worktree of {name} is in the vault; bring it back with: ostler unretire {name}"
    elif path:
        text = f"the worktree of {name} is gone: there is no {short_path(path)}"
    else:
        text = f"{name} has no worktree yet; it is {task['state']} (ostler why {name})"
    raise fail(text, ExitCode.WRONG_STATE)


def _variables(task: dict[str, Any]) -> dict[str, str]:
    port = {} if task["port"] is None else {"OSTLER_PORT": str(task["port"])}
    return {"OSTLER_TASK": task["key"], "OSTLER_SLUG": task["slug"], **port}


def _warn_of_agent(task: dict[str, Any]) -> None:
    if task["state"] == "running":
        note(f"the agent of {plain(task['key'])} works here too; hold it back with: ostler task hold {task['key']}")


def _run_here(words: list[str], path: str, environment: dict[str, str]) -> int:
    """The exit code of the person's own program; as a shell has it where a signal ended it."""
    try:
        code = _run(words, path, environment)
    except OSError as error:
        raise fail(f"{words[0]} cannot be started: {error.strerror}", ExitCode.FAILED) from error
    return code if code >= 0 else _SIGNALLED - code


def _hand_in(key: str) -> bool:
    """Take in what was changed by hand in a completed task. Whether it was completed and nothing was changed."""
    daemon = Daemon()  # a new one: hours may have passed
    try:
        before = daemon.call("task", task=key)
        if before["state"] != "completed":
            return False
        line = handed_in(before, daemon.call("hand_in", task=key))
    except DaemonError as error:  # the exit code is that of the program
        note(f"{plain(key)} is not handed in: {error}")
        return False
    if line is not None:
        click.echo(line, err=True)
    return line is None


def _run_session(session: dict[str, Any]) -> int:
    """Until it is left. Its exit code says nothing about the work."""
    words = session["argv"]
    if shutil.which(words[0]) is None:
        return _NOT_FOUND
    environment = os.environ | session["environment"]
    environment.pop(TOKEN_VARIABLE, None)
    return _run(words, session["path"], environment, _become_agent)


def _run(words: list[str], path: str, environment: dict[str, str], in_child: Callable[[], None] | None = None) -> int:
    """Until it is left, also by a terminal that closes."""
    # Handlers, not "ignored", which the program would inherit.
    signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        # There is one thread, so what runs in the child before the program is safe.
        done = subprocess.run(words, cwd=path, env=environment | {"PWD": path}, preexec_fn=in_child, check=False)  # noqa: S603 - it is the person's
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return done.returncode


def _become_agent() -> None:
    """What a coding agent starts must not speak to the daemon as the person in whose terminal it runs."""
    _, most = resource.getrlimit(RLIMIT_LOCKS)
    if most == resource.RLIM_INFINITY or most > _AGENT_BOUND:
        resource.setrlimit(RLIMIT_LOCKS, (_AGENT_BOUND, _AGENT_BOUND))


def _tell_outcome(task: dict[str, Any]) -> None:
    name = plain(task["key"])
    if task["state"] == "completed":
        click.echo(f"{name} is given back and waits for your review.   Look at it: ostler diff {name}")
    elif task["error"]:
        click.echo(f"{name} is given back and {task['state']}: {sentence(first_line(task['error']))}")
    else:
        click.echo(f"{name} is given back and {task['state']}; its agent goes on.")
