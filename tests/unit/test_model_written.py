"""Durations and sizes as people write them are read back as they were."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.types import parse_duration, parse_megabytes, write_duration, write_megabytes


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
