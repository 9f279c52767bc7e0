from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.definitions.parse import MAX_DEPTH, MAX_FRONT, Document, UnreadableError, read_yaml


def front(text: str) -> Document:
    """As the front matter of a file, which begins on line 2."""
    return read_yaml(text, 2)


def refused(text: str) -> str:
    with pytest.raises(UnreadableError) as caught:
        front(text)
    return f"{caught.value.line}: {caught.value.sentence}"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *((word, word) for word in ("no", "yes", "on", "off", "1_000", "12:30", "2026-01-01", "0b1", "1.2.3")),
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, False) for word in ("false", "False", "FALSE")),
        *((word, None) for word in ("", "~", "null", "Null")),
        *(("010", 10), ("-3", -3), ("0x1F", 31), ("0o17", 15), ("1.5", 1.5), ("-2e3", -2000.0), (".5", 0.5)),
        *(("'5'", "5"), ('"no"', "no"), ("''", ""), ("|\n  1\n", "1\n")),
    ],
)
def test_plain_values_follow_yaml_1_2(written: str, value: Any) -> None:
    found = front(f"a: {written}").data["a"]
    assert (type(found), found) == (type(value), value)


def test_not_a_number_and_infinity_are_read_for_the_checks_to_refuse() -> None:
    found = front("a: [.nan, -.inf, .Inf]").data["a"]
    assert math.isnan(found[0])
    assert found[1:] == [-math.inf, math.inf]


def test_keys_are_text_and_tags_of_plain_values_are_allowed() -> None:
    assert front("0: done\ntrue: x\n'q': !!str 5\nn: ! 7\ni: !!int 3").data == {
        "0": "done",
        "true": "x",
        "q": "5",
        "n": "7",
        "i": 3,
    }


def test_every_key_and_item_has_its_line() -> None:
    page = front("name: a\nlist:\n  - one\n  - {k: v,\n     m: n}\ntext: |\n  x\n  y\nlast: 1\n")
    assert page.lines == {
        "name": 2,
        "list": 3,
        "list.0": 4,
        "list.1": 5,
        "list.1.k": 5,
        "list.1.m": 6,
        "text": 7,
        "last": 10,
    }


@pytest.mark.parametrize("text", ["", "# only a remark\n", "\n\n"])
def test_nothing_is_nothing(text: str) -> None:
    assert front(text).data == {}


def test_a_duplicate_is_a_fault_and_the_first_stays() -> None:
    page = front("a: 1\nb: {c: 1}\na: {d: [2]}\n")
    assert page.data == {"a": 1, "b": {"c": 1}}
    assert page.duplicates == [(4, "a stands already on line 2")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:\n\tb: 1", "3: a tab stands where YAML wants spaces; indent with spaces"),
        ("a: 1\nb: c: d\n", "3: this is not YAML: a second ': ' in a line"),
        ("a: [1,\nb: 2\n", "this is not YAML:"),
        ("a: 'x\n", "this is not YAML: while scanning a quoted scalar found unexpected end of stream"),
        ("a: 1\nb: \x07\n", "3: there is a character that YAML does not allow"),
        ("a: &x 1\nb: *x\n", "3: an alias is not read; write the value out"),
        ("a: &x [*x]", "2: an alias is not read"),
        ("a: &x [1]\nb: {<<: *x}\n", "3: an alias is not read"),
        ("&a x: 1\n*a : 2\n", "a key must be plain text"),
        ("a: *x\n", "2: this is not YAML: found undefined alias 'x'"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "2: the tag tag:yaml.org,2002:python/object/apply:os.system is not read",
        ),
        ("a: &b !mine 3", "the tag !mine is not read"),
        ("? [1, 2]\n: 3", "a key must be plain text"),
        ("a: 1\n...\n---\nb: 2", "4: this is not YAML: expected a single document in the stream"),
        ("- a\n- b", "2: the front matter must be keys with values"),
        ("just text", "the front matter must be keys with values"),
        (f"a: 1\nb: {'9' * 5000}", "3: this number has too many digits"),
        ("a: " + "[" * 200 + "]" * 200, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 5000, "nested more than"),
        ("[" * 60_000, "nested more than"),
        ("a: " + "x" * MAX_FRONT, "the front matter is larger than 64 KiB"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(text: str, sentence: str) -> None:
    assert sentence in refused(text)


def test_the_line_of_a_fault_is_inside_the_front_matter() -> None:
    assert refused("a: 'x\n").startswith("3:")
    assert refused("a: [").startswith("2:")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("description: Use it when: always. Context: it's red", "Use it when: always. Context: it's red"),
        ("description: 'quoted: text'", "quoted: text"),
        ('description: "a: b"', "a: b"),
        ("description: plain", "plain"),
        ("description: >\n  folded: text\n", "folded: text\n"),
        ("description: ends with:", "ends with:"),
    ],
)
def test_a_description_may_hold_a_colon_as_other_tools_write_it(line: str, meant: str) -> None:
    page = front(f"name: a\n{line}\nmodel: x")
    assert page.data == {"name": "a", "description": meant, "model": "x"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\x85\ufeff")
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "c d", "ü"]), inner),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), JSON))
def test_json_is_read_as_what_it_is(data: dict[str, Any]) -> None:
    assert front(json.dumps(data, ensure_ascii=False)).data == data


@given(st.text(st.sampled_from("ab:-?[]{},&*!|>'\"%@` \n\t#0.~<=\\\x00\x85é"), max_size=60))
def test_whatever_is_written_there_is_data_or_refused(text: str) -> None:
    try:
        page = front(text)
    except UnreadableError:
        return
    assert isinstance(page.data, dict)
