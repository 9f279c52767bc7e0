"""Reading the files of output that the keeper writes."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostler.isolation.log_files import FileLogReader, LogRange
from ostler.keeper import output
from ostler.keeper.output import OURS, STDERR, STDOUT, Log
from ostler.model.log import LogLine

_MAX_LINE = 50
_RUNS = ("0" * 32, "f" * 32, "a" * 32)


def _as_it_is(line: LogLine) -> LogLine:
    return line


def _only_even(line: LogLine) -> LogLine | None:
    """As a driver does: some lines are left out, others are shown as another text."""
    return line.evolve(text=line.text.upper()) if len(line.text) % 2 == 0 else None


def test_a_line_that_was_cut_when_its_file_was_turned_over_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.log.1").write_bytes(b"first\nsec")
    (tmp_path / "1.log").write_bytes(b"ond\nthi")
    (tmp_path / "1.log.times").write_bytes(struct.pack(">QQ", 9, 0))
    reader = FileLogReader(tmp_path)
    assert [line.text for line in reader.read(_as_it_is, last=False)] == ["first", "sec", "ond"]
    assert [line.text for line in reader.read(_as_it_is, last=True)] == ["thi"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The output of several attempts and runs as the keeper writes it: turned over, with long lines and cut ends."""
    chance = random.Random(request.param)
    monkeypatch.setattr(output, "_TIME_STEP", 0.0)
    now = [1_700_000_000.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(time=lambda: now[0]))
    for attempt in range(1, 4):
        for run in chance.sample(("", *_RUNS), chance.randint(1, 3)):
            log = Log(str(tmp_path / (f"{attempt}-{run}.log" if run else f"{attempt}.log")), 4096)
            for _ in range(chance.randint(0, 150)):
                now[0] += 1
                data = chance.choice((b"x" * chance.randint(0, 130), b"\r", "ü\0\n".encode(), b"line\n", b"\n"))
                log.write(data, chance.choice((STDOUT, STDERR)))
            log.close()
    return tmp_path


@pytest.mark.parametrize("folder", range(6), indirect=True)
def test_the_last_lines_are_exactly_those_at_the_end_of_all_lines(folder: Path) -> None:
    every = list(FileLogReader(folder, LogRange(max_line=_MAX_LINE)).read(_as_it_is, last=True))
    middle = every[len(every) // 2]
    assert middle.time is not None
    windows: list[dict[str, Any]] = [{}, {"attempt": 2}, {"after": middle.cursor}, {"since": middle.time}]
    for window in windows:
        for select in (_as_it_is, _only_even):
            for last in (True, False):
                lines = list(FileLogReader(folder, LogRange(max_line=_MAX_LINE, **window)).read(select, last=last))
                for count in (0, 1, 10, len(lines), len(lines) + 1):
                    reader = FileLogReader(folder, LogRange(max_line=_MAX_LINE, **window))
                    shown = reader.read_last(count, select, last=last)
                    assert shown == (lines[-count:] if count else []), (window, count, last)


@pytest.mark.parametrize("folder", range(6), indirect=True)
def test_the_last_exact_lines_have_the_bytes_of_all_exact_pieces(folder: Path) -> None:
    part = LogRange(max_line=_MAX_LINE, exact=True)
    pieces = list(FileLogReader(folder, part).read(_as_it_is, last=True))
    lines = FileLogReader(folder, part).read_last(10_000, _as_it_is, last=True)
    for stream in ("stdout", "stderr"):
        written = "".join(line.text for line in pieces if line.stream == stream)
        assert written == "".join(line.text for line in lines if line.stream == stream)
        assert written.endswith("".join(line.text for line in lines[-10:] if line.stream == stream))


def test_exact_output_is_given_at_once_and_in_few_pieces(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "1.log"), 1 << 20)
    log.write(b"y\n" * 100_000, STDOUT)
    log.write(b"[ostler: 7 bytes dropped]\n", OURS)
    log.write(b"Go on? ", STDERR)
    reader = FileLogReader(tmp_path, LogRange(exact=True))
    lines = list(reader.read(_as_it_is, last=False))
    assert len(lines) < 10
    assert "".join(line.text for line in lines if line.stream == "stdout") == "y\n" * 100_000
    assert [(line.text, line.stream) for line in lines[-2:]] == [
        ("[ostler: 7 bytes dropped]\n", None),
        ("Go on? ", "stderr"),
    ]
    log.write(b"yes\n", STDERR)
    log.close()
    assert [
        line.text
        for line in FileLogReader(tmp_path, LogRange(exact=True, after=lines[-1].cursor)).read(_as_it_is, last=True)
    ] == ["yes\n"]


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_written_during_a_look_keeps_its_stream(tmp_path: Path, exact: bool) -> None:
    log = Log(str(tmp_path / "1.log"), 1 << 20)
    log.write(b"out\n", STDOUT)
    reader, lines = FileLogReader(tmp_path, LogRange(exact=exact)), []
    for line in reader.read(_as_it_is, last=False):
        lines.append(line)
        if len(lines) < 3:
            log.write(b"error\n", STDERR)
    lines.extend(reader.read(_as_it_is, last=False))
    log.close()
    assert {(line.text.rstrip(), line.stream) for line in lines} == {("out", "stdout"), ("error", "stderr")}


