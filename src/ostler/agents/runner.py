"""Calls an agent's methods in the place where the agent lives, and makes sense of what comes back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from ostler.agents.base import Agent, AgentMaker, yielding_fault
from ostler.agents.context import CURRENT_CALL, AgentContext, CallId, CallToken, CleanupHook
from ostler.agents.failures import error_text, execution_error
from ostler.clock import Deadline
from ostler.durations import duration_text
from ostler.errors import AgentExecutionError, AgentGoneError, InvalidOperationError
from ostler.model.context import json_faults
from ostler.model.text import clipped
from ostler.model.validation import shown

MAX_HEALTH_TEXT = 1000
#: How long a clean-up hook that is late has to react to being cancelled, before the next one starts.
LATE_HOOK_GRACE_S = 1.0

#: Verbs that are part of a stop; the others end with `AgentGoneError` when the agent is stopped.
_ENDING = frozenset({"cleanup", "shutdown"})


class AgentRunner:
    """One agent object and its verbs. Calls may overlap.

    Everything here happens on the loop on which `run` is awaited, but for plain methods when there are `workers`.
    What the agent raises comes out as `AgentExecutionError`. SystemExit and its like come out as they are: they
    are a crash of the agent, and the isolation level must hold them before they reach its loop.
    """

    __slots__ = ("_agent", "_context", "_late", "_maker", "_shut", "_workers")

    def __init__(
        self, maker: AgentMaker, context: AgentContext, *, workers: concurrent.futures.Executor | None = None
    ) -> None:
        self._maker = maker
        self._context = context
        self._workers = workers
        self._agent: Agent | None = None
        #: Whether its shutdown, which happens once, has completed; None before it.
        self._shut: asyncio.Future[bool] | None = None
        #: Hooks that outlived their time; held here, for the loop itself holds tasks only weakly.
        self._late: set[asyncio.Task[Any]] | None = None

    @property
    def context(self) -> AgentContext:
        return self._context

    def make(self) -> Agent:
        """Create the agent object. Where the agent will live, for it may belong to its thread."""
        if self._agent is None:
            try:
                made = self._maker()
            except Exception as error:
                raise execution_error(error, ours=__file__) from error
            if not isinstance(made, Agent):
                raise AgentExecutionError(f"the maker of {self._context.name} made {shown(made)}, which is no Agent")
            if (fault := yielding_fault(made)) is not None:
                raise AgentExecutionError(fault.message)
            self._agent = made
        return self._agent

    async def run(self, verb: str, payload: Any = None, *, call_id: CallId | None = None) -> Any:
        """Ask the agent something. The verbs, and what each answers, are those of `ostler.isolation.Verb`.

        `call_id` is the level's name of the call; questions of the agent are asked under it.
        """
        agent = self.make()
        token = CallToken(asyncio.current_task(), call_id)
        match verb:
            case "initialize":
                await self._ask(verb, token, agent.initialize, self._context)
            case "process":
                return await self._ask(verb, token, agent.process, payload)
            case "health":
                return _illness(await self._ask(verb, token, agent.health))
            case "final_state":
                return _kept(await self._ask(verb, token, agent.final_state))
            case "cleanup":
                return await self._clean_up(call_id)
            case "shutdown":
                await self._shut_down(agent, token)
            case _:
                raise InvalidOperationError(f"an agent cannot be asked to {shown(verb)}")
        return None

    async def _shut_down(self, agent: Agent, token: CallToken) -> None:
        """Once. A second caller waits for the first to end, and gets an error if that was cut off."""
        if self._shut is not None:
            if not await asyncio.shield(self._shut):
                raise AgentExecutionError("its shutdown was cut off before")
            return
        self._shut = asyncio.get_running_loop().create_future()
        went_through = False
        try:
            await self._ask("shutdown", token, agent.shutdown)
            went_through = True
        finally:
            self._shut.set_result(went_through)

    # --- one call ------------------------------------------------------------------------------------

    async def _ask(self, verb: str, token: CallToken, method: Callable[..., Any], *arguments: Any) -> Any:
        before = CURRENT_CALL.set(token)
        try:
            return await self._invoke(partial(method, *arguments), token)
        except _NoWorkersError:
            raise AgentGoneError from None
        except asyncio.CancelledError as error:
            if token.cancelled:
                raise
            # This call was not cancelled: the agent raised CancelledError itself, which would mislead the caller.
            if self._context.stopping and verb not in _ENDING:
                raise AgentGoneError("the agent was stopped while it worked on this") from error
            raise self._failed(verb, error) from error
        except Exception as error:
            if token.cancelled:
                # It ended because it was cancelled; an error during that is not the outcome.
                raise asyncio.CancelledError from error
            if isinstance(error, AgentExecutionError):
                raise
            raise self._failed(verb, error) from error
        finally:
            token.given_up = token.cancelled
            # A coroutine that is dropped instead of awaited is closed by its owner, in another context.
            with suppress(ValueError):
                CURRENT_CALL.reset(before)

    def _failed(self, verb: str, error: BaseException) -> AgentExecutionError:
        failure = execution_error(error, ours=__file__)
        self._context.logger.failed(verb, failure.stack_trace)
        return failure

    async def _invoke(self, call: partial[Any], token: CallToken, *, patient: bool = True) -> Any:
        if self._workers is None or _runs_here(call.func):
            answer = call()
        else:
            answer = await self._on_worker(self._workers, call, token, patient=patient)
        return await answer if answer is not None and inspect.isawaitable(answer) else answer

    async def _on_worker(
        self, workers: concurrent.futures.Executor, call: Callable[[], Any], token: CallToken, *, patient: bool
    ) -> Any:
        """Run it in a thread. When cancelled, a patient caller waits until the thread has come back."""
        loop, finished = asyncio.get_running_loop(), asyncio.Event()
        try:
            job = workers.submit(copy_context().run, _outcome, call)
        except RuntimeError:
            raise _NoWorkersError from None

        def tell(_job: object) -> None:
            # The loop may be closed already.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finished.set)

        job.add_done_callback(tell)
        try:
            await finished.wait()
        except asyncio.CancelledError:
            token.given_up = True
            if not job.cancel() and patient:
                await _through(finished)
                _drop(job.result()[0])
            raise
        if job.cancelled():
            raise _NoWorkersError
        answer, error = job.result()
        if error is None:
            return answer
        try:
            raise error
        finally:
            # The frame would hold the error, and the error the frame.
            del error, job

    # --- the hooks -----------------------------------------------------------------------------------

    async def _clean_up(self, call_id: CallId | None) -> list[str]:
        complaints = []
        while (hook := self._context.next_cleanup()) is not None:
            complaint = await self._run_hook(hook, call_id)
            if complaint is not None:
                complaints.append(complaint)
        return complaints

    async def _run_hook(self, hook: CleanupHook, call_id: CallId | None) -> str | None:
        # In a task of its own, because a hook that ignores its cancellation must be left behind.
        task = asyncio.create_task(self._settle(hook, call_id), name=f"clean-up {hook.name}")
        try:
            async with Deadline(self._context.clock, hook.timeout):
                await asyncio.wait({task})
        except TimeoutError:
            await self._leave(task)
            return f"clean-up {hook.name} took longer than {duration_text(hook.timeout)}"
        finally:
            task.cancel()
        error = task.result()
        return None if error is None else clipped(f"clean-up {hook.name} failed: {error_text(error)}", MAX_HEALTH_TEXT)

    async def _settle(self, hook: CleanupHook, call_id: CallId | None) -> BaseException | None:
        """What the hook raised. An exit out of a hook is a failure like others: the rest has to be cleaned up."""
        token = CallToken(asyncio.current_task(), call_id)
        CURRENT_CALL.set(token)
        try:
            await self._invoke(partial(hook.call), token, patient=False)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - told, and the next hook has its turn
            return error
        return None

    async def _leave(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        with suppress(TimeoutError):
            async with Deadline(self._context.clock, LATE_HOOK_GRACE_S):
                await asyncio.wait({task})
        if not task.done():
            self._late = self._late or set()
            self._late.add(task)
            task.add_done_callback(self._late.discard)


class _NoWorkersError(Exception):
    """The place where plain methods run is closed."""


def _runs_here(method: Callable[..., Any]) -> bool:
    """Async methods run on the loop; and the defaults do nothing, which is not worth a thread."""
    return inspect.iscoroutinefunction(method) or getattr(method, "__func__", None) in _DEFAULTS


_DEFAULTS = frozenset({Agent.initialize, Agent.process, Agent.health, Agent.final_state, Agent.shutdown})


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - carried to the loop, where it is told apart
        return None, error


async def _through(event: asyncio.Event) -> None:
    """Wait however often the caller is cancelled: a thread that still runs must not be reported as stopped."""
    while not event.is_set():
        with suppress(asyncio.CancelledError):
            await event.wait()


def _drop(answer: Any) -> None:
    """A plain method may have returned a coroutine that will not be awaited any more."""
    if inspect.iscoroutine(answer):
        answer.close()


# --- what the answers mean ---------------------------------------------------------------------------


def _illness(answer: Any) -> str | None:
    if answer is None or answer is True:
        return None
    if answer is False or answer == "":
        return "reported unhealthy"
    try:
        return clipped(answer if isinstance(answer, str) else str(answer), MAX_HEALTH_TEXT)
    except Exception as error:
        raise execution_error(error, ours=__file__) from error


def _kept(state: Any) -> dict[str, Any] | None:
    """A copy of the state: the object that the agent gave may change while it is being written."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise AgentExecutionError(f"final_state must answer a mapping or None, was {shown(state)}")
    faults = tuple(json_faults("final_state", state))
    if faults:
        raise AgentExecutionError("; ".join(fault.message for fault in faults))
    copy: dict[str, Any] = json.loads(json.dumps(dict(state)))
    return copy
