"""A spawn that is asked for again with its key, where the first one did not come to be ready."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_aids import Scene, until

from ostler.errors import AgentInitializationError, InitializationTimeoutError, OstlerError
from ostler.lifecycle import spawn
from ostler.model import AgentInstance, AgentState

pytestmark = pytest.mark.anyio


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(home=tmp_path)


async def refusal(scene: Scene, **options: object) -> OstlerError:
    with pytest.raises(OstlerError) as caught:
        await scene.manager.spawn(scene.request(**options), idempotency_key="once")  # type: ignore[arg-type]  # options of many kinds
    return caught.value


async def test_a_start_that_failed_fails_for_whoever_asks_again(scene: Scene) -> None:
    scene.stage.bad_starts = 1
    async with scene.open():
        first = await refusal(scene)
        again = await refusal(scene)
        failed = await scene.only()
    async with scene.open():
        late = await refusal(scene)
    # Who asks again can tell an old failure from a new one, and which instance it is about.
    assert [one.known for one in (first, again, late)] == [None, failed.instance_id, failed.instance_id]
    for error in (first, again, late):
        assert isinstance(error, AgentInitializationError)
        assert str(error) == str(first)
    assert "a bad start" in str(first)
    assert len(scene.stage.starts) == 1  # the same key is the same instance, also where it failed


async def test_a_start_that_took_too_long_is_told_of_as_such(scene: Scene) -> None:
    scene.stage.starting.shut()
    async with scene.open():
        spawning = scene.begin(refusal(scene, initialization_timeout=timedelta(seconds=5)))
        await until(lambda: bool(scene.stage.starts))
        scene.clock.advance(5)
        first = await spawning
        again = await refusal(scene, initialization_timeout=timedelta(seconds=5))
        assert isinstance(first, InitializationTimeoutError)
        assert (type(again), str(again)) == (type(first), str(first))


async def test_one_that_was_ended_while_it_started_never_became_ready(scene: Scene) -> None:
    scene.stage.starting.shut()
    async with scene.open() as manager:
        spawning = scene.begin(refusal(scene))
        await until(lambda: bool(scene.stage.starts))
        await manager.terminate((await scene.only()).instance_id)
        assert isinstance(await spawning, AgentInitializationError)
        assert isinstance(await refusal(scene), AgentInitializationError)


async def test_one_that_was_brought_back_by_hand_is_answered(scene: Scene) -> None:
    scene.stage.bad_starts = 1
    async with scene.open() as manager:
        await refusal(scene)
        failed = await scene.only()
        await manager.restart(failed.instance_id)
        again = await manager.spawn(scene.request(), idempotency_key="once")
        assert (again.instance_id, again.state) == (failed.instance_id, AgentState.READY)


@pytest.mark.parametrize("known", [False, True])
async def test_a_caller_who_goes_as_the_answer_comes_leaves_only_what_was_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """The start is over, and its caller is cancelled before it can take the answer."""
    async with scene.open() as manager:
        if known:
            await manager.spawn(scene.request(), idempotency_key="once")
        callers: list[asyncio.Task[AgentInstance]] = []
        inner = spawn._spawn  # noqa: SLF001 - there is no other way to come at this moment

        async def and_then_cancelled(*given: Any) -> AgentInstance:
            found = await inner(*given)
            asyncio.get_running_loop().call_soon(callers[0].cancel)
            return found

        monkeypatch.setattr(spawn, "_spawn", and_then_cancelled)
        callers.append(asyncio.ensure_future(manager.spawn(scene.request(), idempotency_key="once")))
        await asyncio.wait(callers)
        assert callers[0].cancelled()
        assert (await scene.only()).state is (AgentState.READY if known else AgentState.TERMINATED)


async def test_who_asks_while_it_is_failing_hears_the_same(scene: Scene) -> None:
    scene.stage.starting.shut()
    scene.stage.bad_starts = 1
    async with scene.open():
        errors = await asyncio.gather(*(refusal(scene) for _ in range(5)))
        assert {type(one) for one in errors} == {AgentInitializationError}
        assert len(scene.stage.starts) == 1
