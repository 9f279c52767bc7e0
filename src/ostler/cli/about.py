"""`ostler version` and `ostler help`."""

from __future__ import annotations

import platform
import sys

import click

from ostler.cli.output import as_json
from ostler.version import __version__


@click.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
def version(output: str) -> None:
    """Say which Ostler this is."""
    python = platform.python_version()
    if output == "json":
        as_json({"ostler": __version__, "python": python, "platform": sys.platform})
    else:
        click.echo(f"ostler {__version__} (Python {python})")


@click.command(name="help")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Say what a command does: `ostler help sim run` is `ostler sim run --help`."""
    at = ctx.find_root()
    for word in words:
        if not isinstance(at.command, click.Group):
            raise click.UsageError(f"{at.command_path} has no commands of its own", at)
        name, command, _ = at.command.resolve_command(at, [word])
        if command is not None:
            at = click.Context(command, at, name, **command.context_settings)
    click.echo(at.get_help())
