"""The log of the daemon: it rotates, and no message floods it."""

from __future__ import annotations

import logging
import os
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ostler.home import DAEMON_LOG

MAX_BYTES = 5 * 1024 * 1024
#: Older files that are kept: `daemon.log.1` and `daemon.log.2`.
KEPT_FILES = 2
#: A message with the same template is written so often in one window; then its number is written.
MAX_REPEATS, WINDOW_SECONDS = 20, 60.0
#: Templates that are counted at once; more than these share one window.
_MAX_TEMPLATES = 500


def configure_log(home: Path) -> None:
    """Log to standard error. Where that is the log of the home, as for a daemon in the background, it rotates."""
    handler: logging.Handler = logging.StreamHandler()
    if _is_standard_error(home / DAEMON_LOG):
        handler = _DaemonLog(home / DAEMON_LOG, maxBytes=MAX_BYTES, backupCount=KEPT_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)-7s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    handler.addFilter(FloodFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn", "watchfiles"):  # they log every request and every change of a file
        logging.getLogger(name).setLevel(logging.WARNING)


def _is_standard_error(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except OSError:
        return False


class _DaemonLog(RotatingFileHandler):
    """Standard output and standard error go along: what Python itself writes there is part of the log."""

    def doRollover(self) -> None:  # noqa: N802 - the name of the base
        super().doRollover()
        newest = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        for descriptor in (1, 2):
            os.dup2(newest, descriptor)
        os.close(newest)


class FloodFilter(logging.Filter):
    """Drops a message that came too often in the present window, and says at the next window how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)), time.monotonic()
        if key not in self._windows and len(self._windows) >= _MAX_TEMPLATES:
            key = ("", "")
        window = self._windows.setdefault(key, _Window(now))
        dropped = 0
        if now - window.began_at >= WINDOW_SECONDS:
            dropped = max(0, window.count - MAX_REPEATS)
            window = self._windows[key] = _Window(now)
        window.count += 1
        if dropped:
            record.msg = f"{record.getMessage()} (and {dropped} more like this before)"
            record.args = ()
        elif window.count == MAX_REPEATS:
            record.msg = f"{record.getMessage()} (more like this are left out for {WINDOW_SECONDS:g} s)"
            record.args = ()
        return window.count <= MAX_REPEATS


class _Window:
    """One template in one span of time."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.count = 0
