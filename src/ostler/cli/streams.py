"""The three standard streams, as the shell has left them."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import TextIO

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def prepare() -> None:
    """Have all three, and let none of them refuse a text."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _stand_in(number, name, mode)
    for stream in (sys.stdout, sys.stderr):
        _bear_any_text(stream)


def _stand_in(number: int, name: str, mode: str) -> None:
    """One that was closed leads nowhere. Were it left so, the next file that is opened would get its number."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)  # or a program that we start would have it closed again
    setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def finish() -> None:
    """What cannot be written is found out here, where it can still be said."""
    sys.stdout.flush()


def forget_output() -> None:
    """Python would complain once more about the same stream when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bear_any_text(stream: TextIO) -> None:
    """A terminal that knows few characters gets the others as escapes, not as an error."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
