"""Loops: iterations, signals of agents, who waits for whom, pull requests, and what CI says."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body

from ostler.api.context import ContextOf, Handlers, LoopsOf, Number, SpeakerOf
from ostler.errors import InvalidOperationError
from ostler.loop.signals import BREAKPOINTS, note_refusal
from ostler.model.loop import Breakpoint
from ostler.model.validation import fault
from ostler.store.reports import add_signal
from ostler.tasks.context import BY


async def iterations(task: str, loops: LoopsOf) -> list[dict[str, Any]]:
    return [iteration.to_dict() for iteration in await loops.iterations(task)]


async def put_in_loop(
    task: str, loops: LoopsOf, settings: Annotated[dict[str, Any], Body(embed=True)], agent: str | None = None
) -> dict[str, Any]:
    record = await loops.orchestrator.get(task)
    return (await loops.put_in_loop(record, agent, **loops.checked_settings(settings))).to_dict()


async def graph(loops: LoopsOf) -> dict[str, Any]:
    return await loops.graph()


async def signal(
    context: ContextOf,
    speaker: SpeakerOf,
    name: Annotated[str, Body()],
    payload: Annotated[dict[str, Any] | None, Body()] = None,
) -> dict[str, Any]:
    """From inside an agent, over the socket of the home: who speaks is known from the peer of the connection."""
    kind = BREAKPOINTS.get(name)
    if kind is None:
        raise fault("name", f"must be one of {', '.join(sorted(BREAKPOINTS))}", name)
    signalled = Breakpoint.read(kind, payload or {})
    manager = context.manager
    instance, task = (None, None) if speaker is None else (speaker.instance, speaker.task)
    if instance is None:
        is_late = speaker is not None and speaker.has_ended
        what = "an attempt that has ended" if is_late else "a process that is no agent of this home"
        await manager.store.run(_refused, manager.principal.workspace_id, f"{name} from {what}")
        raise InvalidOperationError(f"only a live agent of this home may signal, and this is {what}")
    if task is not None and signalled.task_id not in {None, task.key}:
        await manager.store.run(note_refusal, task, BY, f"a signal about {signalled.task_id!a}")
        raise fault("task_id", f"must be {task.key}, the task of this agent", signalled.task_id)
    await manager.store.run(add_signal, instance, kind.value, {**signalled.to_dict(), "origin": "ostler signal"})
    return {"instance": instance.name, "task": None if task is None else task.key, "signal": kind.value}


def _refused(tx: Any, workspace_id: Any, what: str) -> None:
    tx.audit(workspace_id, BY, "task.signal", "signal", outcome="denied", detail=what)


async def report_ci(
    loops: LoopsOf,
    commit: Annotated[str, Body()],
    passed: Annotated[bool, Body()],
    output: Annotated[str, Body()] = "",
) -> dict[str, Any]:
    return (await loops.report_ci(commit, passed=passed, output=output)).to_dict()


async def pull_requests(loops: LoopsOf, include_ended: bool = False) -> list[dict[str, Any]]:
    return [pull.to_dict() for pull in await loops.pull_requests(include_ended=include_ended)]


async def pull_request(number: Number, loops: LoopsOf) -> dict[str, Any]:
    return (await loops.pull_request(number)).to_dict()


async def comment_on(number: Number, loops: LoopsOf, comment: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
    return (await loops.comment(number, comment)).to_dict()


async def approve(number: Number, loops: LoopsOf) -> dict[str, Any]:
    return (await loops.approve(number)).to_dict()


async def merge(number: Number, loops: LoopsOf) -> dict[str, Any]:
    return (await loops.merge(number)).to_dict()


async def close(
    number: Number, loops: LoopsOf, reason: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    return (await loops.close(number, reason=reason)).to_dict()


HANDLERS: Handlers = {
    "iterations": iterations,
    "put_in_loop": put_in_loop,
    "wait_graph": graph,
    "signal": signal,
    "report_ci": report_ci,
    "pull_requests": pull_requests,
    "pull_request": pull_request,
    "comment": comment_on,
    "approve": approve,
    "merge": merge,
    "close": close,
}
