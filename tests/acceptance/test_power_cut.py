"""A power cut at any moment loses nothing that was acknowledged and corrupts nothing."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from kill_points import strace_missing
from power_cut import Disk, Step, recorded
from store_ground import verified
from store_invariants import invariant_faults

from ostler.clock import SystemClock
from ostler.store.store import Store

#: Printed when a test fails; the same seed makes the same images.
_SEED = 20261115
_DONE = "SELECT instance_id, id FROM requests WHERE state = 'done'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = strace_missing()
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    return tmp_path_factory.mktemp("power")


def faults_after_cuts(steps: list[Step], folder: Path, images: int) -> Iterator[str]:
    """Cut at so many moments, spread over the whole run, and look at what is left each time."""
    chance = random.Random(_SEED)
    cuts = sorted(chance.choices(range(1, len(steps) + 1), k=images))
    disk, done = Disk(), 0
    for number, cut in enumerate(cuts):
        for step in steps[done:cut]:
            disk.take(step)
        done = cut
        place = folder / f"image-{number}"
        place.mkdir(parents=True)
        disk.image(place, chance)
        yield from (f"cut {cut} of {len(steps)} (seed {_SEED}): {fault}" for fault in look(place, disk))


def look(place: Path, disk: Disk) -> list[str]:
    """What is wrong with an image: it is corrupt, or something acknowledged is not in it."""
    path = place / "ostler.db"
    if not path.exists():
        return ["the file is gone"] if disk.acknowledged else []
    connection = sqlite3.connect(path)
    try:
        sound = connection.execute("PRAGMA quick_check").fetchone()[0]
        if sound != "ok":
            return [f"corrupt: {sound}"]
        if not disk.acknowledged:
            return []
        versions = dict(connection.execute("SELECT id, version FROM agent_instances"))
        waits = dict(connection.execute("SELECT id, outcome FROM waits"))
        requests = {(key, name) for key, name in connection.execute(_DONE)}
        heard = dict(connection.execute("SELECT instance_id, heard FROM attempts WHERE number = 1"))
    except sqlite3.DatabaseError as error:
        return [f"corrupt: {error}"]
    finally:
        connection.close()
    faults = []
    for line in disk.acknowledged:
        key, said = UUID(line["id"]).bytes, line["said"]
        match line["kind"]:
            case "instance":
                kept = versions.get(key, 0) >= said
            case "wait":
                kept = waits.get(key) == said
            case "request":
                kept = (key, said) in requests
            case _:
                kept = heard.get(key, 0) >= said
        if not kept:
            faults.append(f"{line} was acknowledged and is not there")
    return faults


@pytest.mark.timeout(120)
def test_a_power_cut_at_any_moment_loses_nothing_acknowledged(folder: Path) -> None:
    steps = recorded(folder / "run")
    assert sum(step.kind == "ack" for step in steps) > 15
    assert list(faults_after_cuts(steps, folder / "images", 200)) == []


@pytest.mark.timeout(120)
def test_what_a_power_cut_leaves_can_be_opened_and_used(folder: Path) -> None:
    steps = recorded(folder / "use")
    disk, chance = Disk(), random.Random(_SEED)
    for number, step in enumerate(steps):
        disk.take(step)
        if number % 60 == 59:
            place = folder / f"use-{number}"
            place.mkdir()
            disk.image(place, chance)
            assert asyncio.run(_opens(place)), f"cut {number}"


async def _opens(place: Path) -> bool:
    async with Store(place) as store:
        assert await invariant_faults(store, SystemClock().wall()) == []
        return (await verified(store)).is_sound


@pytest.mark.timeout(120)
def test_the_harness_goes_red_when_commits_are_not_synced(folder: Path) -> None:
    """With `synchronous=NORMAL` acknowledged rows do get lost; were that not seen, the others would prove nothing."""
    steps = recorded(folder / "lax", "--lax")
    assert any("is not there" in fault for fault in faults_after_cuts(steps, folder / "lax-images", 400))


@pytest.mark.torture
def test_ten_thousand_power_cuts_lose_nothing(folder: Path) -> None:
    steps = recorded(folder / "many")
    assert list(faults_after_cuts(steps, folder / "many-images", 10_000)) == []
