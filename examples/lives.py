"""The part of the demo in which agents live: at work, dying and coming back, paused, asking, and forced to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from crew import Editor, Mule, Unlucky, Writer
from ostler import (
    AgentErrorEvent,
    AgentGoneError,
    AgentInstance,
    AgentLifecycleManager,
    AgentManifest,
    AgentProgressEvent,
    AgentSignalEvent,
    AgentSpawnOptions,
    AgentState,
    AgentStateChangedEvent,
    AgentTerminatedEvent,
    Enforcement,
    InvalidOperationError,
    IsolationLevel,
    OstlerError,
    RestartPolicy,
    SpawnRequest,
    TerminationOptions,
)
from telling import say, title

Manager = AgentLifecycleManager


async def spawn(manager: Manager, what: AgentManifest, name: str, **options: Any) -> AgentInstance:
    chosen = AgentSpawnOptions(name=name, **options)
    return await manager.spawn(SpawnRequest(agent_definition_id=what.id, options=chosen))


def told(event: Any) -> str:
    """One event in one line."""
    match event:
        case AgentStateChangedEvent():
            text = f"{event.previous_state} → {event.new_state}"
        case AgentErrorEvent():
            text = event.error_message
        case AgentProgressEvent():
            text = event.message or ""
        case AgentSignalEvent():
            text = event.name
        case AgentTerminatedEvent():
            text = f"was_graceful {event.was_graceful}"
        case _:
            text = getattr(event, "reason", None) or ""
    return f"#{event.sequence:<3} {event.event_type:<20} {text}".rstrip()


async def show(stream: Any, last: Callable[[Any], bool]) -> None:
    """Tell events as they come, up to the last one that is waited for."""
    async with stream:
        async for event in stream:
            say(told(event))
            if last(event):
                return


async def settled(manager: Manager, agent: AgentInstance, state: AgentState) -> None:
    """Wait until it has come so far."""
    found = await manager.get_instance(agent.instance_id)
    while found is not None and found.state is not state:
        await asyncio.sleep(0.001)
        found = await manager.get_instance(agent.instance_id)


def becomes(state: AgentState) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, AgentStateChangedEvent) and event.new_state is state


async def at_work(manager: Manager) -> AgentInstance:
    title("1. Two agents at work: one on our own loop, one in a thread of its own")
    writer = manager.registry.register(Writer, name="writer")
    policy = RestartPolicy(initial_delay=timedelta(seconds=0.2))
    ada = await spawn(manager, writer, "ada", restart_policy=policy)
    bo = await spawn(manager, writer, "bo", isolation_level=IsolationLevel.NONE)
    for agent in (ada, bo):
        answer = await manager.process(agent.instance_id, {"chapter": "one"})
        level = agent.spawn_options.isolation_level if agent.spawn_options else ""
        say(f"{agent.name:<4} level {level:<7} wrote {', '.join(answer['files'])} in work/{agent.instance_id}")
    unheld = [name for name, held in (ada.enforcement or {}).items() if held is Enforcement.ADVISORY]
    say(f"what a thread cannot hold stands on the record as advisory: {', '.join(unheld)}")
    ended = await manager.terminate(bo.instance_id)
    say(f"bo is asked to end, runs its clean-up and ends: was_graceful {ended.was_graceful}")
    return ada


async def crash(manager: Manager, ada: AgentInstance) -> None:
    title("2. ada crashes in mid-work, and comes back by herself; the events as they stream")
    stream = manager.observe(ada.instance_id)
    try:
        await manager.process(ada.instance_id, {"stumble": True})
    except AgentGoneError as error:
        say(f"who asked is told: {error}")
    await show(stream, becomes(AgentState.READY))
    await settled(manager, ada, AgentState.READY)
    answer = await manager.process(ada.instance_id, {"chapter": "two"})
    say(f"start {answer['start']} of the same instance, in the same directory: {', '.join(answer['files'])}")


async def no_luck(manager: Manager) -> None:
    title("3. Another one dies every time: the policy gives up, and says why")
    unlucky = manager.registry.register(Unlucky, name="unlucky", fail_on_error=True)
    cy = await spawn(manager, unlucky, "cy", restart_policy=RestartPolicy.immediate())
    for request in range(1, 5):
        async with manager.observe(cy.instance_id) as stream:
            with suppress(OstlerError):
                await manager.process(cy.instance_id, request)
            async for event in stream:
                if isinstance(event, AgentStateChangedEvent) and event.new_state is AgentState.FAILED:
                    say(event.reason or "")
                elif becomes(AgentState.READY)(event):
                    break
        await settled(manager, cy, AgentState.READY if request < 4 else AgentState.FAILED)
    await why(manager, cy)


async def held(manager: Manager, ada: AgentInstance) -> None:
    title("4. ada is held, and resumed")
    await manager.suspend(ada.instance_id, resume_after=timedelta(hours=8))
    try:
        await manager.process(ada.instance_id, {"chapter": "three"})
    except InvalidOperationError as error:
        say(f"refused: {error}")
    await why(manager, ada)
    await manager.resume(ada.instance_id)
    answer = await manager.process(ada.instance_id, {"chapter": "three"})
    say(f"resumed, still start {answer['start']}: {', '.join(answer['files'])}")


async def asking(manager: Manager) -> None:
    title("5. dot needs a word from outside, and waits for it without holding anything up")
    dot = await spawn(manager, manager.registry.register(Editor, name="editor"), "dot")
    stream = manager.observe(dot.instance_id)
    work = asyncio.create_task(manager.process(dot.instance_id, {"book": "Ada's book"}))
    await show(stream, becomes(AgentState.WAITING))
    await why(manager, dot)
    (wait,) = await manager.get_waits(dot.instance_id)
    await manager.answer(wait.wait_id, "approved")
    say(f"answered: {await work}")


async def forced(manager: Manager) -> None:
    title("6. A mule refuses to stop: asked for a second, then forced")
    mule = await spawn(manager, manager.registry.register(Mule, name="mule"), "mule")
    stream = manager.observe(mule.instance_id)
    work = asyncio.create_task(manager.process(mule.instance_id, "for ever"))
    await show(stream, lambda event: event.event_type == "agent_signal")
    stream = manager.observe(mule.instance_id)
    ended = await manager.terminate(mule.instance_id, TerminationOptions(graceful_timeout=timedelta(seconds=1)))
    await show(stream, lambda event: isinstance(event, AgentTerminatedEvent))
    seconds = ended.duration.total_seconds()
    say(f"success {ended.success}, was_graceful {ended.was_graceful}, after {seconds:.1f} s")
    with suppress(AgentGoneError):
        await work


async def counted(manager: Manager) -> None:
    title("So far")
    found = await manager.get_statistics()
    say(f"{found.total_spawned} spawned, {found.total_terminated} terminated, {found.total_restarts} restarts")
    say(", ".join(f"{count} {state}" for state, count in found.by_state.items() if count))


async def why(manager: Manager, agent: AgentInstance) -> None:
    found = await manager.why(agent.instance_id)
    say(f"why is {agent.name} {found.state}? {found.verdict}")
    for sentence in found.evidence:
        say(f"  - {sentence}")
    say(f"  what would change it: {'; '.join(found.what_would_change_it)}")


async def lives(manager: Manager) -> None:
    ada = await at_work(manager)
    await crash(manager, ada)
    await no_luck(manager)
    await held(manager, ada)
    await asking(manager)
    await forced(manager)
    await counted(manager)
