"""Every verb in every state: where it leads, or the refusal that names the state and what to do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from lifecycle_ground import NONE, PROCESS, THREAD, Crew, S, at, do, until

from ostler import (
    AgentGoneError,
    AgentHandle,
    AgentState,
    AgentStateChangedEvent,
    AgentStateTransitions,
    InvalidOperationError,
)

pytestmark = pytest.mark.anyio

Verb = Callable[[AgentHandle], Coroutine[Any, Any, Any]]
VERBS: dict[str, Verb] = {
    "process": lambda agent: agent.ask(do("echo")),
    "hold": lambda agent: agent.pause("hold"),
    "park": lambda agent: agent.pause("park"),
    "freeze": lambda agent: agent.pause("freeze"),
    "resume": lambda agent: agent.resume(),
    "restart": lambda agent: agent.restart(),
    "terminate": lambda agent: agent.stop(),
}
WORKING = {
    "process": S.WAITING,
    "hold": S.SUSPENDED,
    "park": S.SUSPENDED,
    "restart": S.READY,
    "terminate": S.TERMINATED,
}
#: Where it leads; a pair that is not here is refused.
LEADS_TO: dict[AgentState, dict[str, AgentState]] = {
    S.INITIALIZING: {"process": S.WAITING, "terminate": S.TERMINATED},
    S.READY: WORKING,
    S.PROCESSING: WORKING,
    S.WAITING: WORKING,
    S.SUSPENDED: {"park": S.SUSPENDED, "resume": S.READY, "restart": S.READY, "terminate": S.TERMINATED},
    S.TERMINATING: {"terminate": S.TERMINATED},
    S.TERMINATED: {},
    S.FAILED: {"restart": S.READY, "terminate": S.TERMINATED},
}


async def held_in(crew: Crew, state: AgentState) -> AgentHandle:
    """An instance in this state, which stays in it until the gates are released."""
    if state is S.INITIALIZING:
        crew.begin(crew.start({"initialize": "hang"}))
        await until(lambda: "initialize" in crew.stage.said)
        return await crew.only()
    agent = await crew.start({"shutdown": "hang"} if state is S.TERMINATING else None)
    match state:
        case S.PROCESSING:
            await crew.busy(agent)
        case S.WAITING:
            await agent.ask(do("echo"))
        case S.SUSPENDED:
            await agent.pause()
        case S.TERMINATING:
            crew.begin(agent.stop())
            await until(lambda: "shutdown" in crew.stage.said)
        case S.TERMINATED:
            await agent.stop()
        case S.FAILED:
            await crew.crash(agent)
    await crew.reaches(agent, state)
    return agent


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", AgentState, ids=str)
@at(NONE, THREAD)
async def test_every_verb_in_every_state(crew: Crew, state: AgentState, verb: str) -> None:
    agent = await held_in(crew, state)
    task = crew.begin(VERBS[verb](agent))
    leads_to = LEADS_TO[state].get(verb)
    if leads_to is None:
        with pytest.raises(InvalidOperationError, match=r"cannot|freeze") as refused:
            await task
        assert refused.value.current == state
        assert str(refused.value).count(";") >= 1, "it says what to do"
        assert await crew.state(agent) is state
    else:
        await crew.calm()
        if verb in {"process", "hold", "park", "restart"} or state is S.TERMINATING:
            crew.stage.release()
        await crew.passes(task, 20)
        assert (await crew.reaches(agent, leads_to)).attempt == (2 if verb == "restart" else 1)
    for move in await crew.events(agent, AgentStateChangedEvent):
        assert AgentStateTransitions.is_valid(move.previous_state, move.new_state, freezing=True)


@pytest.mark.parametrize("state", [S.READY, S.PROCESSING, S.WAITING], ids=str)
@at(PROCESS)
async def test_freeze_and_resume_in_every_living_state(crew: Crew, state: AgentState) -> None:
    agent = await held_in(crew, state)
    assert (await agent.pause("freeze")).state is S.SUSPENDED
    assert (await agent.resume()).state is (S.PROCESSING if state is S.PROCESSING else S.READY)


@at(NONE)
async def test_what_was_cut_off_by_a_verb_is_told_to_its_caller(crew: Crew) -> None:
    agent = await crew.start()
    for verb in ("restart", "terminate"):
        call = await crew.busy(agent)
        await VERBS[verb](agent)
        with pytest.raises(AgentGoneError):
            await call
