"""What is kept of a terminal, its modes, the keys that detach, and the text that logs show of it."""

from __future__ import annotations

import click
import pytest

from ostler.cli.attach import DetachKeys
from ostler.keeper.terminal import KEPT_BYTES, Modes, Screen
from ostler.model.text import visible_text

RESET = b"\x1b[!p"


def screen(*chunks: bytes) -> Screen:
    made = Screen()
    for chunk in chunks:
        made.feed(chunk)
    return made


def test_a_viewer_gets_what_came_after_its_position() -> None:
    kept = screen(b"hello ", b"world")
    assert kept.read(None) == b"hello world"
    assert kept.read(6) == b"world"
    assert kept.read(11) == b""


def test_a_position_that_is_not_known_gives_the_whole_screen() -> None:
    assert screen(b"hello").read(99) == b"hello"


def test_what_stood_before_a_clear_is_not_kept_also_when_the_clear_comes_in_two_parts() -> None:
    for clear in (b"\x1b[2J", b"\x1b[H\x1b[J", b"\x1bc"):
        for cut in range(len(clear)):
            shown = screen(b"old" + clear[:cut], clear[cut:] + b"new").read(None)
            assert b"old" not in shown
            assert shown.endswith(clear + b"new")


def test_the_modes_before_what_is_kept_come_first() -> None:
    shown = screen(b"\x1b[?1049;25l\x1b[?1049h\x1b=old\x1b[2Jnew").read(None)
    before, _, _ = shown.partition(b"\x1b[2J")
    assert before.startswith(RESET)
    for mode in (b"\x1b[?1049h", b"\x1b[?25l", b"\x1b="):
        assert mode in before


def test_a_flood_keeps_its_end_and_begins_at_a_line() -> None:
    kept = screen(*(b"line %d\n" % number for number in range(100_000)))
    shown = kept.read(None)
    assert KEPT_BYTES / 2 < len(shown) < 3 * KEPT_BYTES
    assert shown.endswith(b"line 99999\n")
    assert shown.startswith(RESET)
    assert shown.partition(b"\x1b[2J\n")[2].startswith(b"line ")
    assert kept.read(5) == shown  # that position is not kept any more: a slow viewer


def test_a_query_is_answered_by_one_viewer_only() -> None:
    kept = screen(b"a\x1b[6nb\x1b[c")
    assert kept.read(None) == b"a\x1b[6nb\x1b[c"
    kept.feed(b"\x1b[5nc")
    assert kept.read(None) == b"ab\x1b[5nc"


def test_modes_are_left_as_they_were() -> None:
    modes = Modes()
    modes.feed(b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?2004l\x1b=\x1b[>1u")
    assert modes.leave() == b"\x1b[?1049l\x1b[?25h\x1b[<u\x1b>"
    assert Modes().leave() == b""


# --- keys --------------------------------------------------------------------------------------------


def test_keys_before_the_detaching_one_are_sent() -> None:
    assert DetachKeys("ctrl-q").feed(b"ab\x11cd") == (b"ab", True)
    assert DetachKeys("ctrl-q").feed(b"abcd") == (b"abcd", False)


@pytest.mark.parametrize("key", [b"\x11", b"\x1b[113;5u", b"\x1b[27;5;113~"])
def test_a_key_is_known_in_every_keyboard_protocol(key: bytes) -> None:
    assert DetachKeys("ctrl-q").feed(key) == (b"", True)


def test_a_sequence_that_breaks_off_is_sent_as_it_was_typed() -> None:
    keys = DetachKeys("ctrl-p,ctrl-q")
    assert keys.feed(b"a\x10") == (b"a", False)
    assert keys.feed(b"x") == (b"\x10x", False)
    assert keys.feed(b"\x10\x10") == (b"\x10", False)
    assert keys.feed(b"\x11") == (b"", True)


@pytest.mark.parametrize("text", ["", "ctrl-", "ctrl-qq", "alt-q", "ctrl-q,"])
def test_keys_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="must be keys such as ctrl-q"):
        DetachKeys(text)


# --- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plain\ttext", "plain\ttext"),
        ("\x1b[1mbold\x1b[0m", "bold"),
        ("\x1b[2;1Hone\x1b[3;1Htwo", " one two"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1b(Btext", "text"),
        ("\x1b[?1049h\x1b[22;0;0t", None),
    ],
)
def test_text_without_control_sequences(line: str, text: str | None) -> None:
    assert visible_text(line) == text
