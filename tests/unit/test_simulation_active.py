"""The dict that is filled when it is looked at is a dict in every way, and shows the moment it was taken."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from ostler.simulation.active import LateDict
from ostler.simulation.state import SimulationState

PLAIN = {"a": 1, "b": 2}


def late() -> LateDict:
    return LateDict.reading(lambda: PLAIN)


def _by_star(found: dict[str, Any]) -> Any:
    def call(**named: Any) -> Any:
        return named

    return call(**found)


def _by_match(found: dict[str, Any]) -> Any:
    match found:
        case {"a": first, **rest}:
            return first, rest
    return None


def _cleared(found: dict[str, Any]) -> Any:
    found.clear()
    return dict(found)


def _refused(act: Callable[[], object]) -> bool:
    with pytest.raises(TypeError):
        act()
    return True


def _popped(found: dict[str, Any]) -> Any:
    return found.pop("a"), dict(found)


def _updated(found: dict[str, Any]) -> Any:
    found |= {"c": 3}
    found.update(d=4)
    found["e"] = 5
    del found["a"]
    return found.setdefault("b", 9), found.setdefault("f", 6), found.popitem(), dict(found)


@dataclasses.dataclass
class Holder:
    held: dict[str, Any]


LOOKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "len": len,
    "bool": bool,
    "iter": list,
    "reversed": lambda found: list(reversed(found)),
    "keys": lambda found: list(found.keys()),
    "values": lambda found: list(found.values()),
    "items": lambda found: list(found.items()),
    "item": lambda found: found["b"],
    "get": lambda found: (found.get("a"), found.get("z"), found.get("z", 0)),
    "in": lambda found: ("a" in found, "z" in found),
    "repr": repr,
    "str": str,
    "format": lambda found: f"{found} %(a)s" % found,
    "format_map": "{a} {b}".format_map,
    "dict": dict,
    "star": lambda found: {**found},
    "call": _by_star,
    "or": lambda found: found | {"b": 3, "c": 3},
    "ror": lambda found: {"b": 3, "c": 3} | found,
    "into another": lambda found: ({"c": 3}.update(found), found)[1],
    "copy": lambda found: found.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),  # noqa: S301 - its own
    "json": json.dumps,
    "json, indented": lambda found: json.dumps(found, indent=1),
    "json, inside": lambda found: json.dumps([{"x": found}]),
    "asdict": lambda found: dataclasses.asdict(Holder(found)),
    "proxy": lambda found: dict(MappingProxyType(found)),
    "fromkeys": lambda found: (found.fromkeys("xy"), dict.fromkeys(found)),
    "sorted": lambda found: sorted(found, reverse=True),
    "set": set,
    "match": _by_match,
    "pop": _popped,
    "clear": _cleared,
    "write": _updated,
    "is a dict": lambda found: isinstance(found, dict),
    "equal": lambda found: found == PLAIN,
    "equal, other way": lambda found: PLAIN == found,  # noqa: SIM300 - the other way is what is tested
    "unequal": lambda found: (found != PLAIN, PLAIN != found, found == {}, {} == found),  # noqa: SIM300 - as above
    "equal to its like": lambda found: found == late(),
    "no order": lambda found: _refused(lambda: found < PLAIN),  # type: ignore[operator]  # the fault
    "no hash": lambda found: _refused(lambda: hash(found)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_the_late_dict_behaves_as_a_dict(look: Callable[[dict[str, Any]], Any]) -> None:
    assert look(late()) == look(dict(PLAIN))


def test_the_late_dict_knows_its_size_in_memory() -> None:
    assert sys.getsizeof(late()) >= sys.getsizeof({"a": 1})


def test_the_late_dict_reads_once_and_only_when_looked_at() -> None:
    reads = []

    def read() -> dict[str, Any]:
        reads.append(1)
        return PLAIN

    found = LateDict.reading(read)
    assert reads == []
    assert (len(found), found["a"], list(found)) == (2, 1, ["a", "b"])
    assert reads == [1]


def test_an_empty_late_dict_is_empty() -> None:
    found = LateDict.reading(dict)
    assert json.dumps(found) == "{}"
    assert not found
    assert not LateDict.reading(dict)


def test_what_is_written_to_a_late_dict_does_not_reach_its_source() -> None:
    late()["c"] = 3
    assert late() == PLAIN
    assert "c" not in PLAIN


def test_a_late_dict_can_be_made_as_any_dict() -> None:
    assert LateDict({"a": 1}, b=2) == LateDict([("a", 1), ("b", 2)]) == PLAIN


# --- the same, of a population ------------------------------------------------------------------

CHANGES: dict[str, Callable[[SimulationState], object]] = {
    "pause": lambda state: state.pause("a", None),
    "remove": lambda state: state.dismiss("a"),
    "add": lambda state: state.admit("d", len, {}),
    "resume": lambda state: state.resume("c"),
    "count down": lambda state: state.count_down(),
    "another brain": lambda state: state.agents.update(a=max),
    "clear": lambda state: state.agents.clear(),
    "pause all": lambda state: setattr(state, "paused_agents", ["a", "b"]),
}


@pytest.fixture
def population() -> SimulationState:
    return SimulationState(agents={"a": len, "b": min, "c": max}, paused_agents=["c"], auto_resume={"c": 1})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_taken_before_a_change_shows_what_was(
    population: SimulationState, change: Callable[[SimulationState], object]
) -> None:
    taken = population.active_agents()
    change(population)
    assert taken == {"a": len, "b": min}


def test_one_may_pause_while_walking_through_the_active(population: SimulationState) -> None:
    for name in population.active_agents():
        population.pause(name, None)
    assert population.active_agents() == {}
    assert set(population.paused_agents) == {"a", "b", "c"}


def test_many_that_nobody_looked_at_are_all_right_in_the_end(population: SimulationState) -> None:
    taken = [population.active_agents() for _ in range(40)]
    population.dismiss("a")
    assert all(one == {"a": len, "b": min} for one in taken)
    assert population._unread == []  # noqa: SLF001 - a leak is not to be seen from outside
