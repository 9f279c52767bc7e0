"""A program in a real terminal: a pseudo-terminal of a certain size, keys that are typed, and what is on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 60.0


class Terminal:
    """One program with a terminal of its own. Everything that it wrote is in `output`."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        folder: Path,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self._screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = ""
        self._seen = 0
        self._process = subprocess.Popen(
            words,
            env={"TERM": "xterm", **environment},
            cwd=folder,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - the shell needs its terminal
        )
        os.close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def send(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Read until the pattern is in what was written after the last match."""
        until = time.monotonic() + SECONDS
        while True:
            match = re.compile(pattern).search(self.output, self._seen)
            if match is not None:
                self._seen = match.end()
                return match
            has_more = self._read(until - time.monotonic())
            assert has_more, f"no {pattern!r} in {self.output[self._seen :]!r}"

    def wait(self) -> int:
        """Read to the end of the program; its exit code."""
        until = time.monotonic() + SECONDS
        while self._read(until - time.monotonic()):
            pass
        return self._process.wait(SECONDS)

    def lines(self) -> list[str]:
        return self.output.replace("\r\n", "\n").splitlines()

    def _read(self, seconds: float) -> bool:
        """Whether more was written; False at the end, and when the time is over."""
        if not select.select([self._screen], [], [], max(seconds, 0))[0]:
            return False
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # the last program of the terminal has ended
            return False
        self.output += data.decode(errors="replace")
        return bool(data)
