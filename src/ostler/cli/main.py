"""The console script: its commands, each imported when it is called, and how an error leaves the program."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

import click

from ostler.cli.output import ExitCode, complain, exit_code, note
from ostler.errors import OstlerError
from ostler.version import __version__

#: Set it to see where an unexpected error came from.
TRACEBACK = "OSTLER_TRACEBACK"
#: Command to its module and its line in the list.
_COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ps": ("ostler.cli.look", "List agents, newest first."),
        "stats": ("ostler.cli.look", "Totals of a workspace."),
        "events": ("ostler.cli.look", "Show the numbered log."),
        "audit": ("ostler.cli.look", "Verify the chain of acts."),
        "version": ("ostler.cli.look", "Say which Ostler this is."),
    }
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
        command: click.Command = getattr(import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


root = _Commands(
    name="ostler",
    help="Ostler keeps AI agents alive. The home is --home, $OSTLER_HOME, .ostler here or above, else ~/.ostler.",
    epilog=(
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not in that state, 4 no such thing, 5 not allowed, "
        "7 conflict, 124 timed out, 130 interrupted."
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(__version__, prog_name="ostler", message="%(prog)s %(version)s")(root)


def main() -> NoReturn:
    sys.exit(_run())


def _run() -> int:
    try:
        code = root.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except OstlerError as error:
        complain(error)
        return exit_code(error)
    except OSError as error:
        # The interpreter would complain again when it flushes a closed pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            note(f"the system refused: {error}")
        return ExitCode.FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        note(f"internal error: {type(error).__name__}: {error}; set {TRACEBACK}=1 to see where")
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.OK
