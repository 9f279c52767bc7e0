"""Starting the daemon of a home when a command needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostler.client.launch import DaemonStartError, start_daemon


def test_an_agent_does_not_start_the_daemon_of_its_own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keeper").mkdir()
    (tmp_path / "keeper" / "token").write_text("abc\n")
    monkeypatch.setenv("OSTLER_MARK", "abc:unit")
    with pytest.raises(DaemonStartError, match="an agent of it does not start it"):
        start_daemon(tmp_path)
    assert not (tmp_path / "daemon.log").exists()
