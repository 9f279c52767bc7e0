"""What an agent knows about itself, and its way to speak to its manager."""

from __future__ import annotations

import json
import logging
from asyncio import CancelledError, Task
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.agents.messages import (
    MetricReported,
    Progress,
    Signal,
    TokensUsed,
    Voice,
    WaitAnswer,
    WaitAsked,
    checked_message,
    duration_faults,
    word_faults,
)
from ostler.clock import Clock
from ostler.errors import ValidationError
from ostler.model.context import ContextData
from ostler.model.spawn import ResourceLimits
from ostler.model.text import MAX_NAME
from ostler.model.validation import Fault, shown

MAX_HOOKS = 1000
#: How an isolation level names one call.
CallId = UUID | str | int


class CallToken:
    """Which call it is and whether it was cancelled; readable from the worker threads of that call."""

    __slots__ = ("_before", "_task", "call_id", "given_up")

    def __init__(self, task: Task[Any] | None, call_id: CallId | None = None) -> None:
        #: As the isolation level names the call; None where it has no name.
        self.call_id = call_id
        self._task = task
        self._before = task.cancelling() if task else 0
        #: Set by the runner. The task's own count can fall again, when a time-out takes its cancelling back.
        self.given_up = False

    @property
    def cancelled(self) -> bool:
        return self.given_up or (self._task is not None and self._task.cancelling() > self._before)


