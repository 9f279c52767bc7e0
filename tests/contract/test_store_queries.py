"""Questions about instances: every filter against a plain loop, pages, the search for one, statistics."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from store_ground import (
    HOME,
    brought_to,
    current,
    failed,
    finished,
    moved,
    new_wait,
    new_workspace,
    readied,
    ready,
    reserved,
    restarted,
)
from store_invariants import all_instances, statistics_faults

from ostler.model.instance import AgentHealthStatus, AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import AgentSpawnOptions
from ostler.model.states import AgentState, HealthState, Tier
from ostler.model.wait import WaitKind
from ostler.store import queries, reports
from ostler.store.queries import like_pattern, list_instances
from ostler.store.store import Store
from ostler.store.transaction import Reader
from ostler.testing.clock import ManualClock

pytestmark = pytest.mark.anyio

NAMES = ("Scout", "scout-2", "100%", "100 percent", "a_b", "axb", "a\\b", "STRASSE", "straße", "Ünal*", None)
PATTERNS = (
    "scout", "SCOUT*", "*out*", "100%", "1*", "%", "_", "a_b", "a?b", "a\\b", "a\\*", "*", "**", "straße",
    "*STRASSE*", "ü*", "*\\*", "*b", "", "no such", "[a]*", "a*b*", "*%", "*_b", "*\\b",
)  # fmt: skip
OWNERS = (UUID(int=0xA), UUID(int=0xB), None)
DEFINITIONS = (UUID(int=0xD1), UUID(int=0xD2))
TASKS = (UUID(int=0x71), UUID(int=0x72), None)
CREWS = ("red", "blue", None)
TAGS = ((), ("blue",), ("blue", "fast"), ("FAST",))


def fits(one: AgentInstance, wanted: GetInstancesFilter) -> bool:
    """The contract in plain words; deliberately not the code of the store."""
    shown = wanted.include_terminated or wanted.state is not None
    if not shown and one.state in {AgentState.TERMINATED, AgentState.FAILED}:
        return False
    if wanted.name_pattern is not None:
        rule = "".join("[^\\n]*" if char == "*" else re.escape(char) for char in wanted.name_pattern.casefold())
        if one.name is None or not re.fullmatch(rule, one.name.casefold()):
            return False
    return (
        (wanted.state is None or one.state == wanted.state)
        and (wanted.health_state is None or one.health.state == wanted.health_state)
        and (wanted.tag is None or wanted.tag.lower() in one.tags)
        and (wanted.definition_id is None or one.definition_id == wanted.definition_id)
        and (wanted.owner_id is None or one.owner_id == wanted.owner_id)
        and (wanted.task_id is None or one.task_id == wanted.task_id)
        and (wanted.crew is None or one.crew == wanted.crew)
    )


def expected(everything: list[AgentInstance], wanted: GetInstancesFilter) -> list[AgentInstance]:
    chosen = sorted((one for one in everything if fits(one, wanted)), key=lambda one: one.instance_id, reverse=True)
    if wanted.before is not None:
        chosen = [one for one in chosen if one.instance_id < wanted.before]
    return chosen[wanted.offset : wanted.offset + wanted.limit]


async def populate(store: Store, clock: ManualClock) -> list[AgentInstance]:
    """Instances of every kind, in no regular order."""
    draw = random.Random(7)
    for number, name in enumerate(itertools.islice(itertools.cycle(NAMES), 44)):
        clock.advance(draw.random())
        made = await brought_to(
            store,
            draw.choice(list(AgentState)),
            name,
            tags=draw.choice(TAGS),
            definition_id=draw.choice(DEFINITIONS),
            owner_id=draw.choice(OWNERS),
            task_id=draw.choice(TASKS),
            crew=draw.choice(CREWS),
        )
        if made.is_active and number % 3:
            health = AgentHealthStatus(state=draw.choice(list(HealthState)))
            await store.run(reports.report_health, made, health)
    return await store.read(all_instances, HOME)


def single_filters() -> Iterator[GetInstancesFilter]:
    yield from (GetInstancesFilter(state=state) for state in AgentState)
    for ended in (False, True):
        yield GetInstancesFilter(include_terminated=ended)
        yield from (GetInstancesFilter(health_state=one, include_terminated=ended) for one in HealthState)
        yield from (GetInstancesFilter(name_pattern=one, include_terminated=ended) for one in PATTERNS)
        yield from (GetInstancesFilter(tag=one, include_terminated=ended) for one in ("blue", "Fast", "none"))
        yield from (GetInstancesFilter(owner_id=one, include_terminated=ended) for one in OWNERS)
        yield from (GetInstancesFilter(definition_id=one, include_terminated=ended) for one in DEFINITIONS)
        yield from (GetInstancesFilter(task_id=one, include_terminated=ended) for one in TASKS)
        yield from (GetInstancesFilter(crew=one, include_terminated=ended) for one in CREWS)


def drawn_filters(everything: list[AgentInstance], number: int) -> Iterator[GetInstancesFilter]:
    draw = random.Random(11)
    for _ in range(number):
        yield GetInstancesFilter(
            state=draw.choice([None, None, None, *AgentState]),
            health_state=draw.choice([None, None, *HealthState]),
            tag=draw.choice([None, None, "BLUE", "fast"]),
            definition_id=draw.choice([None, *DEFINITIONS]),
            owner_id=draw.choice(OWNERS),
            name_pattern=draw.choice([None, None, *PATTERNS]),
            task_id=draw.choice([None, None, *TASKS]),
            crew=draw.choice([None, None, *CREWS]),
            include_terminated=draw.random() < 0.7,
            limit=draw.choice([1, 3, 100]),
            offset=draw.choice([0, 0, 2]),
            before=draw.choice([None, draw.choice(everything).instance_id]),
        )


# --- lists -------------------------------------------------------------------------------------------


async def test_every_filter_gives_what_a_plain_loop_gives(store: Store, clock: ManualClock) -> None:
    everything = await populate(store, clock)
    assert len(everything) == 44
    hits = 0
    for wanted in (*single_filters(), *drawn_filters(everything, 300)):
        found = await store.read(list_instances, wanted.checked(), HOME)
        assert found == expected(everything, wanted), wanted
        hits += bool(found)
    assert hits > 80, "a comparison of empty lists proves little"


async def test_pages_by_offset_and_by_last_id_are_the_same_and_complete(store: Store) -> None:
    for number in range(23):
        await reserved(store, f"n{number}", tags=("t",))
    for wanted in (GetInstancesFilter(limit=5), GetInstancesFilter(limit=5, tag="T", name_pattern="n*")):
        by_offset: list[AgentInstance] = []
        by_last: list[AgentInstance] = []
        for page in range(5):
            by_offset += await store.read(list_instances, wanted.evolve(offset=5 * page), HOME)
            before = by_last[-1].instance_id if by_last else None
            by_last += await store.read(list_instances, wanted.evolve(before=before), HOME)
        assert [one.name for one in by_offset] == [f"n{number}" for number in reversed(range(23))]
        assert by_last == by_offset


async def test_a_list_shows_only_the_instances_of_its_workspace(store: Store) -> None:
    other = await new_workspace(store, Tier.TEAMS)
    mine = await reserved(store, "a", tags=("t",))
    theirs = await reserved(store, "a", tags=("t",), workspace_id=other)
    for wanted in (GetInstancesFilter(), GetInstancesFilter(tag="t"), GetInstancesFilter(name_pattern="a")):
        assert await store.read(list_instances, wanted, HOME) == [mine]
        assert await store.read(list_instances, wanted, other) == [theirs]


async def test_what_waits_for_its_restart_is_listed_where_it_is_asked_for(store: Store) -> None:
    alive, crashed = [await ready(store, name, tags=("t",)) for name in ("alive", "crashed")]
    await failed(store, await ready(store, "over", tags=("t",)))
    wait = new_wait(crashed, kind=WaitKind.BACKOFF)
    crashed = await failed(store, crashed, backoff=wait)
    for tag in (None, "t"):
        asking = GetInstancesFilter(include_restarting=True, tag=tag)
        assert await store.read(list_instances, asking, HOME) == [crashed, alive]
        assert await store.read(list_instances, asking.evolve(include_restarting=False), HOME) == [alive]
    back = await restarted(store, crashed, wait.wait_id)
    assert await store.read(list_instances, GetInstancesFilter(include_restarting=True), HOME) == [back, alive]


async def test_no_pattern_takes_long(store: Store) -> None:
    await reserved(store, "a" * 200)
    begin = time.perf_counter()
    for pattern, number in (("*a" * 40 + "b", 0), ("*a" * 40 + "*", 1), ("*" * 200, 1)):
        wanted = GetInstancesFilter(name_pattern=pattern).checked()
        assert len(await store.read(list_instances, wanted, HOME)) == number
    assert time.perf_counter() - begin < 2


def test_only_a_star_is_a_wildcard() -> None:
    assert like_pattern("A%_\\*b**") == "a\\%\\_\\\\%b%"


async def test_a_thousand_instances_are_listed_within_the_time_of_the_seed(store: Store) -> None:
    await asyncio.gather(*(reserved(store, f"n{number}", tags=("t",)) for number in range(1000)))
    times = [await store.read(_time_of_a_list) for _ in range(5)]
    assert min(times) < 0.1, "the seed allows 100 ms"


def _time_of_a_list(reader: Reader) -> float:
    """By the clock of the thread: what other programs do meanwhile does not count."""
    begin = time.thread_time()
    assert len(list_instances(reader, GetInstancesFilter(limit=1000), HOME)) == 1000
    return time.thread_time() - begin


async def test_what_one_reader_does_to_a_record_changes_no_other(store: Store) -> None:
    options = AgentSpawnOptions(env={"A": "1"})
    made = await reserved(store, context={"a": [1]}, spawn_options=options)
    first: Any = await current(store, made)
    first.context["a"].append(2)
    first.spawn_options.env["A"] = "2"
    second = await current(store, made)
    assert (second.context, second.spawn_options) == ({"a": [1]}, AgentSpawnOptions(env={"A": "1"}))


# --- one by name or short id -------------------------------------------------------------------------


async def test_an_instance_is_found_by_id_by_name_and_by_a_part_of_its_id(store: Store) -> None:
    one, two = await ready(store, "coder"), await ready(store, "Coder")
    other = await new_workspace(store, Tier.TEAMS)
    theirs = await ready(store, "coder", workspace_id=other)

    async def found(text: str, space: UUID = HOME) -> list[AgentInstance]:
        return await store.read(queries.find_instances, text, space)

    assert await found(str(one.instance_id)) == [one]
    assert await found(one.instance_id.hex) == [one]
    assert await found(str(theirs.instance_id)) == [], "one of another workspace is not found"
    assert await found("coder") == [one], "a name is found as it is written"
    assert await found("Coder") == [two]
    assert await found("coder", other) == [theirs]
    assert await found(one.instance_id.hex[-8:]) == [one]
    assert await found(one.instance_id.hex[-8:].upper()) == [one]
    assert await found(one.instance_id.hex[:6]) == [two, one], "newest first"
    assert await found("abc") == []
    assert await found("no such name") == []
    assert await found("") == []


async def test_an_active_instance_hides_ended_ones_of_its_name(store: Store) -> None:
    old = [await brought_to(store, AgentState.TERMINATED, "coder") for _ in range(2)]
    assert [one.instance_id for one in await store.read(queries.find_instances, "coder", HOME)] == [old[1].instance_id]
    alive = [await ready(store, "coder") for _ in range(2)]
    found = await store.read(queries.find_instances, "coder", HOME)
    assert found == alive[::-1], "two that are active are for the caller to tell apart"


# --- statistics --------------------------------------------------------------------------------------


async def test_statistics_are_what_counting_gives(store: Store, clock: ManualClock) -> None:
    everything = await populate(store, clock)
    over = next(one for one in everything if one.state is AgentState.FAILED)
    clock.advance(60)
    await restarted(store, over)
    clock.advance(0.5)
    assert await store.read(statistics_faults, HOME, clock.wall()) == []
    told = await store.read(queries.statistics, HOME, clock.wall())
    spawned = sum(one.state is not AgentState.INITIALIZING for one in everything)
    ended = sum(one.state is AgentState.TERMINATED for one in everything)
    assert (told.total_spawned, told.total_terminated, told.total_restarts) == (spawned, ended, 1)
    assert told.average_uptime > timedelta(0)


async def test_restarts_by_policy_and_by_hand_are_counted(store: Store, clock: ManualClock) -> None:
    one = await ready(store)
    wait = new_wait(one, kind=WaitKind.BACKOFF)
    back = await readied(store, await restarted(store, await failed(store, one, backoff=wait), wait.wait_id))
    await restarted(store, await failed(store, back))
    assert (await store.read(queries.statistics, HOME, clock.wall())).total_restarts == 2


async def test_an_empty_workspace_has_statistics_of_zero_for_every_state(store: Store, clock: ManualClock) -> None:
    told = await store.read(queries.statistics, HOME, clock.wall())
    assert (told.active_instances, told.total_spawned, told.average_uptime) == (0, 0, timedelta(0))
    assert set(told.by_state) == set(AgentState)
    assert set(told.by_health) == set(HealthState)
    assert set(told.by_state.values()) | set(told.by_health.values()) == {0}


async def test_a_clock_that_is_set_back_makes_no_uptime_negative(store: Store, clock: ManualClock) -> None:
    made = await brought_to(store, AgentState.TERMINATING)
    clock.jump(timedelta(hours=-1))
    assert (await store.read(queries.statistics, HOME, clock.wall())).average_uptime == timedelta(0)
    await finished(store, made)
    assert (await store.read(queries.statistics, HOME, clock.wall())).average_uptime == timedelta(0)


async def test_one_uptime_that_the_clock_made_negative_shortens_no_other(store: Store, clock: ManualClock) -> None:
    await ready(store)
    clock.jump(timedelta(hours=3))
    await ready(store)  # made by a clock that was wrong
    clock.jump(timedelta(hours=-2))
    told = await store.read(queries.statistics, HOME, clock.wall())
    assert told.average_uptime == timedelta(minutes=30)


async def test_the_counts_of_all_workspaces_are_those_of_the_gauges(store: Store) -> None:
    other = await new_workspace(store, Tier.TEAMS)
    for state in (AgentState.READY, AgentState.READY, AgentState.FAILED):
        await brought_to(store, state)
    held = await brought_to(store, AgentState.TERMINATING, workspace_id=other)
    counts = await store.read(queries.state_counts)
    assert set(counts) == set(AgentState)
    assert (counts[AgentState.READY], counts[AgentState.FAILED], counts[AgentState.TERMINATING]) == (2, 1, 1)
    assert await store.read(queries.list_terminating) == [held.instance_id]
    await moved(store, held, AgentState.TERMINATED)
    assert await store.read(queries.list_terminating) == []
