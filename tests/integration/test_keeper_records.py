"""A full disk: ends are told, written when there is room, and ending an agent needs no space."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_client import Home, Manager, Refused, is_alive, wait_until

from ostler.keeper.exit_journal import ExitJournal


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home" / "keeper")
    yield made
    made.end()


def known_to_the_next(path: Path) -> list[str]:
    """Of a copy: the next one writes the file anew."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    journal = ExitJournal(str(copy), pytest.fail)
    journal.close()
    return sorted(journal.records)


@contextlib.contextmanager
def full_disk(keeper: int, size: int) -> Iterator[None]:
    """No file of this keeper can grow beyond so many bytes; it ignores the signal of that."""
    soft, hard = resource.prlimit(keeper, resource.RLIMIT_FSIZE)
    resource.prlimit(keeper, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(keeper, resource.RLIMIT_FSIZE, (soft, hard))


def test_an_end_that_cannot_be_written_is_told_and_written_later(home: Home) -> None:
    manager = home.manager()
    path = home.directory / "exits.jsonl"
    manager.start("first.1", ["/bin/sh", "-c", "exit 1"])
    manager.exit_of("first.1")
    with full_disk(manager.about["pid"], path.stat().st_size + 10):
        manager.start("second.1", ["/bin/sh", "-c", "exit 2"])
        assert manager.exit_of("second.1")["code"] == 2
        assert known_to_the_next(path) == ["first.1"]
    wait_until(lambda: known_to_the_next(path) == ["first.1", "second.1"])


def test_on_a_full_disk_agents_live_end_and_are_stopped(home: Home) -> None:
    manager = home.manager()
    pids = [manager.start(f"u{number}.1", ["sleep", "1000"])["pid"] for number in range(3)]
    with full_disk(manager.about["pid"], 0):
        os.kill(pids[0], signal.SIGKILL)
        assert manager.exit_of("u0.1")["signal"] == signal.SIGKILL
        manager.start("loud.1", ["/bin/sh", "-c", "echo words; exit 3"])
        record = manager.exit_of("loud.1")
        assert (record["code"], record["written"], record["dropped"]) == (3, 0, 6)
        with pytest.raises(Refused):
            manager.ask("dance")
        assert manager.stop("u1.1", 5.0) == {"graceful": True, "left": []}
        assert is_alive(pids[2])
        manager.ask("bye", leave=False)
        wait_until(lambda: not manager.listen(0.1) and not manager.is_open)
        assert not is_alive(pids[2])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k none {disk} 2>/dev/null"):  # noqa: S605 - our own path
        pytest.skip("no disk can be mounted here")
    try:
        home = Home(disk / "home" / "keeper")
        try:
            _fill_and_end(home.manager(), disk)
        finally:
            home.end()
    finally:
        wait_until(lambda: os.system(f"umount {disk}") == 0)  # noqa: S605 - our own path


def _fill_and_end(manager: Manager, disk: Path) -> None:
    pid = manager.start("a.1", ["sleep", "1000"])["pid"]
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    assert manager.stop("a.1")["left"] == []
    assert manager.exit_of("a.1")["by"] == "stop"
    assert not is_alive(pid)
    assert list(manager.statuses()) == ["a.1"]
    (disk / "filler").unlink()
    wait_until(lambda: "a.1" in (manager.directory / "exits.jsonl").read_text())
