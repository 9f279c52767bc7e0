"""`ostler run` and `ostler logs`: start an agent or a command and show what it says."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, fail, list_instances, on_agent, present_directory, since_moment
from ostler.cli.output import as_json, has_colour, local_time, note, plain, written_by_agent
from ostler.client.blocking import DaemonError, UnreachableError
from ostler.durations import size_text
from ostler.errors import ExitCode, exit_code_of
from ostler.home import SETTINGS_FILE

#: What a command sees of the shell that starts it, beside what -e names.
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
_COULD_NOT_START = 125
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
_STOPPED = 143
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"  # as in `agents.command`, which is slow to import
_LONGEST = "7d"
_LOOK_SECONDS = 0.2
_IS_COMMAND = "ostler.is_command"
#: The request that `run` gives to an agent; as in `lifecycle.job`, which is slow to import.
_JOB = "job"
_POLICIES = completers.values("no", "immediate", "on-failure", "linear", "exponential")
_DIRECTORY = click.Path(exists=True, file_okay=False, resolve_path=True)


class _RunCommand(click.Command):
    """Keeps what Click takes away: a `--` right before the words says that they are a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("words") or ()
        ctx.meta[_IS_COMMAND] = len(before) > len(words) and before[len(before) - len(words) - 1] == "--"
        return rest


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@click.option("-d", "--detach", is_flag=True, help="Do not wait; print the name.")
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on to the command.")
@click.option(
    "-t", "--tty", "has_terminal", is_flag=True, help="Give the command a terminal; with -i you type into it."
)
@click.option("--detach-keys", help="With -it: keys that detach, such as ctrl-p,ctrl-q; else ctrl-q.")
@click.option("--rm", "remove", is_flag=True, help="Remove the record when it has ended.")
@click.option("--name", help="Its name; else one is made.")
@click.option("--memory", help="At most so much, such as 512M.")
@click.option("--cpus", type=click.FloatRange(0, min_open=True), help="At most so many cores, such as 1.5.")
@click.option("--timeout", help="At most so long, such as 2h; then it is ended, with exit code 124.")
@click.option("--restart", help="no, immediate, on-failure[:N], linear, exponential.", shell_complete=_POLICIES)
@click.option("--isolation", type=click.Choice(["none", "thread", "process"]), help="Where it runs.")
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="A variable for it; again for more.")
@click.option("--tag", "tags", multiple=True, help="A tag; again for more.", shell_complete=completers.tags)
@click.option("-w", "--workdir", type=_DIRECTORY, help="The directory it works in.")
@click.option("--model", help="The model that a coding agent uses.")
@click.option("--raw", is_flag=True, help="The output of a coding agent as it is, not as text.")
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    required=True,
    metavar="-- CMD... | NAME [PROMPT]",
    shell_complete=completers.words_to_run,
)
def run(words: tuple[str, ...], detach: bool, remove: bool, **chosen: Any) -> None:
    """Run a command (`ostler run -- CMD…`) or an agent by its name (`ostler run NAME "prompt"`).

    An agent that has done what the prompt says ends. A Python agent without a prompt waits to be asked. A coding agent
    (claude, codex, pi) works unattended in the present directory, or in --workdir.

    In the foreground its output is shown, Ctrl+C is passed on, and the exit code is its own: 128+N for a signal, 124
    when --timeout ended it, 125 when it could not be started, 126 and 127 when the program may not be run or is not
    there. A Python agent's answer is printed last.

    -i passes standard input on to a command. -it gives it a terminal: ctrl-q detaches, the command goes on, and `ostler
    attach` comes back to it.
    """
    daemon, is_command = Daemon(makes_home=True), click.get_current_context().meta[_IS_COMMAND]
    _require_terminal(chosen, detach=detach, is_command=is_command)
    try:
        _require_free(daemon, chosen["name"])
        body = _body(daemon, words, chosen, is_command=is_command)
        if not detach and "job" in body:
            body["job"]["attended"] = True  # how it ends is seen here: it need not be in the inbox
        instance = daemon.call("spawn", spawn=body, key=os.urandom(16).hex())
    except UnreachableError:
        raise
    except DaemonError as error:
        for sentence in error.faults or (str(error),):
            note(sentence)
        if error.code == "not_found" and not is_command:
            _tell_how_programs_run(words)
        code: int = exit_code_of(error.code)
        failed = code in {ExitCode.FAILED, ExitCode.TIMED_OUT}
        raise click.exceptions.Exit(_COULD_NOT_START if failed else code) from error
    has_warned = chosen["interactive"] or _warn_of_input()
    if detach:
        click.echo(plain(instance["name"]))
        return
    code = _show(daemon, instance, chosen, exact=(is_command or chosen["raw"]) and not sys.stdout.isatty())
    if not has_warned:
        _warn_of_input()
    if code == ExitCode.OK and {"definition", "job"} <= body.keys() and _is_python(daemon, words[0]):
        _print_answer_of(daemon, instance["instance_id"])
    if remove:
        daemon.call("remove", instance=instance["instance_id"])
    _leave(code)


