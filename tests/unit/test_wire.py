"""Messages in packets: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.isolation import wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aä☃\n\0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = wire.channel()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def joined(body: bytes) -> dict[str, Any] | None:
    joiner, message = wire.Joiner(), None
    for packet in wire.packets(body, 3, 7):
        assert message is None, "complete before its last packet"
        message = joiner.take(wire.read(packet))
    return message


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_a_message_comes_out_as_it_went_in(content: dict[str, Any]) -> None:
    message = {**content, "t": "say"}
    assert joined(wire.encode(message)) == message


@pytest.mark.parametrize("length", [0, wire.PIECE - 13, wire.PIECE, 3 * wire.PIECE - 12, 1_000_000])
def test_a_long_message_is_cut_and_joined(length: int) -> None:
    message = {"t": "x", "text": "y" * length}
    body = wire.encode(message)
    pieces = [wire.read(one) for one in wire.packets(body, 3, 7)]
    assert len(pieces) == -(-len(body) // wire.PIECE)
    assert (pieces[0].first, pieces[-1].last) == (True, True)
    assert {(one.attempt, one.epoch) for one in pieces} == {(3, 7)}
    assert joined(body) == message


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_and_nothing_worse(packet: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.Joiner().take(wire.read(packet))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.binary(max_size=30)), max_size=12))
def test_pieces_in_any_order_are_a_message_or_a_fault(pieces: list[tuple[bool, bool, bytes]]) -> None:
    joiner = wire.Joiner()
    for first, last, body in pieces:
        with contextlib.suppress(wire.WireError):
            message = joiner.take(wire.Packet(1, 1, first, last, body))
            assert message is None or isinstance(message["t"], str)


@given(st.binary(max_size=60))
def test_a_body_that_is_no_message_is_a_fault(body: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        assert isinstance(joined(body), dict)


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"{}", b'{"t":3}', b'{"t":null}', b"\xff\xfe", b'{"t":"x"', b"[" * 200_000, b"1" * 5000],
)
def test_nor_are_these(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        joined(body)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x01\x03",
        struct.pack("!BBIQ", wire.VERSION + 1, 3, 1, 1) + b"{}",
        struct.pack("!BBIQ", wire.VERSION, 4, 1, 1) + b"{}",
        struct.pack("!BBIQ", wire.VERSION, 3, 1, 1) + b"x" * (wire.PIECE + 1),
    ],
)
def test_packets_that_are_none(packet: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.read(packet)


def test_what_continues_nothing_is_refused() -> None:
    with pytest.raises(wire.WireError, match="continues nothing"):
        wire.Joiner().take(wire.Packet(1, 1, first=False, last=True, body=b"{}"))


def test_a_new_beginning_drops_what_was_unfinished() -> None:
    joiner = wire.Joiner()
    assert joiner.take(wire.Packet(1, 1, first=True, last=False, body=b'{"t":')) is None
    assert joiner.take(wire.Packet(1, 2, first=True, last=False, body=b'{"t":')) is None
    assert joiner.take(wire.Packet(1, 2, first=False, last=True, body=b'"new"}')) == {"t": "new"}
    with pytest.raises(wire.WireError):
        joiner.take(wire.Packet(1, 2, first=False, last=True, body=b'"new"}'))


def test_a_message_without_end_is_refused_in_time() -> None:
    joiner = wire.Joiner()
    piece = wire.Packet(1, 1, first=False, last=False, body=b"x" * wire.PIECE)
    joiner.take(wire.Packet(1, 1, first=True, last=False, body=b""))
    for _ in range(wire.MAX_MESSAGE // wire.PIECE):
        joiner.take(piece)
    with pytest.raises(wire.WireError, match="more than"):
        joiner.take(piece)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"x", object(), "\ud800"])
def test_what_is_no_json_is_refused_where_it_is_made(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        wire.encode({"t": "x", "value": value})


def test_too_much_is_refused_where_it_is_made() -> None:
    with pytest.raises(wire.TooLongError, match="bytes are more than"):
        wire.encode({"t": "x", "value": "y" * wire.MAX_MESSAGE})


def test_a_sender_holds_what_the_peer_does_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sender = wire.Sender(ours, 3, 7)
    messages = [{"t": "x", "n": number, "text": "y" * 100_000} for number in range(20)]
    for message in messages:
        sender.put(wire.encode(message))
    assert len(sender) > 0
    heard: list[dict[str, Any]] = []
    joiner = wire.Joiner()
    while len(heard) < len(messages):
        select.select([theirs], [], [], 5)
        packet = wire.receive(theirs)
        assert packet is not None
        whole = joiner.take(wire.read(packet))
        if whole is not None:
            heard.append(whole)
        sender.flush()
    assert heard == messages
    assert len(sender) == 0


def test_a_sender_forgets_on_demand_and_speaks_under_its_new_epoch(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    sender = wire.Sender(ours, 3, 7)
    while sender.put(wire.encode({"t": "old", "text": "y" * 50_000})):
        pass
    sender.clear()
    sender.epoch = 8
    sender.put(wire.encode({"t": "new"}))
    epochs: list[int] = []
    while len(sender) or not epochs or epochs[-1] != 8:
        packet = wire.receive(theirs)
        assert packet is not None
        epochs.append(wire.read(packet).epoch)
        sender.flush()
    assert epochs == sorted(epochs)


def test_an_end_that_is_gone_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        wire.receive(ours)
    theirs.close()
    assert wire.receive(ours) is None
    with pytest.raises(OSError, match=r".*"):
        wire.Sender(ours, 1, 1).put(b"{}")
