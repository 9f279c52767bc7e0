"""The log of the daemon rotates, and no message floods it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ostler.daemon import log
from ostler.daemon.log import FloodFilter

PROGRAM = """
import logging, sys
from pathlib import Path
from ostler.daemon import log
log.MAX_BYTES, log.MAX_REPEATS = 2000, 10**6
log.configure_log(Path(sys.argv[1]))
for number in range(200):
    logging.info("line %d", number)
print("at the end", file=sys.stderr)
"""


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("ostler.daemon", logging.WARNING, __file__, 1, message, arguments, None)


def test_the_log_of_a_daemon_in_the_background_rotates(tmp_path: Path) -> None:
    with (tmp_path / "daemon.log").open("ab") as output:
        subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=output, stderr=output, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(path.stat().st_size <= 2100 for path in tmp_path.iterdir())
    newest = (tmp_path / "daemon.log").read_text()
    assert "line 199" in newest
    assert newest.endswith("at the end\n"), "what Python itself writes goes to the newest file too"


def test_a_message_that_comes_too_often_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ostler.daemon.log.time.monotonic", lambda: now)
    flood = FloodFilter()
    passed = [record("refused a connection of user %d", user) for user in range(100)]
    passed = [message for message in passed if flood.filter(message)]
    assert len(passed) == log.MAX_REPEATS
    assert "more like this are left out" in passed[-1].getMessage()
    assert flood.filter(record("another message")), "others are written all the same"
    now = log.WINDOW_SECONDS
    later = record("refused a connection of user %d", 7)
    assert flood.filter(later)
    assert later.getMessage() == "refused a connection of user 7 (and 80 more like this before)"
