"""What keeper and templates send each other: of any length, with descriptors, and none of those stays open."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from ostler.keeper.protocol import LineError, LineReader, receive_packet, send_packet


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - short


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        yield first, second


@pytest.mark.parametrize("length", [1, 60_000, 70_000, 5_000_000])
def test_a_packet_of_any_length_comes_with_its_descriptors(
    ends: tuple[socket.socket, socket.socket], length: int
) -> None:
    before = open_count()
    read, write = os.pipe()
    send_packet(ends[0], {"text": "x" * length}, [write])
    os.close(write)
    message, descriptors = receive_packet(ends[1], 1)
    assert message == {"text": "x" * length}
    os.write(descriptors[0], b"same")
    assert os.read(read, 9) == b"same"
    assert not os.get_inheritable(descriptors[0])
    for descriptor in (*descriptors, read):
        os.close(descriptor)
    assert open_count() == before


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"in a file", b"[" * 50_000])
def test_nonsense_costs_no_descriptor(ends: tuple[socket.socket, socket.socket], body: bytes) -> None:
    before = open_count()
    with open(os.devnull, "rb") as file:  # noqa: PTH123 - short
        socket.send_fds(ends[0], [body], [file.fileno()])
    with pytest.raises(LineError):
        receive_packet(ends[1], 1)
    assert open_count() == before


def test_no_descriptor_left_for_a_long_packet(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, f"Too many open files: {name} {flags}")

    before = open_count()
    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        send_packet(ends[0], {"a": "x" * 100_000}, [0])
    assert open_count() == before


def test_the_end_is_no_packet(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    assert receive_packet(ends[1], 1) == (None, [])


def test_lines_are_cut_wherever_the_stream_is() -> None:
    text = b'{"a":1}\n{"b":2}\n\n{"c":3}\n'
    for size in range(1, len(text)):
        reader = LineReader()
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [line for chunk in chunks for line in reader.feed(chunk)] == text.split(b"\n")[:-1]


def test_a_line_without_end_is_refused() -> None:
    reader = LineReader(10)
    assert list(reader.feed(b"1234567890\n123")) == [b"1234567890"]
    with pytest.raises(LineError, match="longer than 10 bytes"):
        list(reader.feed(b"45678901"))
