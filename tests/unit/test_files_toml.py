from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.definitions.parse import UnreadableError, read_toml
from ostler.model.validation import named

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


def test_every_table_and_every_key_at_the_beginning_of_a_line_has_its_line() -> None:
    assert read_toml(EVERYTHING).lines == {
        "top": 2,
        "quoted key": 3,
        "li.teral": 7,
        "a": 10,
        "a.b": 10,
        "a.b.c": 10,
        "date": 15,
        "table": 16,
        "table.in ner": 16,
        "table.in ner.x": 17,
        "many": 18,
        "many.0": 18,
        "many.0.n": 19,
        "many.0.sub": 20,
        "many.0.sub.s": 21,
        "many.1": 22,
        "many.1.n": 23,
    }


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
def test_no_key_of_the_file_is_without_a_line(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
    text = "".join(f"{key} = {value} # end\n" for key, value in dict(first).items())
    text += "[[t.'u v']]\n" + "".join(f"{key} = {value}\n" for key, value in dict(second).items())
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # the same key in two spellings
    document = read_toml(text)
    assert set(document.data) <= set(document.lines)


@given(st.text(st.sampled_from("ab=[]{}\"'#., \n\t1\\"), max_size=60))
def test_whatever_is_written_there_is_data_or_refused(text: str) -> None:
    try:
        document = read_toml(text)
    except UnreadableError:
        return
    assert {named(key) for key in document.data} <= set(document.lines)
