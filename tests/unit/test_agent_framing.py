"""Messages as lines of JSON: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.agent_process.framing import (
    LONG_KINDS,
    MAX_DEPTH,
    MAX_MESSAGE,
    MAX_SHORT,
    LineReader,
    ProtocolError,
    TooDeepError,
    TooLongError,
    encode,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aä☃\n\0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def read(stream: bytes, piece: int = 1 << 18, *, from_agent: bool = True) -> list[dict[str, Any]]:
    """As they come out when the stream comes in pieces of this length."""
    reader = LineReader(from_agent=from_agent)
    pieces = (stream[start : start + piece] for start in range(0, len(stream), piece))
    return [message for data in pieces for message in reader.feed(data)]


@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), max_size=5), st.integers(1, 50))
def test_messages_come_out_as_they_went_in(contents: list[dict[str, Any]], piece: int) -> None:
    messages = [{**content, "t": "say"} for content in contents]
    assert read(b"".join(map(encode, messages)), piece) == messages


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_and_nothing_worse(stream: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read(stream + b"\n")


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"[]", b"{}", b'{"t":3}', b'{"t":null}', b"\xff\xfe", b'{"t":"x"', b"[" * 200_000, b"1" * 5000],
)
def test_a_line_that_is_no_message_is_a_fault(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(line + b"\n")


def test_a_line_without_end_is_refused_in_time() -> None:
    with pytest.raises(ProtocolError, match="longer than"):
        read(b"x" * (MAX_MESSAGE + 1), from_agent=False)


@pytest.mark.parametrize("piece", [5, 100_000, 1 << 18])
@pytest.mark.parametrize("kind", LONG_KINDS)
def test_only_some_kinds_of_an_agent_may_be_long(kind: str, piece: int) -> None:
    text = "y" * MAX_SHORT
    assert read(encode({"t": kind, "text": text}), piece) == [{"t": kind, "text": text}]
    with pytest.raises(ProtocolError, match="may not be long"):
        read(encode({"t": "say", "text": text}), piece)
    with pytest.raises(ProtocolError, match="names two kinds"):
        read(f'{{"t":"{kind}","text":"{text}","t":"say"}}\n'.encode(), piece)
    assert read(encode({"t": "call", "text": text}), from_agent=False)


def test_a_long_message_is_refused_where_it_is_made() -> None:
    with pytest.raises(TooLongError):
        encode({"t": "x", "text": "y" * MAX_MESSAGE})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_bounded_on_both_sides() -> None:
    deepest = {"t": "x", "value": nested(MAX_DEPTH - 1)}
    assert read(encode(deepest)) == [deepest]
    with pytest.raises(TooDeepError, match="nested more than 500 deep"):
        encode({"t": "x", "value": nested(MAX_DEPTH)})
    line = b'{"t":"x","value":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}\n"
    with pytest.raises(ProtocolError, match="nested more than 500 deep"):
        read(line)
    assert encode({"t": "x", "value": [[]] * 1000}), "wide is not deep"


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), "\ud800"])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode({"t": "x", "value": value})