#: The call in which the code that reads it runs. It is copied into worker threads with the other context variables.
CURRENT_CALL: ContextVar[CallToken | None] = ContextVar("ostler_current_call", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanupHook:
    call: Callable[[], Any]
    name: str
    timeout: timedelta


@dataclass(kw_only=True, slots=True, eq=False)
class AgentContext:
    """Handed to `Agent.initialize`; keep it. One start of one instance has one, and a restart gets another.

    What it refuses it refuses at the call, with a `ValidationError`, so that the mistake shows where it was made.
    """

    instance_id: UUID
    attempt: int
    definition_id: UUID
    name: str
    #: Keys are read in any case. A plain mapping becomes `ContextData`.
    data: ContextData = field(default_factory=ContextData, repr=False)
    limits: ResourceLimits = field(repr=False)
    #: Time as Ostler counts it; an agent that waits by it can be tested without waiting.
    clock: Clock = field(repr=False)
    voice: Voice = field(repr=False)
    #: Where the workdir is, or would be; the property `workdir` makes it.
    directory: Path | None = field(default=None, repr=False)
    #: False for a directory that the spawn has given: it is never made here.
    owns_directory: bool = field(default=True, repr=False)
    #: The extra variables of the spawn. At level process they are also in the environment of the process.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Takes text for the log of this instance; None where there is no log.
    write_log: Callable[[str], object] | None = field(default=None, repr=False)
    _has_directory: bool = field(default=False, init=False, repr=False)
    _stopping: bool = field(default=False, init=False, repr=False)
    _hooks: list[CleanupHook] | None = field(default=None, init=False, repr=False)
    _logger: AgentLog | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.data, ContextData):
            self.data = ContextData(self.data)

    @property
    def workdir(self) -> Path | None:
        """The directory that this instance works in; None where there is none.

        A private one is made when it is first asked for. One that the spawn has given is left as it is.
        """
        if self.directory is not None and self.owns_directory and not self._has_directory:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._has_directory = True
        return self.directory

    @property
    def logger(self) -> AgentLog:
        """Writes time, level, name and message into the log of this instance, at every level of isolation."""
        if self._logger is None:
            self._logger = AgentLog(self)
        return self._logger

    # --- speaking ------------------------------------------------------------------------------------

    def report(self, fraction: float | None = None, message: str | None = None, **details: Any) -> None:
        """Report how far the work is. From any thread; returns at once."""
        progress = checked_message(Progress(fraction=fraction, message=message, details=details))
        self.voice.say(replace(progress, details=_own(details)))

    def signal(self, name: str, payload: Mapping[str, Any] | None = None) -> None:
        """Send a named message to the supervisor of this agent. From any thread; returns at once."""
        signal = checked_message(Signal(name=name, payload=payload))
        self.voice.say(replace(signal, payload=_own(payload)))

    def report_tokens(self, count: int, model: str | None = None) -> None:
        """Report tokens that were used since the last report."""
        self.voice.say(checked_message(TokensUsed(count=count, model=model)))

    def report_metric(self, name: str, value: float) -> None:
        self.voice.say(checked_message(MetricReported(name=name, value=value)))

    async def wait_for(
        self,
        kind: str,
        *,
        reason: str | None = None,
        timeout: timedelta | None = None,  # noqa: ASYNC109 - kept by the manager, so that it outlives this process
        detail: Mapping[str, Any] | None = None,
    ) -> WaitAnswer:
        """Stop here until the answer comes from outside, or the time is over.

        Only from async code, for the wait is awaited on the agent's own loop.
        """
        wait = checked_message(WaitAsked(kind=kind, reason=reason, timeout=timeout, detail=detail))
        return await self.voice.ask(replace(wait, kind=str(kind), detail=_own(detail)))

    # --- ending --------------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether the present call was cancelled, or the whole agent is being stopped. From any thread."""
        call = CURRENT_CALL.get()
        return self._stopping or (call is not None and call.cancelled)

    def raise_if_cancelled(self) -> None:
        """For a plain method that works for long: call it now and then, and it ends when it should."""
        if self.cancelled:
            raise CancelledError

    @property
    def stopping(self) -> bool:
        return self._stopping

    def mark_stopping(self) -> None:
        """Called by the isolation level when it stops the agent, not by the agent."""
        self._stopping = True

    def add_cleanup(
        self, hook: Callable[[], Any], *, name: str | None = None, timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        """Run this on an orderly stop, before `shutdown`. The last one added runs first; plain or async."""
        name = _hook_name(hook) if name is None else name
        faults = (*_hook_faults(hook, self._hooks), *word_faults("name", name), *duration_faults("timeout", timeout))
        if faults:
            raise ValidationError(faults)
        self._hooks = self._hooks or []
        self._hooks.append(CleanupHook(call=hook, name=name, timeout=timeout))

    def next_cleanup(self) -> CleanupHook | None:
        """Take out the hook that is due next; each is given out once."""
        return self._hooks.pop() if self._hooks else None


class AgentLog(logging.LoggerAdapter[logging.Logger]):
    """Into the log of the instance from level INFO on, and to the logger `ostler.agent` where that has handlers.

    Instance and attempt are added to each record; what the agent adds itself stays.
    """

    def __init__(self, context: AgentContext) -> None:
        who = {"instance_id": str(context.instance_id), "attempt": context.attempt}
        super().__init__(logging.getLogger("ostler.agent"), who)
        self._own = logging.Logger(context.name, logging.INFO)  # noqa: LOG001 - its own, not one of the program
        if context.write_log is not None:
            self._own.addHandler(_LogHandler(context.write_log))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        if self._own.handlers:
            self._own.log(level, msg, *args, **kwargs)
        if self.logger.hasHandlers():  # else Python would write it to standard error by itself
            super().log(level, msg, *args, **kwargs)

    def failed(self, what: str, trace: str | None) -> None:
        """A method of the agent failed. Its caller gets the error, so only the log of the instance is written."""
        self._own.error("%s failed\n%s", what, (trace or "").rstrip())


class _LogHandler(logging.Handler):
    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a log that cannot be written must not fail the agent
            self.handleError(record)


def _own(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A copy that the agent cannot change any more; None for nothing."""
    return json.loads(json.dumps(dict(data))) if data else None


def _hook_name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)[:MAX_NAME]


def _hook_faults(hook: Any, hooks: list[CleanupHook] | None) -> Iterator[Fault]:
    if not callable(hook):
        yield Fault(field="hook", bound="must be something that can be called", value=shown(hook))
    if hooks is not None and len(hooks) >= MAX_HOOKS:
        yield Fault(field="hook", bound=f"must be one of at most {MAX_HOOKS}")
