"""Every verb in every state: what it leads to, or which two states the refusal names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from lifecycle_aids import Scene, until

from ostler.errors import AgentGoneError, AgentInitializationError, InvalidOperationError
from ostler.lifecycle import AgentLifecycleManager
from ostler.model import (
    AGENT_TRANSITIONS,
    FREEZE_TRANSITIONS,
    AgentInstance,
    AgentState,
    AgentStateChangedEvent,
    IsolationLevel,
    RestartPolicy,
    SuspendDepth,
)

pytestmark = pytest.mark.anyio

S = AgentState
LEVELS = (IsolationLevel.NONE, IsolationLevel.THREAD)
Verb = Callable[[AgentLifecycleManager, AgentInstance], Coroutine[Any, Any, Any]]
VERBS: dict[str, tuple[Verb, AgentState]] = {
    "process": (lambda manager, one: manager.process(one.instance_id, "hello"), S.PROCESSING),
    "suspend": (lambda manager, one: manager.suspend(one.instance_id), S.SUSPENDED),
    "hold": (lambda manager, one: manager.suspend(one.instance_id, SuspendDepth.HOLD), S.SUSPENDED),
    "park": (lambda manager, one: manager.suspend(one.instance_id, SuspendDepth.PARK), S.SUSPENDED),
    "freeze": (lambda manager, one: manager.suspend(one.instance_id, SuspendDepth.FREEZE), S.SUSPENDED),
    "resume": (lambda manager, one: manager.resume(one.instance_id), S.READY),
    "restart": (lambda manager, one: manager.restart(one.instance_id), S.INITIALIZING),
    "terminate": (lambda manager, one: manager.terminate(one.instance_id), S.TERMINATING),
}
#: None is a refusal.
TABLE: dict[AgentState, dict[str, AgentState | None]] = {
    S.INITIALIZING: {"terminate": S.TERMINATED},
    S.READY: {
        "process": S.WAITING,
        "suspend": S.SUSPENDED,
        "hold": S.SUSPENDED,
        "park": S.SUSPENDED,
        "restart": S.READY,
        "terminate": S.TERMINATED,
    },
    S.PROCESSING: {
        "process": S.WAITING,
        "hold": S.SUSPENDED,
        "park": S.SUSPENDED,
        "restart": S.READY,
        "terminate": S.TERMINATED,
    },
    S.WAITING: {
        "process": S.WAITING,
        "suspend": S.SUSPENDED,
        "hold": S.SUSPENDED,
        "park": S.SUSPENDED,
        "restart": S.READY,
        "terminate": S.TERMINATED,
    },
    S.SUSPENDED: {"resume": S.READY, "restart": S.READY, "terminate": S.TERMINATED},
    S.TERMINATING: {"terminate": S.TERMINATED},
    S.TERMINATED: {},
    S.FAILED: {"restart": S.READY, "terminate": S.TERMINATED},
}


async def held_in(scene: Scene, state: AgentState, level: IsolationLevel) -> AgentInstance:
    """An instance in this state, which stays in it until the gates open."""
    if state is S.INITIALIZING:
        scene.stage.starting.shut()
        scene.begin(scene.spawn(level))
        instance = await scene.only()
        await until(lambda: bool(scene.stage.starts))
        return instance
    instance = await scene.spawn(level)
    match state:
        case S.PROCESSING:
            await scene.busy(instance)
        case S.WAITING:
            await scene.manager.process(instance.instance_id, "hello")
        case S.SUSPENDED:
            await scene.manager.suspend(instance.instance_id)
        case S.TERMINATING:
            scene.stage.ending.shut()
            scene.begin(scene.manager.terminate(instance.instance_id))
        case S.TERMINATED:
            await scene.manager.terminate(instance.instance_id)
        case S.FAILED:
            await scene.crash(instance)
    return await scene.reaches(instance, state)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", AgentState)
async def test_every_verb_in_every_state(tmp_path: Path, state: AgentState, verb: str, level: IsolationLevel) -> None:
    scene = Scene(home=tmp_path)
    async with scene.open() as manager:
        instance = await held_in(scene, state, level)
        do, wanted = VERBS[verb]
        task = scene.begin(do(manager, instance))
        leads_to = TABLE[state].get(verb)
        if leads_to is None:
            with pytest.raises(InvalidOperationError, match=str(instance.instance_id) + f"|{level}") as refused:
                await task
            assert (refused.value.current, refused.value.wanted) == (state, wanted)
            assert await scene.state(instance) is state
        else:
            if verb in {"process", "hold", "park"} or state is S.TERMINATING:
                await scene.calm()
                scene.stage.gate.open()
                scene.stage.ending.open()
            await task
            assert (await scene.reaches(instance, leads_to)).attempt == (2 if verb == "restart" else 1)
        legal = {(one, to) for one, targets in AGENT_TRANSITIONS.items() for to in targets} | FREEZE_TRANSITIONS
        moves = await scene.events(instance, AgentStateChangedEvent)
        assert {(one.previous_state, one.new_state) for one in moves} <= legal


async def test_a_refusal_in_any_state_is_in_the_audit(tmp_path: Path) -> None:
    scene = Scene(home=tmp_path)
    async with scene.open() as manager:
        instance = await scene.spawn()
        with pytest.raises(InvalidOperationError, match="ready"):
            await manager.resume(instance.instance_id)
        entries = await manager.store.read_audit(limit=1000)
        refusal = [one for one in entries if one.outcome == "InvalidOperationError"]
        assert [(one.action, one.subject) for one in refusal] == [("resume", f"instance:{instance.instance_id}")]


async def test_what_was_cut_off_by_a_verb_is_told_to_its_caller(tmp_path: Path) -> None:
    scene = Scene(home=tmp_path)
    async with scene.open() as manager:
        instance = await scene.spawn()
        for verb in ("restart", "terminate"):
            call = await scene.busy(instance)
            await VERBS[verb][0](manager, instance)
            with pytest.raises(AgentGoneError):
                await call


async def test_a_spawn_that_is_terminated_meanwhile_says_so(tmp_path: Path) -> None:
    scene = Scene(home=tmp_path)
    async with scene.open() as manager:
        scene.stage.starting.shut()
        spawning = scene.begin(scene.spawn(restart_policy=RestartPolicy.immediate()))
        instance = await scene.only()
        await until(lambda: bool(scene.stage.starts))
        await manager.terminate(instance.instance_id)
        with pytest.raises(AgentInitializationError, match="terminated while"):
            await spawning
        assert await scene.state(instance) is S.TERMINATED
        assert scene.stage.starts == [1]
