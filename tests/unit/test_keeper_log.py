"""The log of a unit and the pipes that fill it, without a keeper."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ostler.isolation.log_files import FileLogReader
from ostler.keeper.loop import Loop
from ostler.keeper.output import STDERR, STDOUT, Log, Output, OutputReporter


@pytest.fixture
def loop() -> Loop:
    def failed(error: BaseException) -> None:
        raise error

    return Loop(failed)


def none_left(path: str, flags: int, mode: int = 0o777) -> int:
    raise OSError(errno.ENOSPC, f"No space left on device: {path} {flags} {mode}")


def test_a_log_that_cannot_be_opened_anew_closes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(str(tmp_path / "a.log"), 4096)
    log.write(b"")  # the first output makes the file
    monkeypatch.setattr("ostler.keeper.output.os.open", none_left)
    assert log.write(b"x" * 5000) == 4096
    assert log.write(b"y") == 0
    monkeypatch.undo()
    stranger = os.open(os.devnull, os.O_RDONLY)  # it has the number that the log had
    log.close()
    os.close(stranger)  # raises when it was closed already
    again = Log(str(tmp_path / "b.log"), 4096)
    again.write(b"")
    monkeypatch.setattr("ostler.keeper.output.os.open", none_left)
    again.write(b"x" * 5000)
    monkeypatch.undo()
    assert again.write(b"there is room again") == 19
    again.close()
    assert (tmp_path / "b.log").read_text() == "there is room again"


def test_the_end_of_an_output_never_raises(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    log = Log(str(tmp_path / "a.log"), 4096)
    log.write(b"")
    kept = Output(loop, [read], log)
    os.write(write, b"x" * 5000)
    os.close(write)
    monkeypatch.setattr("ostler.keeper.output.os.open", none_left)
    kept.finish()
    kept.finish()
    assert (kept.written, kept.dropped) == (4096, 904)


def test_what_a_manager_does_not_read_is_told_later_and_in_bounded_parts(tmp_path: Path, loop: Loop) -> None:
    events: list[Mapping[str, Any]] = []
    reads = False

    def tell(event: Mapping[str, Any]) -> bool:
        if reads:
            events.append(event)
        return reads

    reporter, pipes = OutputReporter(loop, tell), {}
    for number in range(300):
        read, write = os.pipe()
        os.write(write, b"line %d\n" % number)
        os.close(write)
        pipes[f"u{number}"] = Output(loop, [read], Log(str(tmp_path / f"{number}.log"), 4096))
        pipes[f"u{number}"].finish()
    for unit, output in pipes.items():
        reporter.add(unit, output)
    loop.turn()
    assert not events
    reads = True
    while sum(len(event["units"]) for event in events) < 300:
        loop.turn()
    assert max(len(event["units"]) for event in events) <= 256
    assert {unit: fields["tail"] for event in events for unit, fields in event["units"].items()} == {
        f"u{number}": f"line {number}\n" for number in range(300)
    }


def test_a_log_that_somebody_removed_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.keeper.output._LOOK_SECONDS", 0.0)
    folder = tmp_path / "logs" / "one"
    log = Log(str(folder / "1.log"), 4096)
    assert log.write(b"gone\n", STDOUT) == 5
    shutil.rmtree(tmp_path / "logs")
    assert log.write(b"here\n", STDERR) == 5
    log.close()
    (line,) = FileLogReader(folder).read(lambda line: line, last=True)
    assert (line.text, line.stream, line.cursor) == ("here", "stderr", "1-:10")


def test_a_home_that_was_removed_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.keeper.output._LOOK_SECONDS", 0.0)
    home = tmp_path / "home"
    home.mkdir()
    log, late = (Log(str(home / "logs" / name / "1.log"), 4096) for name in ("one", "late"))
    assert log.write(b"gone\n") == 5
    shutil.rmtree(home)
    assert [log.write(b"lost\n"), log.write(b"lost\n"), late.write(b"lost\n")] == [0, 0, 0]
    assert not home.exists()
