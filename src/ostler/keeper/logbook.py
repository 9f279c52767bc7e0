"""The keeper's own log: standard error, into a file that is turned over before it grows large."""

from __future__ import annotations

import contextlib
import os
import time
import traceback

_LIMIT = 1024 * 1024


class Logbook:
    def __init__(self, path: str) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        """Under descriptor 2, so that whatever fails below Python is found there too."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.dup2(file, 2)
        os.close(file)

    def note(self, text: str) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > _LIMIT:
                os.rename(self._path, f"{self._path}.1")  # noqa: PTH104 - no pathlib here
                self._open()
            os.write(2, f"{when} {text}\n".encode(errors="replace"))

    def failed(self, error: BaseException) -> None:
        self.note("".join(traceback.format_exception(error)).rstrip())
