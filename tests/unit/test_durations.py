"""Durations and sizes: read as people write them, and written for files, sentences and tables."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.durations import (
    duration_text,
    parse_duration,
    parse_megabytes,
    parse_seconds,
    rough_duration,
    size_text,
    to_duration,
    write_duration,
    write_megabytes,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (timedelta(0), "0s"),
        (timedelta(milliseconds=500), "500ms"),
        (timedelta(seconds=90), "90s"),
        (timedelta(minutes=5), "5m"),
        (timedelta(hours=36), "36h"),
        (timedelta(days=7), "7d"),
    ],
)
def test_a_duration_is_written_in_its_largest_whole_unit(value: timedelta, text: str) -> None:
    assert write_duration(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0M"), (64, "64M"), (1536, "1536M"), (2048, "2G"), (2**24, "16T")])
def test_a_size_is_written_in_its_largest_whole_unit(value: int, text: str) -> None:
    assert write_megabytes(value) == text


@given(st.integers(0, 10**12))
def test_a_duration_comes_back_from_its_text(milliseconds: int) -> None:
    value = timedelta(milliseconds=milliseconds)
    assert parse_duration(write_duration(value)) == value


@given(st.integers(0, 2**24))
def test_a_size_comes_back_from_its_text(megabytes: int) -> None:
    assert parse_megabytes(write_megabytes(megabytes)) == megabytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.5, "0.5 s"), (90, "90 s"), (300, "5 min"), (3600, "1 h"), (86400, "1 d"), (3600.001, "3600.001 s")],
)
def test_durations_read_as_a_person_writes_them(seconds: float, text: str) -> None:
    assert duration_text(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1h 30min", 5400), ("500ms", 0.5), (90, 90), (0.5, 0.5), ("P1DT2H3M4.5S", 93784.5), (timedelta(1), 86400)],
)
def test_a_duration_is_read_from_text_numbers_and_json(value: timedelta | float | str, seconds: float) -> None:
    assert to_duration(value) == timedelta(seconds=seconds)


@pytest.mark.parametrize("value", ["", "soon", "5 parsecs", "-5s", True, None, []])
def test_anything_else_is_no_duration(value: object) -> None:
    with pytest.raises(ValueError, match="is no duration; write one such as 30s"):
        to_duration(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("1.5", 1.5), ("2m", 120.0), ("soon", None), ("", None)])
def test_the_command_line_takes_plain_seconds_too(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.9, "0 s"), (59, "59 s"), (3599, "59 min"), (86399, "23 h"), (90000, "1 d 1 h"), (86460, "1 d")],
)
def test_a_table_shows_one_unit_below_a_day_and_two_above(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2 K"), (64 * 2**20, "64 M"), (1.5 * 2**30, "1.5 G")]
)
def test_a_table_shows_bytes_with_their_unit(count: float, text: str) -> None:
    assert size_text(count) == text
