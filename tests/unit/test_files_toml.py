from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.agents.files.positions import KeyPath, UnreadableError, read_toml

EVERYTHING = '''# a remark = 1
top = 1
"quoted key" = """
not = a key
[nor.this]
\\""""
'li.teral' = \'\'\'
also = not
\'\'\'
a.b . "c" = [ 1, # one, two
  "]", '}',
  { k = "v" , m = [
     2] },
]
date = 1979-05-27 07:32:00
[ table . "in ner" ]
x = { y = { z = "#" }, w = 1 }
[[many]]
n = 1
[many.sub]
s = 1
[[many]]
n = 2
'''


def test_every_key_has_the_line_where_it_stands() -> None:
    page = read_toml(EVERYTHING)
    expected = {
        ("top",): 2,
        ("quoted key",): 3,
        ("li.teral",): 7,
        ("a",): 10,
        ("a", "b"): 10,
        ("a", "b", "c"): 10,
        ("a", "b", "c", 0): 10,
        ("a", "b", "c", 1): 11,
        ("a", "b", "c", 2): 11,
        ("a", "b", "c", 3): 12,
        ("a", "b", "c", 3, "k"): 12,
        ("a", "b", "c", 3, "m"): 12,
        ("a", "b", "c", 3, "m", 0): 13,
        ("date",): 15,
        ("table",): 16,
        ("table", "in ner"): 16,
        ("table", "in ner", "x"): 17,
        ("table", "in ner", "x", "y"): 17,
        ("table", "in ner", "x", "y", "z"): 17,
        ("table", "in ner", "x", "w"): 17,
        ("many",): 18,
        ("many", 0): 18,
        ("many", 0, "n"): 19,
        ("many", 0, "sub"): 20,
        ("many", 0, "sub", "s"): 21,
        ("many", 1): 22,
        ("many", 1, "n"): 23,
    }
    assert page.lines == expected
    assert set(paths(page.data)) == set(expected)


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


def test_dates_become_text() -> None:
    data = read_toml("a = 1979-05-27\nb = 07:32:00\nc = [1979-05-27T07:32:00Z]").data
    assert data == {"a": "1979-05-27", "b": "07:32:00", "c": ["1979-05-27T07:32:00+00:00"]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = 1\nb = \n", "2: this is not TOML: Invalid value"),
        ("a = 1\na = 2\n", "2: this is not TOML: Cannot overwrite a value"),
        ("[a]\n[b]\n[a]\n", "3: this is not TOML: Cannot declare ('a',) twice"),
        ("a = 1\nb = [1,\n", "3: this is not TOML:"),
        ("a = " + "[" * 5000 + "]" * 5000, "1: this is nested more than 32 deep"),
        ("b = 1\n" + "a." * 100_000 + "c = 1", "2: this is nested more than 32 deep"),
        ("[" + '\'a\'."\\"".' * 10_000 + "c]", "1: this is nested more than 32 deep"),
        ("x = {" + "a." * 100_000 + "c = 1}", "1: this is nested more than 32 deep"),
        ("a = " + "9" * 5000, "1: a number has too many digits"),
    ],
)
def test_what_is_not_toml_is_said_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_toml(text)
    assert sentence in f"{caught.value.line}: {caught.value.sentence}"


STRINGS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
KEYS = st.sampled_from(["a", "b-c", "d_1", '"x y"', "'lit.key'", '"esc\\"aped"', "0"])


def inline(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def pairs(found: dict[str, str]) -> str:
        return "{ " + ", ".join(f"{key} = {value}" for key, value in found.items()) + " }"

    def items(found: list[str]) -> str:
        return "[ " + "".join(f"{one} ,# , ]\n" for one in found) + "]"

    return st.lists(inner, max_size=3).map(items) | st.dictionaries(KEYS, inner, max_size=3).map(pairs)


VALUES = st.recursive(
    st.sampled_from(
        ["1", "true", "1.5e3", "1979-05-27", "''", '"""\n[x]\ny = 1 \\""""', "'''\n]'''", '"a#b"', '"\\\\"']
    ),
    inline,
    max_leaves=8,
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=5), st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_no_key_is_without_a_line(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
    text = "".join(f"{key} = {value} # end\n" for key, value in dict(first).items())
    text += "[[t.'u v']]\n" + "".join(f"{key} = {value}\n" for key, value in dict(second).items())
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # the same key in two spellings
    page = read_toml(text)
    assert set(page.lines) == set(paths(page.data))


@given(st.text(st.sampled_from("ab=[]{}\"'#., \n\t1\\"), max_size=60))
def test_whatever_is_written_there_is_data_or_refused(text: str) -> None:
    try:
        page = read_toml(text)
    except UnreadableError:
        return
    assert set(page.lines) == set(paths(page.data))
