"""The number behind a name, and the counters that fall together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostler.simulation.countdown import Countdown
from ostler.simulation.members import Member
from ostler.simulation.naming import NameBook

# --- names --------------------------------------------------------------------------------------


def probed(name: str, taken: set[str]) -> str:
    """The rule as it is written down: one number after the other."""
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


_SUFFIX = st.one_of(st.integers(0, 7).map(str), st.sampled_from(["01", "1_1", "²", "x", "", "-1", "9" * 15, "9" * 16]))
_NAMES = st.one_of(
    st.sampled_from(["a", "b", "a_", "_a", "_"]), st.tuples(st.sampled_from("ab"), _SUFFIX).map("_".join)
)


@settings(max_examples=200)
@given(st.lists(_NAMES, max_size=60))
def test_the_lowest_free_number_is_the_one_that_counting_up_would_find(names: list[str]) -> None:
    book, taken = NameBook(), set[str]()
    for name in names:  # a name that is there goes, one that is not comes
        if name in taken:
            taken.remove(name)
            book.free(name)
        else:
            taken.add(name)
            book.take(name)
        assert {base: book.numbered(base) for base in ("a", "b", "a_1")} == {
            base: probed(base, taken) for base in ("a", "b", "a_1")
        }
    for name in taken:
        book.free(name)
    assert book.numbered("a") == "a_1"


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=10, max_size=60))
def test_holes_are_filled_from_below_however_they_came(moves: list[tuple[bool, int]]) -> None:
    book, taken = NameBook(), set[str]()
    for comes, number in moves:
        name = book.numbered("a") if comes else f"a_{number}"
        if comes or name not in taken:
            assert name not in taken
            taken.add(name)
            book.take(name)
        else:
            taken.remove(name)
            book.free(name)
        assert book.numbered("a") == probed("a", taken)


def test_a_hole_below_the_highest_is_gone_when_the_highest_goes() -> None:
    book = NameBook()
    for number in (1, 2, 3, 4):
        book.take(f"a_{number}")
    for number in (3, 2, 4):
        book.free(f"a_{number}")
    given = []
    for _ in range(3):
        given.append(book.numbered("a"))
        book.take(given[-1])
    assert given == ["a_2", "a_3", "a_4"]


def test_numbers_taken_by_name_leave_no_growing_heap_behind() -> None:
    book = NameBook()
    for number in range(1, 51):
        book.take(f"a_{number}")
    for _ in range(1_000):
        book.free("a_7")
        book.take("a_7")
    book.free("a_7")
    (numbers,) = book._numbers.values()  # noqa: SLF001 - what it costs is not to be seen from outside
    assert len(numbers._heap) <= 20  # noqa: SLF001 - as above
    assert book.numbered("a") == "a_7"


def test_a_name_that_nobody_has_any_more_is_forgotten() -> None:
    book = NameBook()
    for number in (3, 1, 2):
        book.take(f"a_{number}")
    for number in (1, 3, 2):
        book.free(f"a_{number}")
    assert not book._numbers  # noqa: SLF001 - what it costs is not to be seen from outside


# --- counters -----------------------------------------------------------------------------------


def counting(*names: str, tick: int = 0) -> tuple[Countdown, dict[str, Member]]:
    members = {name: Member(name, number, None, {}) for number, name in enumerate(names)}
    return Countdown(members, tick), members


def stepped(counters: Countdown) -> list[str]:
    return [member.name for member in counters.step()]


def test_a_counter_shows_what_is_left_and_falls_due_at_its_end() -> None:
    counters, _ = counting("a", "b", "c")
    counters.begin("a", 2)
    counters.begin("b", 1)
    assert (len(counters), sorted(counters)) == (2, ["a", "b"])
    assert ("a" in counters, "c" in counters, "nobody" in counters) == (True, False, False)
    assert (counters.left("a"), counters.due("a"), counters.due("c"), counters.due("nobody")) == (2, 2, None, None)
    assert counters.next_is_due
    assert stepped(counters) == ["b"]
    assert (counters.left("a"), counters.due("b"), "b" in counters) == (1, None, False)
    assert stepped(counters) == ["a"]
    assert (stepped(counters), len(counters), counters.next_is_due) == ([], 0, False)


@pytest.mark.parametrize("name", ["a", "nobody"])
def test_who_does_not_count_has_nothing_left(name: str) -> None:
    counters, _ = counting("a")
    with pytest.raises(KeyError, match=name):
        counters.left(name)


def test_a_counter_begun_again_has_the_new_term_only() -> None:
    counters, _ = counting("a", tick=40)
    for steps in (1, 3, 1, 3):
        counters.begin("a", steps)
    assert not counters.next_is_due
    assert list(counters) == ["a"]
    assert [stepped(counters) for _ in range(4)] == [[], [], ["a"], []]


def test_a_counter_that_ended_never_falls_due() -> None:
    counters, members = counting("a", "b")
    counters.begin("a", 1)
    for member in members.values():
        counters.end(member)
    assert not counters.next_is_due
    assert (stepped(counters), list(counters), list(counters.faults())) == ([], [], [])


def test_a_namesake_does_not_inherit_a_counter() -> None:
    counters, members = counting("a")
    counters.begin("a", 1)
    counters.end(members.pop("a"))
    members["a"] = Member("a", 7, None, {})
    assert (stepped(counters), counters.due("a")) == ([], None)


def test_pausing_and_resuming_without_end_holds_no_more_than_who_counts() -> None:
    counters, members = counting("a", "b")
    counters.set_due("b", 5)
    for _ in range(1_000):
        counters.set_due("a", 5)
        counters.end(members["a"])
    term = members["b"].term
    assert term is not None
    assert len(term.members) <= 20
    assert (list(counters), list(counters.faults())) == (["b"], [])


def test_a_counter_of_nothing_is_told() -> None:
    counters, members = counting("a")
    counters.begin("a", 1)
    assert list(counters.faults()) == []
    counters.tick = 3
    assert list(counters.faults()) == ["the counter of 'a' is -2, and must be at least 1"]
    members["a"].term = None
    assert list(counters.faults()) == ["the counters and their order of falling due disagree"]
