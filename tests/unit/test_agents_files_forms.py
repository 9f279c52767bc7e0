from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.agents.files.forms import FORMS, Form

GOOD: tuple[tuple[Form, Any, Any], ...] = (
    (Form.DURATION, "45m", timedelta(minutes=45)),
    (Form.DURATION, "1h30m", timedelta(minutes=90)),
    (Form.DURATION, "20s", timedelta(seconds=20)),
    (Form.DURATION, "3d", timedelta(days=3)),
    (Form.DURATION, "500ms", timedelta(milliseconds=500)),
    (Form.DURATION, "1d2h3m4s5ms", timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5)),
    (Form.DURATION, "1.5h", timedelta(minutes=90)),
    (Form.DURATION, " 2s ", timedelta(seconds=2)),
    (Form.DURATION, 0, timedelta(0)),
    (Form.SIZE, "2G", 2 * 1024**3),
    (Form.SIZE, "512M", 512 * 1024**2),
    (Form.SIZE, "512m", 512 * 1024**2),
    (Form.SIZE, "1.5GiB", 3 * 1024**3 // 2),
    (Form.SIZE, "64KB", 64 * 1024),
    (Form.COUNT, 3, 3),
    (Form.COUNT, "2M", 2_000_000),
    (Form.COUNT, "500k", 500_000),
    (Form.COUNT, "2.5M", 2_500_000),
    (Form.COUNT, "1_000", 1000),
    (Form.PERCENT, 50, 50),
    (Form.PERCENT, "50%", 50),
    (Form.NUMBER, 2, 2.0),
    (Form.MONEY, 5.0, 5.0),
    (Form.FLAG, True, True),
    (Form.TEXTS, "pytest -q", ["pytest -q"]),
    (Form.TEXTS, ["a", "b"], ["a", "b"]),
    (Form.NAMES, ["API_KEY"], ["API_KEY"]),
    (Form.COMMAND, ["a", ""], ["a", ""]),
    (Form.COMMAND, "aider --file '{prompt file}'", ["aider", "--file", "{prompt file}"]),
    (Form.CLASS, "my.mod:Outer.Inner", "my.mod:Outer.Inner"),
    (Form.DRIVER, "acp:claude", {"acp": "claude"}),
    (Form.DRIVER, "python: my.mod:Fixer", {"python": "my.mod:Fixer"}),
    (Form.DRIVER, "command: aider --yes", {"command": ["aider", "--yes"]}),
    (Form.RESTART, "no", {"policy": "no"}),
    (Form.RESTART, False, {"policy": "no"}),
    (Form.RESTART, "always", {"policy": "always"}),
    (Form.RESTART, "on-failure", {"policy": "on-failure"}),
    (Form.RESTART, "on-failure:3", {"policy": "on-failure", "max": 3}),
)

BAD: tuple[tuple[Form, Any], ...] = (
    *(
        (Form.DURATION, one)
        for one in (30, "30", "", "m", "1m1h", "-1s", "1 h", "1y", True, None, ["1s"], "9" * 99 + "s")
    ),
    *((Form.SIZE, one) for one in (512, "512", "G", "-1G", "2P", "1e3M", True, "9" * 99 + "G")),
    *((Form.COUNT, one) for one in (1.5, "1.5", "M", "-1", True, None, "2m", "٣")),
    *((Form.PERCENT, one) for one in ("half", 0.5, True)),
    *((Form.NUMBER, one) for one in ("2", True, float("nan"), float("inf"), 10**400)),
    *((Form.MONEY, one) for one in (-1, "5")),
    *((Form.FLAG, one) for one in ("yes", 1, None)),
    *((Form.TEXTS, one) for one in ("", [""], [1], {"a": 1}, 3)),
    *((Form.NAMES, one) for one in (["A=b"], ["1A"], ["A B"], "A, B")),
    *((Form.COMMAND, one) for one in ([], [""], "", "unbalanced 'quote", [1], 3)),
    *((Form.CLASS, one) for one in ("mod", "mod:", ":C", "a-b:C", "mod:C()", 3)),
    *((Form.DRIVER, one) for one in ("claude", "acp:", "acp", "shell:ls", "python:mod", 3, "command:")),
    *((Form.RESTART, one) for one in ("never", "on-failure:", "on-failure:x", "always:3", True, 3, "on-failure:-1")),
    *((form, one) for form in (Form.KEYS, Form.NAMED) for one in ("text", 3, [1])),
)


@pytest.mark.parametrize(("form", "written", "value"), GOOD)
def test_a_form_is_read(form: Form, written: Any, value: Any) -> None:
    assert FORMS[form].read(written) == value


@pytest.mark.parametrize(("form", "written"), BAD)
def test_anything_else_is_refused_in_one_way(form: Form, written: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its sentence is the hint of the form
        FORMS[form].read(written)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(form=st.sampled_from(Form), written=ANYTHING)
def test_a_reader_gives_a_value_or_refuses(form: Form, written: Any) -> None:
    with contextlib.suppress(ValueError):
        FORMS[form].read(written)


@given(st.integers(1, 999), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_every_duration_can_be_written(days: int, hours: int, minutes: int, seconds: int, millis: int) -> None:
    meant = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=millis)
    assert FORMS[Form.DURATION].read(f"{days}d{hours}h{minutes}m{seconds}s{millis}ms") == meant


def test_every_form_has_a_rule() -> None:
    assert set(FORMS) == set(Form)
