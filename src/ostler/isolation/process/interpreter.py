"""How the interpreter of this program was told to run code, so that the one of its agents runs theirs alike.

Read from where the interpreter says it, not from its command line: it may have been told by variables. Templates are
isolated from those, and a keeper, which outlives this program and serves others after it, is told nothing of all this.
What was asked of one process only is not handed on: to watch it, to be quiet, to stay when it has ended.
"""

from __future__ import annotations

import sys
from pathlib import Path


def shared_options() -> list[str]:
    """A part of what a template is: those of two programs that run code in different ways must not be confused."""
    flags = sys.flags
    options = ["-" + "O" * flags.optimize] if flags.optimize else []
    if flags.bytes_warning:
        options.append("-" + "b" * flags.bytes_warning)
    options += [f"-W{option}" for option in sys.warnoptions]
    for extra in _extras():
        options += ["-X", extra]
    return options


def _extras() -> list[str]:
    flags = sys.flags
    extras = []
    if flags.dev_mode:
        extras.append("dev")
    extras.append("utf8" if flags.utf8_mode else "utf8=0")  # also off: else it would go by the language again
    if flags.warn_default_encoding:
        extras.append("warn_default_encoding")
    if flags.int_max_str_digits not in {-1, sys.int_info.default_max_str_digits}:
        extras.append(f"int_max_str_digits={flags.int_max_str_digits}")
    if sys.pycache_prefix:
        extras.append(f"pycache_prefix={Path(sys.pycache_prefix).absolute()}")
    return extras
