from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.agents.files.page import Page
from ostler.agents.files.yamltext import MAX_DEPTH, MAX_FRONT, read_yaml
from ostler.errors import DefinitionError


def page_of(text: str) -> Page:
    """As the front matter of a file, which begins on line 2."""
    page = Page("a.md")
    read_yaml(page, text, 2)
    return page


def refused(text: str) -> str:
    with pytest.raises(DefinitionError) as caught:
        page_of(text).settle()
    return str(caught.value)


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
    found = page_of(f"a: {written}").data["a"]
    assert (type(found), found) == (type(value), value)


def test_not_a_number_and_infinity_are_read_for_the_checks_to_refuse() -> None:
    found = page_of("a: [.nan, -.inf, .Inf]").data["a"]
    assert math.isnan(found[0])
    assert found[1:] == [-math.inf, math.inf]


def test_keys_are_text_and_tags_of_plain_values_are_allowed() -> None:
    assert page_of("0: done\ntrue: x\n'q': !!str 5\nn: ! 7\ni: !!int 3").data == {
        "0": "done",
        "true": "x",
        "q": "5",
        "n": "7",
        "i": 3,
    }


def test_every_key_and_item_has_its_line() -> None:
    page = page_of("name: a\nlist:\n  - one\n  - {k: v,\n     m: n}\ntext: |\n  x\n  y\nlast: 1\n")
    assert page.lines == {
        ("name",): 2,
        ("list",): 3,
        ("list", 0): 4,
        ("list", 1): 5,
        ("list", 1, "k"): 5,
        ("list", 1, "m"): 6,
        ("text",): 7,
        ("last",): 10,
    }


@pytest.mark.parametrize("text", ["", "# only a remark\n", "\n\n"])
def test_nothing_is_nothing(text: str) -> None:
    assert page_of(text).data == {}


def test_a_duplicate_is_a_fault_and_the_first_stays() -> None:
    page = page_of("a: 1\nb: {c: 1}\na: {d: [2]}\n")
    assert page.data == {"a": 1, "b": {"c": 1}}
    assert [fault.message for fault in page.faults] == ["a.md:4: a stands already on line 2"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:\n\tb: 1", "a.md:3: a tab stands where YAML wants spaces; indent with spaces"),
        ("a: 1\nb: c: d\n", "a.md:3: this is not YAML: a second ': ' in a line"),
        ("a: [1,\nb: 2\n", "this is not YAML:"),
        ("a: 'x\n", "this is not YAML: found unexpected end of stream"),
        ("a: 1\nb: \x07\n", "a.md:3: there is a character that YAML does not allow"),
        ("a: 1\nb: *x\n", "a.md:3: the alias *x is not read; write the value out"),
        ("a: &x [*x]", "the alias *x is not read"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "a.md:2: the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("a: !mine 3", "the tag '!mine' is not read"),
        ("? [1, 2]\n: 3", "a key must be plain text"),
        ("a: 1\n...\n---\nb: 2", "a second document begins here"),
        ("- a\n- b", "a.md:2: the front matter must be keys with values"),
        ("just text", "the front matter must be keys with values"),
        (f"a: 1\nb: {'9' * 5000}", "a.md:3: this number has too many digits"),
        ("a: " + "[" * 200, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 5000, "nested more than"),
        ("[" * 60_000, "nested more than"),
        ("a: " + "x" * MAX_FRONT, "the front matter is larger than 64 KiB"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(text: str, sentence: str) -> None:
    assert sentence in refused(text)


def test_the_line_of_a_fault_is_inside_the_front_matter() -> None:
    assert refused("a: 'x\n").startswith("a.md:3:")
    assert refused("a: [").startswith("a.md:2:")


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
    page = page_of(f"name: a\n{line}\nmodel: x")
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
    assert page_of(json.dumps(data, ensure_ascii=False)).data == data


@given(st.text(st.sampled_from("ab:-?[]{},&*!|>'\"%@` \n\t#0.~<=\\\x00\x85é"), max_size=60))
def test_whatever_is_written_there_is_data_or_a_definition_error(text: str) -> None:
    try:
        page = page_of(text)
    except DefinitionError:
        return
    assert isinstance(page.data, dict)
