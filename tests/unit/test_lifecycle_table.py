"""Every message in every phase: it does no harm, every verb is answered, and the record stays legal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from folding import invariant_faults
from virtual_ground import SlowEnd, World, virtual

from ostler.agents import WaitAnswer, WaitAsked
from ostler.errors import (
    AgentExecutionError,
    InvalidOperationError,
    StaleWriterError,
    StoreBusyError,
    StoreFullError,
)
from ostler.isolation.base import Exit
from ostler.lifecycle import messages as kinds
from ostler.lifecycle.instance import Instance
from ostler.lifecycle.messages import Message, Phase
from ostler.lifecycle.phases import (
    PHASES,
    Adopting,
    Backoff,
    Detached,
    Ended,
    Leaving,
    Pausing,
    Serving,
    Starting,
    Suspended,
)
from ostler.lifecycle.table import TABLE
from ostler.model.attempt import AttemptOutcome
from ostler.model.spawn import RestartPolicy, TerminationOptions
from ostler.model.states import SuspendDepth
from ostler.policy.health import ProbeOutcome, ProbeResult

LATER = RestartPolicy.from_dict({"type": "linear", "initial_delay": "20s"})


class SlowBoth(SlowEnd):
    init_seconds = 20.0


def begin(work: Awaitable[Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)


# --- the phases --------------------------------------------------------------------------------------


async def starting(world: World) -> Instance:
    begin(world.spawn(SlowBoth))
    await world.until(lambda: bool(world.machine.living()))
    return next(iter(world.runtime.instances.values()))


async def serving(world: World) -> Instance:
    return world.actor(await world.spawn(SlowEnd, restart_policy=LATER))


async def working(world: World) -> Instance:
    """One call works, one waits for an answer, one is queued."""
    instance = await serving(world)
    begin(world.manager.process(instance.instance_id, {"work": 20}, request_id="r"))
    begin(world.manager.process(instance.instance_id, {"ask": timedelta(seconds=20)}))
    begin(world.manager.process(instance.instance_id, {"work": 1}))
    await world.until(lambda: bool(instance.waits) and len(instance.backlog) == 1)
    return instance


async def adopting(world: World) -> Instance:
    instance = await working(world)
    await world.reopen(keep=True)
    return world.actor(instance.instance_id)


async def pausing(world: World) -> Instance:
    instance = await working(world)
    begin(world.manager.suspend(instance.instance_id))
    await world.until(lambda: isinstance(instance.phase, Pausing))
    return instance


async def freezing(world: World) -> Instance:
    instance = await working(world)
    world.machine.misfortune.freeze_hangs = 1.0
    begin(world.manager.suspend(instance.instance_id, "freeze"))
    await world.until(lambda: isinstance(instance.phase, Pausing))
    return instance


def suspended(depth: SuspendDepth) -> Callable[[World], Awaitable[Instance]]:
    async def bring(world: World) -> Instance:
        instance = await (serving(world) if depth is SuspendDepth.PARK else working(world))
        await world.manager.suspend(instance.instance_id, depth, resume_after=60)
        return instance

    return bring


def leaving(goal: str) -> Callable[[World], Awaitable[Instance]]:
    async def bring(world: World) -> Instance:
        instance = await (serving(world) if goal == "park" else working(world))
        manager, ada = world.manager, instance.instance_id
        match goal:
            case "terminate":
                begin(manager.terminate(ada))
            case "restart":
                begin(manager.restart(ada))
            case "park":
                begin(manager.suspend(ada, "park"))
            case _:
                world.agent(ada).unkillable_until = world.clock.mono() + 20
                world.agent(ada).stuck = True
                instance.post(kinds.Exited(attempt=1, how=LOST))
        await world.until(lambda: isinstance(instance.phase, Leaving))
        return instance

    return bring


async def unwritten(world: World) -> Instance:
    """Nothing lives any more, and that could not be written."""
    instance = await working(world)
    world.fill_disk()
    world.agent(instance.instance_id).die()
    await world.until(lambda: isinstance(instance.phase, Leaving) and instance.phase.empty)
    asyncio.get_running_loop().call_later(20, world.free_disk)
    return instance


async def backoff(world: World) -> Instance:
    instance = await serving(world)
    world.agent(instance.instance_id).die()
    await world.until(lambda: isinstance(instance.phase, Backoff))
    return instance


async def ended(world: World) -> Instance:
    instance = await serving(world)
    await world.manager.terminate(instance.instance_id)
    return instance


async def detached(world: World) -> Instance:
    instance = await serving(world)
    await instance.ask(kinds.Detach())
    return instance


BRINGERS: dict[str, tuple[type[Phase], Callable[[World], Awaitable[Instance]]]] = {
    "starting": (Starting, starting),
    "adopting": (Adopting, adopting),
    "serving": (Serving, serving),
    "working": (Serving, working),
    "pausing": (Pausing, pausing),
    "freezing": (Pausing, freezing),
    **{f"suspended-{depth}": (Suspended, suspended(depth)) for depth in SuspendDepth},
    **{f"leaving-{goal}": (Leaving, leaving(goal)) for goal in ("terminate", "fail", "restart", "park")},
    "unwritten": (Leaving, unwritten),
    "backoff": (Backoff, backoff),
    "ended": (Ended, ended),
    "detached": (Detached, detached),
}

# --- the messages ------------------------------------------------------------------------------------

LOST = Exit(outcome=AttemptOutcome.LOST, detail="lost")
Make = Callable[[Instance], Message]


def future() -> asyncio.Future[WaitAnswer]:
    return asyncio.get_running_loop().create_future()


def done_with(result: Any) -> asyncio.Future[Any]:
    reply = asyncio.get_running_loop().create_future()
    if isinstance(result, Exception):
        reply.set_exception(result)
    else:
        reply.set_result(result)
    return reply


def asked(instance: Instance) -> Message:
    wait = WaitAsked(kind="approval", timeout=timedelta(seconds=9), ask_id=uuid4())
    return kinds.WaitRequested(attempt=instance.attempt, wait=wait, reply=future())


def present(instance: Instance, what: str) -> Any:
    """A call or a wait that the instance has, else one that it never had."""
    if what == "call":
        return next(iter(instance.calls.values()), None) or kinds.Call(call_id=uuid4())
    return next(iter(instance.waits), None) or uuid4()


MESSAGES: dict[str, Make] = {
    "join": lambda _: kinds.Join(),
    "process": lambda _: kinds.Process(request=1),
    "process-named": lambda _: kinds.Process(request={"work": 20}, request_id="r", digest="other"),
    "process-hasty": lambda _: kinds.Process(request=1, wait=False, timeout=timedelta(seconds=5)),
    "withdraw-join": lambda one: kinds.Withdraw(
        of=next((c for c in getattr(one.phase, "callers", []) if isinstance(c, kinds.Join)), kinds.Join())
    ),
    "withdraw-process": lambda one: kinds.Withdraw(
        of=next((c for call in one.calls.values() for c in call.callers), kinds.Process(request=1))
    ),
    "withdraw-suspend": lambda one: kinds.Withdraw(of=getattr(one.phase, "request", kinds.Suspend())),
    "withdraw-terminate": lambda _: kinds.Withdraw(of=kinds.Terminate(options=TerminationOptions())),
    **{f"suspend-{depth}": lambda _, d=depth: kinds.Suspend(depth=d) for depth in SuspendDepth},  # type: ignore[misc]
    "resume": lambda _: kinds.Resume(),
    "restart": lambda _: kinds.Restart(reason="by hand"),
    "terminate": lambda _: kinds.Terminate(options=TerminationOptions()),
    "terminate-now": lambda _: kinds.Terminate(options=TerminationOptions.immediate()),
    "terminate-gently": lambda _: kinds.Terminate(options=TerminationOptions(force_if_timeout=False)),
    "answer": lambda one: kinds.Answer(wait_id=present(one, "wait"), outcome="yes"),
    "detach": lambda _: kinds.Detach(),
    "close": lambda _: kinds.Close(grace=timedelta(seconds=2)),
    "asked": asked,
    "asked-earlier": lambda _: kinds.WaitRequested(attempt=0, wait=WaitAsked(kind="x"), reply=future()),
    "unasked": lambda one: kinds.WaitCancelled(wait_id=present(one, "wait")),
    "exited": lambda one: kinds.Exited(attempt=one.attempt, how=LOST),
    "exited-earlier": lambda _: kinds.Exited(attempt=0, how=LOST),
    "reported": lambda one: kinds.Reported(attempt=one.attempt, calls={}, questions=()),
    "probed": lambda one: kinds.Probed(attempt=one.attempt, result=ProbeResult(outcome=ProbeOutcome.FAILED)),
    "probed-gone": lambda one: kinds.Probed(attempt=one.attempt, gone=LOST),
    "probed-earlier": lambda _: kinds.Probed(attempt=0, gone=LOST),
    "operation-done-earlier": lambda _: kinds.OperationDone(operation=kinds.Operation("thaw", 0), error=OSError()),
    "operation-done-unknown": lambda one: kinds.OperationDone(operation=kinds.Operation("start", one.attempt)),
    "call-ended": lambda one: kinds.CallEnded(call=present(one, "call"), result=1),
    "call-ended-unknown": lambda _: kinds.CallEnded(call=kinds.Call(call_id=uuid4()), error=OSError()),
    "call-due": lambda one: kinds.CallDue(call=present(one, "call")),
    "call-due-queued": lambda one: kinds.CallDue(call=one.backlog[0] if one.backlog else present(one, "call")),
    "caller-due": lambda one: kinds.CallerDue(
        caller=next((c for call in one.calls.values() for c in call.callers), kinds.Process(request=1))
    ),
    "caller-due-queued": lambda one: kinds.CallerDue(
        caller=next((c for call in one.backlog for c in call.callers), kinds.Process(request=1))
    ),
    "serves": lambda _: kinds.ReadyToServe(),
    "job-ended": lambda _: kinds.JobEnded(reply=done_with(1)),
    "job-failed": lambda _: kinds.JobEnded(reply=done_with(AgentExecutionError("no"))),
    "job-unread": lambda _: kinds.JobEnded(reply=done_with(StoreBusyError())),
    "job-refused": lambda _: kinds.JobEnded(reply=done_with(InvalidOperationError("no"))),
    "next-calls": lambda _: kinds.NextCalls(),
    "wait-due": lambda one: kinds.WaitDue(wait_id=present(one, "wait")),
    "due": lambda one: kinds.Due(phase=one.phase),
    "due-earlier": lambda _: kinds.Due(phase=Serving()),
    "registered": lambda _: kinds.Registered(),
    "disowned": lambda _: kinds.OwnerLost(error=StaleWriterError()),
    "write-failed": lambda _: kinds.WriteFailed(error=StoreFullError()),
    "write-failed-stale": lambda _: kinds.WriteFailed(error=StaleWriterError()),
    "write-due": lambda _: kinds.WriteDue(),
}

# --- verbs that are kept for a while, and why ----------------------------------------------------------

_ENDS = "it is answered when the attempt has ended"
_QUEUED = "it waits for a slot, or for the next attempt"
KEPT: dict[tuple[str, str], str] = {}


def _keep(phases: str, wanted: str, why: str) -> None:
    KEPT.update({(phase, message): why for phase in phases.split() for message in wanted.split()})


_ALIVE = "serving working adopting pausing freezing suspended-hold suspended-freeze"
_ENDING = "leaving-terminate leaving-restart leaving-park"
_NEXT = "it is answered when the next attempt is ready"
_keep("starting", "join", "it shares the start")
_keep("starting adopting backoff leaving-fail", "process process-named process-hasty", _QUEUED)
_keep("leaving-restart", "process process-hasty", _QUEUED)
_keep("working", "process", _QUEUED)
_keep("serving", "process-named", "the agent works on it")
_keep(f"{_ALIVE} leaving-park", "restart", _NEXT)
_keep("leaving-park", "resume", _NEXT)
_keep(f"{_ALIVE} {_ENDING}", "terminate terminate-gently close", _ENDS)
_keep(f"{_ENDING} leaving-fail", "detach", _ENDS)
_keep("leaving-fail", "close", _ENDS)
_keep("unwritten", "close detach terminate terminate-now terminate-gently", "the write is tried again first")
_keep("starting", "detach", "the start is finished first")
_keep("serving suspended-hold suspended-freeze", "suspend-park", _ENDS)
_keep("working", "suspend-hold suspend-park", "the work is finished first")
_keep(f"{_ALIVE} starting", "asked", "the agent waits for an answer")


def reply_of(message: Message) -> asyncio.Future[Any] | None:
    match message:
        case kinds.Withdraw():
            return message.done
        case kinds.Verb() | kinds.WaitRequested():
            return message.reply
    return None


@pytest.mark.parametrize("message_name", MESSAGES)
@pytest.mark.parametrize("phase_name", BRINGERS)
@virtual
async def test_every_message_in_every_phase(
    world: World, phase_name: str, message_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "ostler.lifecycle")
    expected, bring = BRINGERS[phase_name]
    async with world.opened():
        instance = await bring(world)
        assert isinstance(instance.phase, expected)
        message = MESSAGES[message_name](instance)
        reply = reply_of(message)
        instance.post(message)
        await asyncio.sleep(0.2)
        kept = reply is not None and not reply.done()
        assert kept == ((phase_name, message_name) in KEPT), "a verb is kept only for the reason that is named"
        await asyncio.sleep(300)
        if reply is not None:
            assert reply.done(), "the verb was never answered"
            if not reply.cancelled():
                reply.exception()
        broken = [one.message for one in caplog.records if getattr(one, "event", "") == "background_error"]
        assert not broken, broken
        assert not invariant_faults(world.database.reader)
        if not instance.is_over:
            assert instance.state is world.record(instance.instance_id).state


def test_the_table_names_every_message_and_has_a_default_in_each_row() -> None:
    verbs = {kinds.Verb, Message}
    classes = {
        one for one in vars(kinds).values() if isinstance(one, type) and issubclass(one, Message) and one not in verbs
    }
    assert set(TABLE) == classes
    for message, row in TABLE.items():
        assert None in row, f"{message.__name__} has no default"
        assert set(row) - {None} <= set(PHASES)
    assert {type(make) for make in TABLE} == {type}
    walked = {phase for phase, _ in BRINGERS.values()}
    assert walked == set(PHASES)


@virtual
async def test_the_walk_sends_every_message(world: World) -> None:
    async with world.opened():
        instance = await serving(world)
        sent = {type(make(instance)) for make in MESSAGES.values()}
        assert sent == set(TABLE)