@pytest.mark.parametrize("folder", range(6, 10), indirect=True)
def test_a_reader_goes_on_behind_the_last_lines(folder: Path) -> None:
    whole, tail = (
        FileLogReader(folder, LogRange(max_line=_MAX_LINE)),
        FileLogReader(folder, LogRange(max_line=_MAX_LINE)),
    )
    list(whole.read(_as_it_is, last=False))
    tail.read_last(3, _as_it_is, last=False)
    for path in sorted(folder.glob("*.log")):
        with path.open("ab") as opened:
            opened.write(b" the end of a line\nand one more")
    (folder / "4.log").write_bytes(b"new\n")
    for last in (False, True):
        assert list(tail.read(_as_it_is, last=last)) == list(whole.read(_as_it_is, last=last))


def test_a_reader_that_goes_on_from_a_cursor_never_gives_what_lies_before_it(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_bytes(b"first\n")
    (tmp_path / "2.log").write_bytes(b"second\nthird\n")
    reader = FileLogReader(tmp_path, LogRange(after="2-:7"))
    assert [line.text for line in reader.read(_as_it_is, last=False)] == ["third"]
    assert not list(reader.read(_as_it_is, last=False))


def test_output_that_is_older_than_asked_for_is_left_out_with_its_file(tmp_path: Path) -> None:
    moment = datetime(2026, 11, 18, tzinfo=UTC)
    for attempt, written_at in ((1, moment - timedelta(hours=1)), (2, moment)):
        (tmp_path / f"{attempt}.log").write_bytes(b"a line\n")
        micros = int(written_at.timestamp() * 1_000_000)
        (tmp_path / f"{attempt}.log.times").write_bytes(struct.pack(">QQ", 0, micros))
    reader = FileLogReader(tmp_path, LogRange(since=moment))
    assert [line.attempt for line in reader.read(_as_it_is, last=True)] == [2]
    (tmp_path / "1.log.times").unlink()  # its age is not known
    assert [line.attempt for line in FileLogReader(tmp_path, LogRange(since=moment)).read(_as_it_is, last=True)] == [
        1,
        2,
    ]


def test_each_line_is_of_the_stream_that_wrote_it_also_when_the_other_broke_it(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "1.log"), 4096)
    parts = ((b"progress 1", STDERR), (b"a line\n", STDOUT), (b" 2\n", STDERR), (b"half", STDOUT), (b"!\n", STDOUT))
    for data, stream in parts:
        log.write(data, stream)
    log.close()
    lines = list(FileLogReader(tmp_path, LogRange(exact=True)).read(_as_it_is, last=True))
    assert [(line.text, line.stream) for line in lines] == [
        ("progress 1", "stderr"),
        ("a line\n", "stdout"),
        (" 2\n", "stderr"),
        ("half!\n", "stdout"),
    ]
    for name, code in (("stdout", STDOUT), ("stderr", STDERR)):
        exact = "".join(line.text for line in lines if line.stream == name)
        assert exact.encode() == b"".join(data for data, written_to in parts if written_to == code)
    assert all(line.time is not None for line in lines)


@pytest.mark.parametrize("seed", range(6))
def test_no_byte_of_a_stream_is_lost_or_added_where_the_file_is_turned_over(tmp_path: Path, seed: int) -> None:
    chance, written = random.Random(seed), {"stdout": b"", "stderr": b""}
    log = Log(str(tmp_path / "1.log"), 4096)
    for _ in range(280):
        data = chance.choice((b"x" * chance.randint(1, 100), b"line\n", b"\n"))
        stream = chance.choice((STDOUT, STDERR))
        log.write(data, stream)
        written["stdout" if stream == STDOUT else "stderr"] += data
    log.close()
    assert (tmp_path / "1.log.1").exists()
    lines = list(FileLogReader(tmp_path, LogRange(max_line=_MAX_LINE, exact=True)).read(_as_it_is, last=True))
    assert {line.stream for line in lines} == {"stdout", "stderr"}
    for name, data in written.items():
        assert "".join(line.text for line in lines if line.stream == name).encode() == data


def test_times_are_bounded_as_the_log_is(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "1.log"), 4096)
    for _ in range(2000):
        log.write(b"o\n", STDOUT)
        log.write(b"e\n", STDERR)
    log.close()
    assert all(path.stat().st_size <= 4096 + 16 for path in tmp_path.iterdir())
    lines = list(FileLogReader(tmp_path).read(_as_it_is, last=True))
    assert len(lines) >= 256
    assert all(line.stream == {"o": "stdout", "e": "stderr"}[line.text] for line in lines)


def test_a_log_of_an_earlier_version_has_times_and_no_streams(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_bytes(b"one\ntwo\n")
    pairs = ((0, 1_700_000_000_000_001), (4, 1_700_000_001_000_003))
    (tmp_path / "1.log.times").write_bytes(b"".join(struct.pack(">QQ", *pair) for pair in pairs))
    lines = list(FileLogReader(tmp_path).read(_as_it_is, last=True))
    assert [(line.text, line.stream) for line in lines] == [("one", None), ("two", None)]
    assert [line.time is not None and line.time.second for line in lines] == [20, 21]
