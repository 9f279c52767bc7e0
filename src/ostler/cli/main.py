"""The console script: its commands, each imported when it is called, and how an error leaves the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import click

from ostler.cli.common import ADDRESS_VARIABLE, Options, the_home
from ostler.cli.completers import COMPLETE_VARIABLE
from ostler.cli.output import note
from ostler.client.blocking import DaemonError
from ostler.errors import ExitCode, exit_code_of
from ostler.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Set it to see where an unexpected error came from.
TRACEBACK = "OSTLER_TRACEBACK"
#: Groups of commands for the list: command to its module and its line.
_GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "Agents": {
            "run": ("run", "Run an agent or a command, and show what it says."),
            "ps": ("agents", "List agents."),
            "inspect": ("agents", "Show everything about an agent."),
            "logs": ("run", "Show what an agent wrote."),
            "attach": ("attach", "See and type into the terminal of an agent."),
            "ask": ("agents", "Ask an agent something."),
            "why": ("agents", "Say why an agent is as it is."),
            "pause": ("agents", "Pause agents: freeze, hold or park them."),
            "resume": ("agents", "Let paused agents go on."),
            "stop": ("agents", "Stop agents in order."),
            "kill": ("agents", "End agents at once."),
            "restart": ("agents", "Start agents again."),
            "rm": ("agents", "Remove the records of ended agents."),
            "prune": ("agents", "Remove all ended agents; says what first."),
            "wait": ("agents", "Wait until an agent is in a state."),
        },
        "Tasks": {
            "task": ("tasks", "Add, list, show, cancel, hold, requeue or send back tasks."),
            "diff": ("tasks", "Show what a task changed."),
            "accept": ("tasks", "Merge the work of a task."),
            "reject": ("tasks", "Reject a task."),
            "undo": ("tasks", "Take an accepted task back."),
            "loop": ("loops", "Drive a task through fresh starts until it is proven done."),
            "pr": ("loops", "Pull requests of loops: list, show, comment, approve, merge, close."),
            "signal": ("loops", "For agents: say that you are complete, blocked, or want a review."),
            "shell": ("worktree", "Open a shell in the worktree of a task."),
            "edit": ("worktree", "Open the worktree of a task in your editor."),
            "resume-session": ("worktree", "Go on in the session of a coding agent yourself."),
            "retire": ("tasks", "Put the workdir of a task into the vault."),
            "unretire": ("tasks", "Bring it back from the vault."),
        },
        "Crews": {
            "crew": ("crews", "Keep agents at work on the queue: up, ps, scale, stop, reload."),
        },
        "Populations": {
            "sim": ("sim", "Play, resume, fork and look at runs of turn-based populations."),
        },
        "Looking": {
            "events": ("look", "Show the numbered log."),
            "top": ("watch", "Show agents and tasks, live, with a key for each verb."),
            "inbox": ("inbox", "List what needs you, each with its next command."),
            "report": ("inbox", "Say what happened while you were away."),
            "waits": ("look", "List what agents wait for."),
            "answer": ("look", "Answer a waiting agent."),
            "stats": ("look", "Totals."),
            "audit": ("look", "Show or verify the chain of acts."),
        },
        "Setting up": {
            "init": ("setup", "Prepare a project."),
            "schema": ("setup", "Print the JSON Schema of a file, for editors."),
            "agents": ("setup", "List, show or validate definitions."),
            "doctor": ("doctor", "Find out what this machine can do."),
            "token": ("setup", "Tokens for the TCP listener."),
            "workspace": ("setup", "Show or change the plan, the flags and the token share."),
            "enable": ("machine", "Start the daemon of this home at boot."),
            "disable": ("machine", "Start it at boot no longer."),
            "homes": ("machine", "List every home of yours on this machine."),
            "df": ("machine", "Say what the home takes on the disk."),
            "up": ("daemon", "Start the daemon."),
            "down": ("daemon", "Stop the agents and the daemon."),
            "status": ("daemon", "Say how the daemon is."),
            "restart-daemon": ("daemon", "Restart the daemon; agents go on."),
            "completion": ("setup", "Print the completion script of a shell."),
            "version": ("setup", "Say which Ostler this is."),
        },
    }
)
_COMMANDS = {name: entry for group in _GROUPS.values() for name, entry in group.items()}
_EXIT_CODES = (
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 not in that state, 4 no such thing, 5 not authorised, "
    "6 daemon unreachable, 7 conflict, 8 still pending, 124 timed out, 130 interrupted."
)


class _Commands(click.Group):
    """Imports a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"ostler.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a command: the inbox on a terminal, the help in a pipe."""
        self.invoke_without_command = sys.stdout.isatty()
        self.no_args_is_help = not self.invoke_without_command
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # noqa: PLC0415 - only a mistake needs it

            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]}?", ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only for completion

        commands = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in group.items()])


@click.group(
    cls=_Commands,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--home",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="The home; else $OSTLER_HOME, .ostler here or above, ~/.ostler.",
)
@click.option("--no-start", is_flag=True, help="Do not start the daemon where none runs.")
@click.version_option(__version__, prog_name="ostler", message="%(prog)s %(version)s")
@click.pass_context
def root(ctx: click.Context, home: str | None, no_start: bool) -> None:
    """Ostler keeps AI agents alive."""
    ctx.obj = Options(home=home, no_start=no_start)
    if ctx.invoked_subcommand is None:
        _begin(ctx)


def _begin(ctx: click.Context) -> None:
    """`ostler` alone on a terminal. Who has no home yet gets the help."""
    if not the_home().is_dir() and ADDRESS_VARIABLE not in os.environ:
        click.echo(ctx.get_help())
        return
    from ostler.cli.inbox import show_inbox  # noqa: PLC0415 - as every command

    show_inbox("table")
    note("`ostler --help` lists the commands")


def main() -> NoReturn:
    if os.environ.get(COMPLETE_VARIABLE, "").endswith("_complete"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a half typed line is no place for an error
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run())


def _run() -> int:
    try:
        code = root.main(standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        return ExitCode.USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except DaemonError as error:
        for sentence in error.faults or (str(error),):
            note(sentence)
        return exit_code_of(error.code)
    except OSError as error:
        # The interpreter would complain again when it flushes a closed pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            note(f"the system refused: {error}")
        return ExitCode.FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        return _failed(error)
    return code if isinstance(code, int) else ExitCode.OK


def _failed(error: Exception) -> int:
    """Errors of the library, where a command uses it without the daemon; anything else is a bug."""
    from ostler.errors import OstlerError, ValidationError  # noqa: PLC0415 - only a failure needs them

    if not isinstance(error, OstlerError):
        note(f"internal error: {type(error).__name__}: {error}; set {TRACEBACK}=1 to see where")
        return ExitCode.FAILED
    faults = error.faults if isinstance(error, ValidationError) else ()
    for sentence in [fault.message for fault in faults] or [str(error)]:
        note(sentence)
    return error.cli_exit
