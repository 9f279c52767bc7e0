"""What is refused when a scenario is read, and not only when its run has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostler.errors import DefinitionError
from ostler.simulation import load_scenario

SCENARIO = """\
name = "small"
engine = "model:Rules"
[parameters]
tax = 0.1
rates = { low = 1 }
[brains]
one = "model:One"
[[agents]]
name = "a"
kind = "one"
"""
RULES = "class Rules:\n    def update(self, state, decisions, world): ...\n"
ONE = "class One:\n    def decide(self, view): ...\n"


def faults(folder: Path, text: str = SCENARIO, code: str = RULES + ONE, **overrides: Any) -> list[str]:
    """`parameters__tax` stands for `parameters.tax`."""
    (folder / "model.py").write_text(code)
    path = folder / "s.toml"
    path.write_text(text)
    try:
        load_scenario(path, overrides={key.replace("__", "."): value for key, value in overrides.items()})
    except DefinitionError as error:
        return [fault.message.removeprefix(f"{path}:") for fault in error.faults]
    return []


def test_a_parameter_that_the_file_does_not_have_is_taken_for_a_slip(tmp_path: Path) -> None:
    assert faults(tmp_path, parameters__taxx=1, parameters__zeal__deep=1) == [
        (
            "override: parameters.taxx is not among the parameters; did you mean parameters.tax? If not, "
            "write it into the file first"
        ),
        "override: parameters.zeal.deep is not among the parameters; if it is one, write it into the file first",
    ]
    assert faults(tmp_path, parameters__tax=2, parameters__rates__high=3) == []
    assert faults(tmp_path, parameters={"whole": 1}) == []


def test_a_file_without_parameters_takes_any(tmp_path: Path) -> None:
    without = SCENARIO.replace("[parameters]\ntax = 0.1\nrates = { low = 1 }\n", "")
    assert faults(tmp_path, without, parameters__zeal=1, parameters__tax=2) == []


@pytest.mark.parametrize("place", ["-1", "+0", " 0", "1", "x", "\u0661", ""])
def test_an_entry_of_a_list_is_named_by_its_place(tmp_path: Path, place: str) -> None:
    (sentence,) = faults(tmp_path, SCENARIO, RULES + ONE, **{f"agents.{place}.count": 2})
    assert "cannot be set: what it stands in has no such place" in sentence


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("def update(self, state): ...", "too many positional arguments"),
        ("def update(self, state, decisions, world, more): ...", "missing a required argument: 'more'"),
        ("def update(state, decisions, world): ...", "too many positional arguments"),
        ("@staticmethod\n    def update(state): ...", "too many positional arguments"),
    ],
)
def test_an_engine_must_take_what_it_is_given(tmp_path: Path, engine: str, said: str) -> None:
    assert faults(tmp_path, code=f"class Rules:\n    {engine}\n{ONE}") == [
        f"2: engine names model:Rules, whose method `update` must take state, decisions, world, but there is {said}"
    ]


@pytest.mark.parametrize("method", ["decide", "__call__"])
def test_a_brain_must_take_a_view(tmp_path: Path, method: str) -> None:
    for arguments, said in (("self", "too many positional arguments"), ("self, a, b", "missing a required argument")):
        (sentence,) = faults(tmp_path, code=f"{RULES}class One:\n    def {method}({arguments}): ...\n")
        assert f"7: brains.one names model:One, whose method `{method}` must take view, but there is {said}" in sentence


@pytest.mark.parametrize(
    "brain",
    [
        "class One:\n    async def decide(self, view, *, more=1): ...",
        "class One:\n    def decide(self, *everything): ...",
        "class One:\n    @classmethod\n    def decide(cls, view): ...",
        "class One:\n    @staticmethod\n    def decide(view): ...",
        "class One:\n    decide = print",
        "class One:\n    def __call__(self, view): ...",
        "class Base:\n    def decide(self, view): ...\nclass One(Base): ...",
        "def One():\n    return print",
    ],
)
def test_brains_of_every_fitting_shape_are_taken(tmp_path: Path, brain: str) -> None:
    assert faults(tmp_path, code=f"{RULES}{brain}\n") == []
