"""The console script: which commands there are, and how an error leaves the program."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import click

from ostler.cli.complaints import complain, wants_traceback
from ostler.cli.exits import Exit, exit_for
from ostler.cli.lazy import Entry, LazyGroup
from ostler.cli.output import note
from ostler.cli.streams import finish, forget_output, prepare
from ostler.errors import OstlerError
from ostler.version import __version__

_COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "ps": Entry(module="ostler.cli.agents", attribute="ps", summary="List agents, newest first."),
        "stats": Entry(module="ostler.cli.agents", attribute="stats", summary="Totals of a workspace."),
        "events": Entry(module="ostler.cli.events", attribute="events", summary="Show the numbered log."),
        "audit": Entry(module="ostler.cli.audit", attribute="audit", summary="Verify the chain of who did what."),
        "sim": Entry(module="ostler.cli.sim", attribute="sim", summary="Populations that live in turns."),
        "version": Entry(module="ostler.cli.about", attribute="version", summary="Say which Ostler this is."),
        "help": Entry(module="ostler.cli.about", attribute="help_command", summary="Say what a command does."),
    }
)

root = LazyGroup(
    _COMMANDS,
    name="ostler",
    help="Ostler keeps AI agents alive. Every command reads the home that --home or OSTLER_HOME names, else ~/.ostler.",
    epilog=(
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not in that state, 4 no such thing, 5 not allowed, "
        "7 conflict, 124 timed out, 130 interrupted, 143 ended by SIGTERM."
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(__version__, prog_name="ostler", message="%(prog)s %(version)s", help="Say which Ostler this is.")(
    root
)


def main() -> NoReturn:
    prepare()
    sys.exit(_run())


def _run() -> int:
    try:
        code = root.main(standalone_mode=False)
        finish()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except OstlerError as error:
        complain(error)
        return exit_for(error)
    except OSError as error:
        forget_output()
        if not isinstance(error, BrokenPipeError):  # there, whoever read us has simply gone
            note(f"the system refused: {error}")
        return Exit.FAILED
    except Exception as error:
        if wants_traceback():
            raise
        note(f"internal error: {type(error).__name__}: {error}; set OSTLER_TRACEBACK=1 to see where")
        return Exit.FAILED
    return code if isinstance(code, int) else Exit.OK
