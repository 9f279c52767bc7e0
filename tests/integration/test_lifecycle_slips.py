"""Slips of the caller: each is answered with one sentence, not with a trace from inside, and changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from lifecycle_aids import Scene, until

import ostler
from ostler.errors import InvalidOperationError, ValidationError
from ostler.lifecycle import AgentLifecycleManager
from ostler.lifecycle.doors import OWNER
from ostler.model import AgentInstance, AgentState

pytestmark = pytest.mark.anyio

WRONG: list[Any] = [None, "", "x", "\ud800", 5, 1.5, b"b", [], {}, (), object(), "a" * 100_000, [float("nan")]]

EMPTY: tuple[Any, ...] = ("", [], 5, ())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def waited(scene: Scene) -> Any:
    """One that waits, and the wait it is at."""
    one = await scene.spawn()
    await scene.busy(one, "wait")
    await until(lambda: _waits(scene, one))
    (wait,) = await scene.manager.get_waits(one.instance_id)
    return wait.wait_id


async def _waits(scene: Scene, one: AgentInstance) -> bool:
    return bool(await scene.manager.get_waits(one.instance_id))


Ask = Callable[[AgentLifecycleManager, Any], Awaitable[Any]]
BY_ID: dict[str, Ask] = {
    "process": lambda manager, value: manager.process(value, 1),
    "suspend": lambda manager, value: manager.suspend(value),
    "resume": lambda manager, value: manager.resume(value),
    "restart": lambda manager, value: manager.restart(value),
    "terminate": lambda manager, value: manager.terminate(value),
    "answer": lambda manager, value: manager.answer(value),
    "get_instance": lambda manager, value: manager.get_instance(value),
    "get_waits": lambda manager, value: manager.get_waits(value),
    "why": lambda manager, value: manager.why(value),
}


async def test_what_is_no_id_is_refused_by_every_verb(scene: Scene) -> None:
    async with scene.open() as manager:
        for name, ask in BY_ID.items():
            for value in WRONG:
                with pytest.raises(ValidationError, match="_id must be a UUID") as caught:
                    await ask(manager, value)
                assert len(str(caught.value)) < 300, name
        # Each refusal of an act stands in the audit, however strange what it was about.
        refused = [one for one in await manager.store.read_audit(limit=1000) if one.outcome == "ValidationError"]
        assert len(refused) == 6 * len(WRONG)


async def test_what_is_no_option_is_refused_even_where_it_is_empty(scene: Scene) -> None:
    async with scene.open() as manager:
        one = await scene.spawn()
        for value in WRONG[1:]:
            with pytest.raises(ValidationError, match="options must be a TerminationOptions"):
                await manager.terminate(one.instance_id, value)
            with pytest.raises(ValidationError, match="options must be an ObservationOptions"):
                manager.observe(one.instance_id, value)
            with pytest.raises(ValidationError, match="wanted must be a GetInstancesFilter"):
                await manager.get_active_instances(value)
            with pytest.raises(ValidationError, match="instance_id must be a UUID"):
                manager.observe(value)
            if value != 5:
                with pytest.raises(ValidationError, match="after must be 0 or the number of an event"):
                    manager.observe(one.instance_id, after=value)
            with pytest.raises(ValidationError, match="wait must be True or False"):
                await manager.process(one.instance_id, 1, wait=value)
            if not isinstance(value, str) or not value.isprintable():
                with pytest.raises(ValidationError, match="reason must be"):
                    await manager.restart(one.instance_id, reason=value)
        with pytest.raises(ValidationError, match="after must be 0 or the number of an event"):
            manager.observe(after=True)
        record = await scene.record(one)
        assert (record.state, record.attempt) == (AgentState.READY, 1)


@pytest.mark.parametrize("name", ["settings", "registry", "levels", "seams"])
async def test_a_manager_is_not_opened_with_something_else(tmp_path: Path, name: str) -> None:
    for value in WRONG[1:]:
        with pytest.raises(ValidationError, match=f"{name} must be an? "):
            async with ostler.open(tmp_path, **{name: value}):
                pytest.fail("it was opened")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - nothing else runs meanwhile


async def test_a_manager_is_not_opened_on_what_is_no_place() -> None:
    for value in (None, 5, b"b", [], object()):
        with pytest.raises(ValidationError, match="where must be a directory, an address or a Store"):
            async with ostler.open(value):  # type: ignore[arg-type]  # wrong on purpose
                pytest.fail("it was opened")


async def test_an_answer_is_a_word_and_none_that_only_a_clock_says(scene: Scene) -> None:
    async with scene.open() as manager:
        wait_id = await waited(scene)
        for value in (None, "", "  ", 5, "a" * 100_000):
            with pytest.raises(ValidationError, match="outcome must"):
                await manager.answer(wait_id, value)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ValidationError, match="outcome must be another word than 'timeout'"):
            await manager.answer(wait_id, "timeout")
        for wrong in EMPTY:
            with pytest.raises(ValidationError, match="answer must be"):
                await manager.answer(wait_id, "approved", wrong)
        assert (await manager.answer(wait_id, "approved")).outcome == "approved"


async def test_nobody_acts_on_behalf_of_what_is_no_principal(scene: Scene) -> None:
    async with scene.open() as manager:
        for value in WRONG:
            with pytest.raises(ValidationError, match="principal must be a Principal"):
                manager.acting_as(value)
        with pytest.raises(ValidationError, match="name must be printable text"):
            manager.acting_as(OWNER.evolve(name="eve\n"))
        with pytest.raises(ValidationError, match="workspace_id must be"):
            manager.acting_as(OWNER.evolve(workspace_id=5))
        for wrong in ("a\nb", "a" * 100_000, *EMPTY):
            with pytest.raises(ValidationError, match="correlation_id must"):
                manager.acting_as(OWNER, correlation_id=wrong)
        assert manager.acting_as(OWNER, correlation_id="request-7").principal == OWNER


async def test_another_event_loop_is_told_where_the_manager_lives(scene: Scene) -> None:
    async with scene.open() as manager:
        one = await scene.spawn()
        asked: dict[str, Callable[[], Any]] = {
            "process": lambda: manager.process(one.instance_id, 1),
            "spawn": lambda: manager.spawn(scene.request()),
            "get_instance": lambda: manager.get_instance(one.instance_id),
            "get_statistics": manager.get_statistics,
            "answer": lambda: manager.answer(uuid4()),
        }

        async def there(ask: Callable[[], Any]) -> Any:
            return await ask()

        async def look() -> Any:
            return manager.observe(one.instance_id)

        with ThreadPoolExecutor(1) as elsewhere:
            for ask in (*asked.values(), look):
                running = asyncio.get_running_loop().run_in_executor(elsewhere, asyncio.run, there(ask))
                with pytest.raises(InvalidOperationError, match="belongs to the event loop that opened it"):
                    await running
        assert await manager.process(one.instance_id, 2) == 2
        assert len(await manager.get_active_instances()) == 1
