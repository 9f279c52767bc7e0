"""What is sent with descriptors: whatever fails on the way, none of the copies stays open."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import pytest

from ostler.keeper import protocol
from ostler.keeper.protocol import MAX_MESSAGE, Line, ProtocolError


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - short


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Line(first), Line(second)
    yield made
    for one in made:
        one.close()


def test_no_descriptor_left_for_the_second_copy(lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    before, copy, copies = open_count(), os.dup, iter([True, False])

    def dup(fd: int) -> int:
        if next(copies):
            return copy(fd)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("ostler.keeper.protocol.os.dup", dup)
    with pytest.raises(OSError, match="Too many open files"):
        lines[0].send({"a": 1}, [0, 0])
    assert open_count() == before
    monkeypatch.undo()
    lines[0].send({"b": 2}, [0])
    message, fds = lines[1].receive() or ({}, [])
    for one in fds:
        os.close(one)
    assert (message, len(fds)) == ({"b": 2}, 1)


def test_no_descriptor_left_for_a_long_text(lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, f"Too many open files: {name} {flags}")

    before = open_count()
    monkeypatch.setattr("ostler.keeper.protocol.os.memfd_create", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        lines[0].send({"a": "x" * 100_000}, [0])
    assert (open_count(), lines[0].is_waiting) == (before, False)


def test_too_long_and_too_many(lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_count()
    with pytest.raises(ProtocolError, match="longer than"):
        lines[0].send({"a": "x" * MAX_MESSAGE}, [0])
    assert open_count() == before
    monkeypatch.setattr(protocol, "MAX_WAITING", 3)
    with contextlib.suppress(BrokenPipeError):
        while True:
            lines[0].send({"a": "x" * 50_000})
    before = open_count()
    with pytest.raises(BrokenPipeError, match="does not read"):
        lines[0].send({"a": 1}, [0])
    assert open_count() == before


def test_what_cannot_be_sent_does_not_stay_in_the_way(lines: tuple[Line, Line]) -> None:
    lines[1].close()
    before = open_count()
    with pytest.raises(ConnectionError):
        lines[0].send({"a": 1}, [0])
    assert (open_count(), lines[0].is_waiting) == (before, False)
