"""How an error is told: a sentence, one for each fault; and the way to it for whoever asks."""

from __future__ import annotations

import os
import sys
import traceback

from ostler.cli.output import note
from ostler.errors import OstlerError, ValidationError

TRACEBACK = "OSTLER_TRACEBACK"


def complain(error: OstlerError) -> None:
    """Each fault on a line of its own. Where foreign code is the cause, its traceback is shown to who wants it."""
    if error.__cause__ is not None and wants_traceback():
        traceback.print_exception(error, file=sys.stderr)
    faults = error.faults if isinstance(error, ValidationError) else ()
    for sentence in [fault.message for fault in faults] or [str(error)]:
        note(sentence)


def wants_traceback() -> bool:
    return bool(os.environ.get(TRACEBACK))
