"""The short way in: `manager.start(...)` and the handle that it gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from ostler.agents.commandspec import CommandSpec
from ostler.agents.registry import AgentKind, AgentManifest
from ostler.definitions import register_file
from ostler.errors import InvalidOperationError
from ostler.lifecycle.logs import LogLine
from ostler.lifecycle.observe import Observation
from ostler.lifecycle.verbs import Verbs
from ostler.model.attempt import Request
from ostler.model.instance import AgentInstance, TerminationResult, Why
from ostler.model.query import ObservationOptions
from ostler.model.spawn import AgentSpawnOptions, SpawnRequest, TerminationOptions
from ostler.model.states import IsolationLevel, SuspendDepth
from ostler.model.wait import Wait

_DEFINITION_FILES = (".md", ".toml")


class AgentHandle:
    """One instance, without its id in every call."""

    def __init__(self, manager: Verbs, instance_id: UUID | str) -> None:
        self._manager = manager
        self.instance_id = instance_id

    async def record(self) -> AgentInstance:
        found = await self._manager.get_instance(self.instance_id)
        if found is None:
            raise InvalidOperationError(f"instance {self.instance_id} is gone")
        return found

    async def ask(
        self,
        request: Any,
        *,
        id: str | UUID | None = None,  # noqa: A002 - short for the caller
        timeout: timedelta | float | str | None = None,  # noqa: ASYNC109 - the agent is cancelled, not the caller
        wait: bool = True,
        retries: int = 0,
    ) -> Any:
        """Its answer; see `Verbs.process`."""
        return await self._manager.process(
            self.instance_id, request, request_id=id, timeout=timeout, wait=wait, retries=retries
        )

    async def pause(
        self, depth: SuspendDepth | str | None = None, *, resume_after: timedelta | float | str | None = None
    ) -> AgentInstance:
        return await self._manager.suspend(self.instance_id, depth, resume_after=resume_after)

    async def resume(self) -> AgentInstance:
        return await self._manager.resume(self.instance_id)

    async def restart(self, *, reason: str | None = None) -> AgentInstance:
        return await self._manager.restart(self.instance_id, reason=reason)

    def events(self, *, after: int | None = None, options: ObservationOptions | None = None) -> Observation:
        return self._manager.observe(self.instance_id, options, after=after)

    def log(self, *, attempt: int | None = None, follow: bool = False, raw: bool = False) -> AsyncIterator[LogLine]:
        return self._manager.log(self.instance_id, attempt=attempt, follow=follow, raw=raw)

    async def why(self) -> Why:
        return await self._manager.why(self.instance_id)

    async def waits(self) -> list[Wait]:
        return await self._manager.open_waits(self.instance_id)

    async def requests(self) -> list[Request]:
        return await self._manager.get_requests(self.instance_id)

    async def stop(
        self, *, reason: str | None = None, grace: timedelta | float | str | None = None, keep_state: bool = False
    ) -> TerminationResult:
        options: dict[str, Any] = {"reason": reason, "persist_final_state": keep_state}
        if grace is not None:
            options["graceful_timeout"] = grace
        return await self._manager.terminate(self.instance_id, TerminationOptions(**options))

    async def ended(self) -> AgentInstance:
        """Wait until it is terminated, or failed with no restart to come."""
        async with self.events(options=ObservationOptions(include_reports=False)) as events:
            async for _ in events:
                pass  # the stream ends with the instance
        return await self.record()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it, unless it has ended already."""
        if (await self.record()).is_active:
            await self.stop(reason="its block has ended" if error is None else f"its block raised {error!r}"[:200])


class Start:
    """A spawn that is about to happen: `await` it, or `async with` it."""

    def __init__(
        self,
        manager: Verbs,
        agent: Any,
        *,
        options: Mapping[str, Any],
        limits: Mapping[str, Any],
        context: Mapping[str, Any] | None,
        key: str | None,
    ) -> None:
        self._manager = manager
        self._agent = agent
        self._options = {name: value for name, value in options.items() if value is not None}
        self._limits = {name: value for name, value in limits.items() if value is not None}
        self._context = context
        self._key = key
        self._handle: AgentHandle | None = None

    def __await__(self) -> Generator[Any, None, AgentHandle]:
        return self._spawn().__await__()

    async def __aenter__(self) -> AgentHandle:
        self._handle = await self._spawn()
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            await self._handle.__aexit__(kind, error, trace)

    async def _spawn(self) -> AgentHandle:
        manifest = _registered(self._manager, self._agent)
        values: dict[str, Any] = dict(self._options)
        if self._limits:
            values["resource_limits"] = dict(self._limits)
        if manifest is not None and manifest.kind is AgentKind.COMMAND and manifest.defaults is None:
            values.setdefault("isolation_level", IsolationLevel.PROCESS)  # commands need it
        options = AgentSpawnOptions.from_dict(values)
        definition = self._agent if manifest is None else manifest.id
        request = SpawnRequest(agent_definition_id=definition, options=options, context=self._context)
        record = await self._manager.spawn(request, idempotency_key=self._key)
        return AgentHandle(self._manager, record.instance_id)


def _registered(manager: Verbs, agent: Any) -> AgentManifest | None:
    """Register what is given as an object or a file; a name or an id is looked up by the spawn itself."""
    registry = manager.registry
    if isinstance(agent, AgentManifest):
        return agent
    if isinstance(agent, str | Path) and str(agent).endswith(_DEFINITION_FILES):
        return register_file(registry, agent)
    if isinstance(agent, str):
        try:
            return registry.find(agent)
        except LookupError:
            return None
        except Exception:  # noqa: BLE001 - the spawn says what is wrong with it, and audits it
            return None
    if isinstance(agent, UUID):
        return None
    if isinstance(agent, list | tuple):
        agent = CommandSpec(argv=tuple(agent))
    if isinstance(agent, CommandSpec):
        return registry.register(agent, name=_command_name(agent), replace=True)
    if getattr(agent, "__name__", "") == "<lambda>":  # it has no name of its own
        name = f"{agent.__module__}.lambda-{agent.__code__.co_firstlineno}"
        return registry.register(agent, name=name, replace=True)
    return registry.register(agent, replace=True)


def _command_name(spec: CommandSpec) -> str:
    return Path(spec.argv[0]).name if spec.argv and spec.argv[0] else "command"