def _require_terminal(chosen: dict[str, Any], *, detach: bool, is_command: bool) -> None:
    """Before anything is started: what -i, -t and --detach-keys need."""
    if (chosen["interactive"] or chosen["has_terminal"]) and not is_command:
        raise click.UsageError("-i and -t are for commands: ostler run -it -- CMD")
    if chosen["interactive"] and detach and not chosen["has_terminal"]:
        raise click.UsageError(
            "-i passes standard input on while you wait; with -d there is no terminal to read: leave one of them out"
        )
    if chosen["has_terminal"] and not detach:
        from ostler.cli.attach import DETACH_KEYS, DetachKeys, require_terminal  # noqa: PLC0415 - seldom needed

        require_terminal()
        DetachKeys(chosen["detach_keys"] or DETACH_KEYS)


def _show(daemon: Daemon, instance: dict[str, Any], chosen: dict[str, Any], *, exact: bool) -> int:
    """Its terminal or its output until it has ended; then its exit code."""
    if chosen["has_terminal"]:
        return _attach(daemon, instance, chosen)
    if chosen["interactive"]:
        from ostler.cli.attach import pump_standard_input  # noqa: PLC0415 - most commands read nothing

        pump_standard_input(daemon, instance["instance_id"])
    return _follow(daemon, instance, raw=chosen["raw"], exact=exact)


def _attach(daemon: Daemon, instance: dict[str, Any], chosen: dict[str, Any]) -> int:
    """In its terminal until it has ended, and then its exit code; 0 when the person detaches."""
    from ostler.cli.attach import DETACH_KEYS, Attachment, tell_detached  # noqa: PLC0415 - seldom needed

    keys = chosen["detach_keys"] or DETACH_KEYS
    try:
        if not Attachment(daemon, instance, keys, types=chosen["interactive"]).run(redraw=False):
            tell_detached(instance["name"])
            _leave(ExitCode.OK)
        return _exit_code(daemon.call("instance", instance=instance["instance_id"]))
    except UnreachableError as error:
        raise _without_daemon(error, instance) from error


