from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostler
from ostler.clock import SystemClock, Timer
from ostler.failpoints import POINTS, FaultPlan, InjectedCrash, Seams, no_fault
from ostler.ids import Uuid7Source, uuid7
from ostler.store.store import Store
from ostler.store.transaction import Transaction
from ostler.testing.clock import ManualClock

NOW = datetime(2026, 3, 1, 12, 0, 0, 123_000, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)


@dataclass
class Hands:
    """A clock that stands where it is put."""

    now: datetime = NOW

    def mono(self) -> float:
        return self.now.timestamp()

    def boot(self) -> float:
        return self.now.timestamp()

    def wall(self) -> datetime:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        raise NotImplementedError


def source(clock: Hands) -> Uuid7Source:
    return Uuid7Source(clock, random.Random(1))


def millis(value: UUID) -> int:
    return value.int >> 80


@given(st.integers(0, 2**60), st.integers(0, 2**20), st.integers(0, 2**70))
def test_any_bits_make_a_version_7_of_the_right_variant(ms: int, counter: int, tail: int) -> None:
    value = uuid7(ms, counter, tail)
    assert value.version == 7
    assert value.variant == RFC_4122
    assert millis(value) == ms % 2**48
    assert (value.int >> 64) & 0xFFF == counter % 2**12
    assert value.int % 2**62 == tail % 2**62


def test_ids_carry_the_time_of_their_making() -> None:
    assert millis(source(Hands()).new()) == NOW_MS


def test_ids_of_one_millisecond_keep_their_order_even_past_its_counter() -> None:
    ids = source(Hands())
    made = [ids.new() for _ in range(10_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert millis(made[-1]) == NOW_MS + 2


def test_order_holds_as_text_and_as_bytes_too() -> None:
    ids = source(Hands())
    made = [ids.new() for _ in range(100)]
    assert [str(value) for value in made] == sorted(str(value) for value in made)
    assert [value.bytes for value in made] == sorted(value.bytes for value in made)


@given(st.lists(st.integers(-10_000, 10_000), max_size=50))
def test_ids_rise_however_the_clock_jumps(jumps: list[int]) -> None:
    clock = Hands()
    ids = source(clock)
    made = [ids.new()]
    for jump in jumps:
        clock.now += timedelta(milliseconds=jump)
        made.append(ids.new())
    assert made == sorted(set(made))


def test_threads_that_share_a_source_never_get_the_same_id() -> None:
    ids = Uuid7Source(SystemClock())
    made: list[list[UUID]] = [[] for _ in range(4)]

    def work(mine: list[UUID]) -> None:
        mine.extend(ids.new() for _ in range(2000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len({value for mine in made for value in mine}) == 8000


def test_the_system_clock_gives_aware_utc_and_rising_seconds() -> None:
    clock = SystemClock()
    assert clock.wall().utcoffset() == timedelta(0)
    assert clock.mono() <= clock.mono()
    assert clock.boot() <= clock.boot()


def test_in_production_a_fault_point_does_nothing() -> None:
    no_fault("store.commit.before")


def test_a_plan_acts_at_the_visit_it_names_and_only_there() -> None:
    plan = FaultPlan.parse("store.save.before:2:raise")
    plan("begin")
    plan("store.save.before")
    with pytest.raises(InjectedCrash, match=r"store\.save\.before"):
        plan("store.save.before")
    plan("store.save.before")
    assert plan.seen == ["begin", *["store.save.before"] * 3]


def test_a_crash_is_not_caught_by_mistake() -> None:
    assert not issubclass(InjectedCrash, Exception)


@pytest.mark.parametrize(("text", "nth", "action"), [("", 1, "raise"), (":3", 3, "raise"), (":3:kill", 3, "kill")])
def test_a_plan_is_read_from_text(text: str, nth: int, action: str) -> None:
    plan = FaultPlan.parse(f"store.ack.before{text}")
    assert (plan.name, plan.nth, plan.action) == ("store.ack.before", nth, action)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("store.ack.before:1:explode", "unknown fault action 'explode'"),
        ("store.ack.before:1:kill:now", "unknown fault action"),
        ("store.ack.before:x:raise", "invalid literal"),
        ("store.ack.before:0", "nth is counted from 1, so 0 never comes"),
        ("store.commit.befor:1:kill", r"no fault point 'store\.commit\.befor'; there are store\.commit\.before"),
        (":1:kill", "must name its point"),
    ],
)
def test_a_plan_that_could_never_act_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FaultPlan.parse(text)


@pytest.mark.parametrize(("key", "value"), [("nth", -1), ("nth", True), ("action", "explode"), ("name", "nowhere")])
def test_nor_can_it_be_made_or_changed_into_one(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=str(value).lower() if key != "nth" else "never comes"):
        FaultPlan(**{key: value})
    with pytest.raises(ValueError, match=r"never comes|unknown fault action|no fault point"):
        setattr(FaultPlan(), key, value)


def test_a_point_that_was_passed_may_be_named_whoever_passed_it() -> None:
    plan = FaultPlan()
    plan("another.store.flush")
    plan.name = "another.store.flush"
    with pytest.raises(InjectedCrash):
        plan("another.store.flush")


def test_the_points_are_those_of_the_code() -> None:
    source = Path(ostler.__file__).parent
    passed = re.compile(r"fault\(\"([a-z]+\.[a-z]+\.[a-z]+)\"\)")
    assert {name for file in source.rglob("*.py") for name in passed.findall(file.read_text())} == POINTS


def test_a_plan_can_fail_the_disk_or_be_slow() -> None:
    with pytest.raises(OSError, match=r"injected at store\.save\.before"):
        FaultPlan.parse("store.save.before:1:oserror")("store.save.before")
    FaultPlan.parse("store.save.before:1:sleep")("store.save.before")


def test_a_plan_can_kill_the_process_for_real() -> None:
    code = (
        "from ostler.failpoints import FaultPlan; FaultPlan.parse('store.ack.before:1:kill')('store.ack.before'); "
        "print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == -9
    assert "alive" not in done.stdout


def _new_id(tx: Transaction) -> UUID:
    return tx.ids.new()


async def _ids_of(seed: int) -> list[UUID]:
    async with Store(":memory:", Seams(clock=ManualClock(), chance=random.Random(seed))) as store:
        return [await store.run(_new_id) for _ in range(3)]


def test_the_same_clock_and_seed_give_the_same_ids() -> None:
    assert asyncio.run(_ids_of(1)) == asyncio.run(_ids_of(1)) != asyncio.run(_ids_of(2))
