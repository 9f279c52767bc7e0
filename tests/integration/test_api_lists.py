"""What is long over HTTP: logs and lists come whole, in their order, and as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_served import Served, serving

from ostler.client.blocking import BlockingClient, DaemonError
from ostler.home import LOGS

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("home")) as daemon:
        yield daemon


async def call(served: Served, verb: str, **parameters: Any) -> Any:
    return await asyncio.to_thread(BlockingClient(served.home).call, verb, **parameters)


@pytest.mark.parametrize("count", [0, 1, 200, 201, 1234])
async def test_a_log_of_any_length_is_one_array(served: Served, count: int) -> None:
    spawn = {"command": ["sleep", "600"], "options": {"name": f"wrote-{count}"}}
    instance = (await call(served, "spawn", spawn=spawn))["instance_id"]
    text = "".join(f"line {number}\n" for number in range(count))
    (served.home / LOGS / instance).mkdir(parents=True, exist_ok=True)
    (served.home / LOGS / instance / "7.log").write_text(text)
    lines = await call(served, "logs", instance=instance, attempt=7)
    assert [line["text"] for line in lines] == text.splitlines()
    assert await call(served, "logs", instance=instance, attempt=7, tail=10) == lines[-10:]
    await call(served, "terminate", instance=instance)


async def test_a_log_that_cannot_be_read_is_refused_before_the_answer_begins(served: Served) -> None:
    with pytest.raises(DaemonError, match="nobody"):
        await call(served, "logs", instance="nobody")
    await call(served, "spawn", spawn={"command": ["sleep", "600"], "options": {"name": "cursor"}})
    with pytest.raises(DaemonError, match="must be the cursor of a line"):
        await call(served, "logs", instance="cursor", after="nonsense")
    await call(served, "terminate", instance="cursor")


async def test_a_list_shows_of_each_instance_what_looking_at_it_shows(served: Served) -> None:
    """Also what stands beside the record: definition, last line, exit code."""
    commands = {"writes": "echo one; echo two; exec sleep 600", "is-silent": "exec sleep 600", "failed": "exit 7"}
    for name, script in commands.items():
        await call(
            served, "spawn", spawn={"command": ["sh", "-c", script], "job": {"request": ""}, "options": {"name": name}}
        )
    wanted = {"writes": ("two", None), "is-silent": ("1 request", None), "failed": (None, 7)}
    listed: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(60):
        while {name: (shown["doing"], shown["exit_code"]) for name, shown in listed.items()} != wanted:
            page = await call(served, "instances", include_terminated=True)
            listed = {shown["name"]: shown for shown in page if shown["name"] in commands}
    for name, shown in listed.items():
        looked = await call(served, "instance", instance=name)
        assert looked.keys() - shown.keys() == {"attempts", "dropped_bytes"}
        stable = shown.keys() - {"metrics_now", "metrics", "updated_at", "version", "health"}
        assert {key: shown[key] for key in stable} == {key: looked[key] for key in stable}
    for name in ("writes", "is-silent"):
        await call(served, "terminate", instance=name)


async def test_two_observers_of_a_burst_get_the_same_events_in_their_order(served: Served) -> None:
    newest = await call(served, "events", limit=1)
    before = newest[-1]["sequence"] if newest else 0
    names = [f"T9{number:02}" for number in range(20)]
    for name in names:
        await call(served, "add_task", new_task={"task": "x", "key": name, "hold": True})

    def observe() -> list[str]:
        stream = BlockingClient(served.home).stream("events", after=str(before), types="task_state_changed")
        return [next(stream).data["key"] for _ in names]

    async with asyncio.timeout(60):
        observed = await asyncio.gather(asyncio.to_thread(observe), asyncio.to_thread(observe))
    assert list(observed) == [names, names]
