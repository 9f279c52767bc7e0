"""Questions about instances: every filter against a plain loop, pages, statistics."""

# ruff: noqa: S101, S311 - a suite speaks by assert; the draw is of test cases, from a fixed seed

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from ostler.errors import ValidationError
from ostler.model import (
    AgentHealthStatus,
    AgentInstance,
    AgentState,
    GetInstancesFilter,
    HealthState,
    Tier,
)
from ostler.store import Actor, Store
from ostler.store.commands import ReportHealth
from ostler.testing.clock import ManualClock
from ostler.testing.folding import all_instances, statistics_faults
from ostler.testing.store_suite.ground import (
    HOME,
    StoreGround,
    brought_to,
    moved,
    new_workspace,
    reserved,
    restarted,
)

NAMES = ("Scout", "scout-2", "100%", "100 percent", "a_b", "axb", "a\\b", "STRASSE", "straße", "Ünal*", None)
PATTERNS = (
    "scout", "SCOUT*", "*out*", "100%", "1*", "%", "_", "a_b", "a?b", "a\\b", "a\\*", "*", "**", "straße",
    "*STRASSE*", "ü*", "*\\*", "*b", "", "no such", "[a]*", "a*b*",
)  # fmt: skip
OWNERS = (UUID(int=0xA), UUID(int=0xB), None)
DEFINITIONS = (UUID(int=0xD1), UUID(int=0xD2))
TAGS = ((), ("blue",), ("blue", "fast"), ("FAST",))


def fits(one: AgentInstance, wanted: GetInstancesFilter) -> bool:
    """The contract in plain words; deliberately not the code that any store uses."""
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
            name=name,
            tags=draw.choice(TAGS),
            definition_id=draw.choice(DEFINITIONS),
            by=Actor(name="someone", principal_id=draw.choice(OWNERS)),
        )
        if made.is_active and number % 3:
            health = AgentHealthStatus(state=draw.choice(list(HealthState)))
            await store.commit(ReportHealth(instance_id=made.instance_id, health=health))
    return await all_instances(store, HOME)


def single_filters() -> Iterator[GetInstancesFilter]:
    yield GetInstancesFilter()
    yield from (GetInstancesFilter(state=state) for state in AgentState)
    for everything in (False, True):
        yield GetInstancesFilter(include_terminated=everything)
        yield from (GetInstancesFilter(health_state=one, include_terminated=everything) for one in HealthState)
        yield from (GetInstancesFilter(name_pattern=one, include_terminated=everything) for one in PATTERNS)
        yield from (GetInstancesFilter(tag=one, include_terminated=everything) for one in ("blue", "Fast", "none"))
        yield from (GetInstancesFilter(owner_id=one, include_terminated=everything) for one in OWNERS)
        yield from (GetInstancesFilter(definition_id=one, include_terminated=everything) for one in DEFINITIONS)


def drawn_filters(everything: list[AgentInstance], count: int) -> Iterator[GetInstancesFilter]:
    draw = random.Random(11)
    for _ in range(count):
        yield GetInstancesFilter(
            state=draw.choice([None, None, None, *AgentState]),
            health_state=draw.choice([None, None, *HealthState]),
            tag=draw.choice([None, None, "BLUE", "fast"]),
            definition_id=draw.choice([None, *DEFINITIONS]),
            owner_id=draw.choice(OWNERS),
            name_pattern=draw.choice([None, None, *PATTERNS]),
            include_terminated=draw.random() < 0.7,
            limit=draw.choice([1, 3, 100]),
            offset=draw.choice([0, 0, 2]),
            before=draw.choice([None, draw.choice(everything).instance_id]),
        )


class AskingContract(StoreGround):
    async def test_every_filter_gives_what_a_plain_loop_gives(self, store: Store, clock: ManualClock) -> None:
        everything = await populate(store, clock)
        assert len(everything) == 44
        hits = 0
        for wanted in (*single_filters(), *drawn_filters(everything, 300)):
            found = await store.list_instances(wanted)
            assert found == expected(everything, wanted), wanted
            hits += bool(found)
        assert hits > 80, "a comparison of empty lists proves little"

    async def test_pages_by_offset_and_by_last_id_are_the_same_and_complete(
        self, store: Store, clock: ManualClock
    ) -> None:
        for number in range(23):
            clock.advance(0.01)
            await reserved(store, f"n{number}", tags=("t",))
        for wanted in (GetInstancesFilter(limit=5), GetInstancesFilter(limit=5, tag="T", name_pattern="n*")):
            by_offset: list[AgentInstance] = []
            by_last: list[AgentInstance] = []
            for page in range(5):
                by_offset += await store.list_instances(wanted.evolve(offset=5 * page))
                before = by_last[-1].instance_id if by_last else None
                by_last += await store.list_instances(wanted.evolve(before=before))
            assert [one.name for one in by_offset] == [f"n{number}" for number in reversed(range(23))]
            assert by_last == by_offset

    async def test_a_workspace_shows_only_its_own(self, store: Store) -> None:
        other = await new_workspace(store, Tier.TEAMS)
        mine, theirs = (
            await reserved(store, "a", tags=("t",)),
            await reserved(store, "a", tags=("t",), workspace_id=other),
        )
        for wanted in (GetInstancesFilter(), GetInstancesFilter(tag="t"), GetInstancesFilter(name_pattern="a")):
            assert await store.list_instances(wanted) == [mine]
            assert await store.list_instances(wanted, other) == [theirs]

    async def test_statistics_are_what_counting_gives(self, store: Store, clock: ManualClock) -> None:
        everything = await populate(store, clock)
        failed = next(one for one in everything if one.state is AgentState.FAILED)
        clock.advance(60)
        await restarted(store, failed)
        clock.advance(0.5)
        assert await statistics_faults(store, HOME, clock.wall()) == []
        told = await store.statistics()
        assert (told.total_spawned, told.total_restarts) == (44, 1)
        assert told.average_uptime > timedelta(0)

    async def test_an_empty_workspace_has_statistics_of_nothing(self, store: Store) -> None:
        told = await store.statistics()
        assert (told.active_instances, told.total_spawned, told.average_uptime) == (0, 0, timedelta(0))
        assert set(told.by_state) == set(AgentState)
        assert set(told.by_health) == set(HealthState)

    async def test_a_clock_that_is_set_back_makes_no_life_shorter_than_nothing(
        self, store: Store, clock: ManualClock
    ) -> None:
        made = await brought_to(store, AgentState.TERMINATING)
        clock.jump(timedelta(hours=-1))
        assert (await store.statistics()).average_uptime == timedelta(0)
        await moved(store, made, AgentState.TERMINATED)
        assert (await store.statistics()).average_uptime == timedelta(0)

    @pytest.mark.parametrize("wanted", [{"limit": 0}, {"limit": 1001}, {"offset": -1}, {"tag": "%"}, {"before": 1}])
    async def test_a_filter_out_of_bounds_is_refused_by_field(self, store: Store, wanted: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=next(iter(wanted))):
            await store.list_instances(GetInstancesFilter(**wanted))
