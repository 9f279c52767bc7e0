"""`ostler version`."""

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
