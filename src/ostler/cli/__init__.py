"""The command line. What is imported here is all that `ostler --help` costs."""

from ostler.cli.main import main

__all__ = ["main"]