def _leave(code: int) -> NoReturn:
    """At once: to take its modules apart would cost the interpreter a tenth of the whole run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _body(daemon: Daemon, words: tuple[str, ...], chosen: dict[str, Any], *, is_command: bool) -> dict[str, Any]:
    limits = {
        "max_memory_mb": chosen["memory"],
        "max_cpu_percent": None if chosen["cpus"] is None else max(round(100 * chosen["cpus"]), 1),
        "execution_timeout": chosen["timeout"] or (_LONGEST if is_command else None),
        "max_concurrent_tasks": 1 if is_command else None,
    }
    values = {
        "name": chosen["name"],
        "restart_policy": chosen["restart"],
        "isolation_level": chosen["isolation"],
        "tags": list(chosen["tags"]) or None,
        "resource_limits": {name: value for name, value in limits.items() if value is not None},
        "env": _environment(chosen["env"], passes_on=is_command),
        "workdir": chosen["workdir"],
        "stdin": (chosen["interactive"] and not chosen["has_terminal"]) or None,
        "terminal": _window() if chosen["has_terminal"] else None,
    }
    options = {name: value for name, value in values.items() if value is not None}
    cwd = chosen["workdir"] or present_directory()
    if is_command:
        if chosen["model"] is not None:
            raise click.UsageError("--model is for coding agents; write it among the words of the command")
        _require_program(words[0], cwd, values["env"].get("PATH", _DEFAULT_PATH))
        return {"command": list(words), "cwd": cwd, "options": options, "job": {"request": ""}}
    if len(words) == 1 and _is_python(daemon, words[0]):
        return {"definition": words[0], "options": options}  # it waits to be asked
    request = {"prompt": " ".join(words[1:]), **({} if chosen["model"] is None else {"model": chosen["model"]})}
    return {"definition": words[0], "cwd": cwd, "options": options, "job": {"request": request}}


def _window() -> dict[str, int]:
    from ostler.cli.attach import window  # noqa: PLC0415 - seldom needed

    return window()


def _require_program(program: str, cwd: str | None, path: str) -> None:
    """Refuse before anything is started what no restart would help."""
    place = os.path.join(cwd or "", program)  # noqa: PTH118 - pathlib would be one more import
    if "/" not in program:
        if program and not any(_is_program(f"{folder or '.'}/{program}") for folder in path.split(os.pathsep)):
            raise click.exceptions.Exit(_refuse(f"there is no program {program} on PATH", _NOT_FOUND))
    elif not os.path.exists(place):  # noqa: PTH110 - likewise
        raise click.exceptions.Exit(_refuse(f"there is no program {program} in {cwd or 'this directory'}", _NOT_FOUND))
    elif not _is_program(place):
        raise click.exceptions.Exit(_refuse(f"{program} cannot be run: it is not executable", _NOT_EXECUTABLE))


def _is_program(place: str) -> bool:
    """As `shutil.which`, whose module takes long to import."""
    return os.access(place, os.X_OK) and not os.path.isdir(place)  # noqa: PTH112 - likewise


def _refuse(sentence: str, code: int) -> int:
    note(sentence)
    return code


def _tell_how_programs_run(words: tuple[str, ...]) -> None:
    import shlex  # noqa: PLC0415 - only a mistake needs it
    import shutil  # noqa: PLC0415 - likewise

    if shutil.which(words[0]):
        note(f"{words[0]} is a program; run it with: ostler run -- {shlex.join(words)}")


def _is_python(daemon: Daemon, name: str) -> bool:
    return bool(daemon.call("definition", name=name)["kind"] == "python")


def _require_free(daemon: Daemon, name: str | None) -> None:
    """The library lets names repeat; in a shell a name is how one agent is found."""
    if name is None:
        return
    agents = list_instances(daemon, name_pattern=name, include_restarting=True)
    if any(agent["name"] == name for agent in agents):
        raise DaemonError("conflict", f"an agent named {name} lives already; stop it, or choose another name")


def _environment(variables: tuple[str, ...], *, passes_on: bool) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _PASSED_ON if passes_on and name in os.environ}
    for variable in variables:
        name, has_value, value = variable.partition("=")
        if not has_value and name not in os.environ:
            raise click.UsageError(f"-e {name}: this shell has no such variable; write -e {name}=VALUE")
        environment[name] = value if has_value else os.environ[name]
    return environment


def _warn_of_input() -> bool:
    """Whether data waits in a pipe on standard input, which no agent reads; then a line says so."""
    import fcntl  # noqa: PLC0415 - only here
    import termios  # noqa: PLC0415 - likewise

    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return False
        count = int.from_bytes(fcntl.ioctl(0, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return False
    if count:
        note("standard input is not passed on to agents; give it as an argument or in a file")
    return count > 0


def _follow(daemon: Daemon, instance: dict[str, Any], *, raw: bool, exact: bool) -> int:
    """Its output until it has ended, with `exact` byte for byte and each stream to ours; then its exit code."""
    key, interrupts = instance["instance_id"], 0

    def on_interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 2:
            raise KeyboardInterrupt
        first = interrupts == 1
        note("stopping it; press Ctrl+C again to end it at once" if first else "ending it at once")
        options = {"graceful_timeout": 10 if first else 0, "reason": "interrupted"}
        daemon.call_in_thread("terminate", instance=key, options=options)

    before = signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, on_interrupt)
    try:
        for item in daemon.stream("logs", instance=key, raw=raw, exact=exact):
            if exact:
                click.echo(item.data["text"].encode("latin-1"), nl=False, err=item.data.get("stream") == "stderr")
                continue
            # What a coding agent says may have several lines.
            text = "\n".join(map(written_by_agent, item.data["text"].split("\n")))
            click.echo(text, color=True)
        ended = daemon.call("instance", instance=key)
        _tell_dropped(ended)
    except UnreachableError as error:
        raise _without_daemon(error, instance) from error
    except BrokenPipeError:
        # As in a shell, where `yes | head` ends both.
        daemon.call("terminate", instance=key, options={"graceful_timeout": 10, "reason": "its output was closed"})
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return ExitCode.INTERRUPTED if interrupts else _exit_code(ended)


def _without_daemon(error: UnreachableError, instance: dict[str, Any]) -> DaemonError:
    """A process does not end with the daemon; its end is not seen here any more."""
    if instance["spawn_options"]["isolation_level"] != "process":
        return error
    name = plain(instance["name"])
    rest = f"{name} goes on without it: `ostler logs -f {name}` follows it, `ostler inspect {name}` shows how it ended"
    return DaemonError(error.code, f"{error}; {rest}")


def _tell_dropped(instance: dict[str, Any]) -> None:
    if instance.get("dropped_bytes"):
        size = size_text(instance["dropped_bytes"])
        note(f"{size} of its output were dropped: it came faster than `output-rate` below [daemon] of {SETTINGS_FILE}")


def _exit_code(instance: dict[str, Any]) -> int:
    last = (instance.get("attempts") or [{}])[-1]
    if last.get("outcome") == "oom":
        note(str(last.get("detail") or "it used more memory than its limit (oom)"))
    if last.get("exit_signal") is not None:
        return 128 + int(last["exit_signal"])
    if last.get("exit_code") is not None:
        return int(last["exit_code"])
    if last.get("outcome") == "stopped":
        name = plain(instance["name"])
        note(f"{name} was stopped before it had ended by itself; see: ostler why {name}")
        return _STOPPED
    if last.get("outcome") == "timeout":
        note(str(last.get("detail") or "it ran longer than its time"))
        return ExitCode.TIMED_OUT
    if instance["state"] == "failed":
        note(str(instance.get("error_message") or "it failed"))
        return ExitCode.FAILED
    return ExitCode.OK


def _print_answer_of(daemon: Daemon, instance_id: str) -> None:
    try:
        answer = daemon.call("request", instance=instance_id, request_id=_JOB)["answer"]
    except DaemonError as error:
        note(f"its answer cannot be read: {error}")
        return
    if answer is not None:
        from ostler.cli.agents import print_answer  # noqa: PLC0415 - a command has no answer

        print_answer(answer)


# --- logs --------------------------------------------------------------------------------------------


@click.command()
@click.argument("agent", metavar="AGENT|TASK", shell_complete=completers.agents_and_tasks)
@click.option("-f", "--follow", is_flag=True, help="Go on until the agent has ended.")
@click.option("-n", "count", type=click.IntRange(0), help="Only the last so many lines.")
@click.option("--since", help="Only newer than this: 10m ago, or a time such as 2026-11-17T02:00.")
@click.option("--attempt", type=int, help="Only of this start.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only what it wrote to standard output.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only what it wrote to standard error.")
@click.option("-t/-T", "--times/--no-times", default=True, help="With the time of each line.")
@click.option("--raw", is_flag=True, help="The output of a coding agent as it is, not as text.")
@click.option("-o", "--output", "form", type=click.Choice(["text", "jsonl"]), default="text", help="How to print it.")
def logs(agent: str, follow: bool, count: int | None, since: str | None, form: str, **chosen: Any) -> None:
    """Show what an agent wrote, or the agent that works on a task."""
    daemon = Daemon()
    start = None if since is None else since_moment(since)
    window = {"tail": count, "since": start, **{name: chosen[name] for name in ("attempt", "stream", "raw")}}

    def follow_log(instance: str) -> None:
        for item in daemon.stream("logs", instance=instance, **window):
            _print_line(item.data, form, times=chosen["times"])

    worker = _working_on(daemon, agent, follow_setup=follow_log if follow else None)
    if worker is not None and not _is_agent(daemon, worker):
        raise fail(f"the output of the agent that worked on {agent} was removed with its record", ExitCode.NOT_FOUND)
    name, agent = agent, worker or agent
    if not follow:
        lines = on_agent(daemon, "logs", agent, **window)
        for line in lines:
            _print_line(line, form, times=chosen["times"])
        if not lines and form == "text" and all(value in {None, False} for value in window.values()):
            note(f"{name} has written nothing")
    else:
        follow_log(on_agent(daemon, "instance", agent)["instance_id"])
    _tell_dropped(on_agent(daemon, "instance", agent))


def _working_on(daemon: Daemon, name: str, *, follow_setup: Callable[[str], None] | None) -> str | None:
    """The instance that works on a task, or did last; None where the name is no key of a task.

    With `follow_setup` it is waited for, and the setup of its workdir is followed before.
    """
    if not re.fullmatch(r"[Tt]\d{3,}", name) and _is_agent(daemon, name):
        return None
    has_noted, setups = False, set[str]()
    while True:
        try:
            task = daemon.call("task", task=name)
        except DaemonError as error:
            if error.code == "not_found":
                return None
            raise
        if task["instance_id"] is not None:
            return str(task["instance_id"])
        if follow_setup is None or task["state"] not in {"queued", "running"}:
            attempts = daemon.call("instances", task_id=task["task_id"], include_terminated=True, limit=1)
            if attempts:
                return str(attempts[0]["instance_id"])
            raise fail(f"no agent has worked on {task['key']} yet; it is {task['state']}", ExitCode.WRONG_STATE)
        if not has_noted:
            note(f"{task['key']} is {task['state']}; waiting for its agent")
            has_noted = True
        for setup in _live_setups(daemon, task) - setups:
            setups.add(setup)
            follow_setup(setup)
        time.sleep(_LOOK_SECONDS)


def _live_setups(daemon: Daemon, task: dict[str, Any]) -> set[str]:
    instances = daemon.call("instances", task_id=task["task_id"])
    return {str(instance["instance_id"]) for instance in instances if str(instance["name"]).endswith("-setup")}


def _is_agent(daemon: Daemon, name: str) -> bool:
    try:
        daemon.call("instance", instance=name)
    except DaemonError as error:
        return error.code != "not_found"
    return True


def _print_line(line: dict[str, Any], form: str, *, times: bool) -> None:
    if form == "jsonl":
        as_json(line, indent=None)
        return
    for text in map(plain, line["text"].split("\n")):  # what a coding agent says may have several lines
        click.echo(f"{_time_of(line)}  {text}" if times else text)


def _time_of(line: dict[str, Any]) -> str:
    """On a terminal in another colour where the line went to standard error."""
    time_text = f"{local_time(line['time']):<19}"
    return click.style(time_text, fg="yellow") if line.get("stream") == "stderr" and has_colour() else time_text
