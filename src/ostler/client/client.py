"""`ostler.Client`: the verbs of a daemon for programs, async, with the types of the library."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx2

from ostler.client.blocking import RECONNECT_SECONDS
from ostler.client.calls import Prepared, StreamItem, StreamParser, prepare
from ostler.errors import OstlerError, StoreError, error_of
from ostler.home import SOCKET_FILE, chosen_home
from ostler.model.crew import CrewView
from ostler.model.disk import DiskUsage
from ostler.model.events import EVENT_CLASSES, Event
from ostler.model.instance import AgentInstance, TerminationResult, Why
from ostler.model.log import LogLine
from ostler.model.loop import CiResult, Iteration, PullRequest
from ostler.model.query import InboxRow, LifecycleStatistics, Report
from ostler.model.spawn import AgentSpawnOptions, TerminationOptions
from ostler.model.task import Task, TaskWhy
from ostler.model.wait import Wait
from ostler.workdirs.records import Undone

_PAUSE_SECONDS = 0.1
_WAIT_EXTRA = ("instance_name", "task_key")
_TASK_EXTRA = ("title", "slug", "next", "waits", "warning", "undone")
_EXTRA = ("attempts", "definition", "doing", "dropped_bytes", "exit_code", "metrics_now")


class Client:
    """Use it with `async with`. Without arguments it talks to the daemon of the default home."""

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        token: str | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """`directory` names the project whose definitions and settings count; without it that of the home."""
        self._token = token
        self._directory = None if directory is None else os.path.abspath(directory)  # noqa: PTH100 - as it is
        place = chosen_home(home) / SOCKET_FILE
        self._where = address or str(place)
        transport = None if address is not None else httpx2.AsyncHTTPTransport(uds=_short(place))
        base = f"http://{address.removeprefix('http://')}" if address is not None else "http://localhost"
        self._http = httpx2.AsyncClient(transport=transport, base_url=base, timeout=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def call(self, verb: str, /, *, key: str | None = None, **parameters: Any) -> Any:
        """Any verb by its name; the JSON of its answer. Raises the errors of the library."""
        prepared = prepare(verb, parameters, key=key, token=self._token, directory=self._directory)
        try:
            response = await self._http.request(
                prepared.method, prepared.path, content=prepared.body, headers=prepared.headers
            )
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise error_of(_document(response.content))
        return response.json()

    # --- instances -------------------------------------------------------------------------------

    async def spawn(
        self,
        definition: str | None = None,
        *,
        command: list[str] | None = None,
        options: AgentSpawnOptions | None = None,
        context: Mapping[str, Any] | None = None,
        job: Any = None,
        key: str | None = None,
    ) -> AgentInstance:
        """A definition by its name, or a command by its words."""
        body: dict[str, Any] = {"definition": definition, "command": command, "context": context}
        if options is not None:
            checked = options.checked()
            body["options"] = {name: value for name, value in checked.to_dict().items() if name in checked.fields_set}
        if job is not None:
            body["job"] = {"request": job}
        spawn = {name: value for name, value in body.items() if value is not None}
        return _instance(await self.call("spawn", spawn=spawn, key=key))

    async def instances(self, **criteria: Any) -> list[AgentInstance]:
        return [_instance(values) for values in await self.call("instances", **criteria)]

    async def instance(self, instance: str | UUID) -> AgentInstance:
        return _instance(await self.call("instance", instance=instance))

    async def why(self, instance: str | UUID) -> Why:
        return Why.from_dict(await self.call("why", instance=instance))

    async def suspend(self, instance: str | UUID, depth: str | None = None, **more: Any) -> AgentInstance:
        return _instance(await self.call("suspend", instance=instance, depth=depth, **more))

    async def resume(self, instance: str | UUID) -> AgentInstance:
        return _instance(await self.call("resume", instance=instance))

    async def restart(self, instance: str | UUID, *, reason: str | None = None) -> AgentInstance:
        return _instance(await self.call("restart", instance=instance, reason=reason))

    async def terminate(self, instance: str | UUID, options: TerminationOptions | None = None) -> TerminationResult:
        chosen = (options or TerminationOptions()).checked()
        return TerminationResult.from_dict(await self.call("terminate", instance=instance, options=chosen.to_dict()))

    async def ask(self, instance: str | UUID, request: Any, **more: Any) -> Any:
        """The answer; `request_id` and `timeout` as in the library."""
        return (await self.call("ask", instance=instance, request=request, **more))["answer"]

    # --- looking ---------------------------------------------------------------------------------

    async def waits(self, instance: str | UUID | None = None) -> list[Wait]:
        return [_wait(values) for values in await self.call("waits", instance=instance)]

    async def answer(self, wait: str | UUID, outcome: str = "done", answer: Mapping[str, Any] | None = None) -> Wait:
        return Wait.from_dict(await self.call("answer", wait=wait, outcome=outcome, answer=answer))

    async def inbox(self) -> list[InboxRow]:
        """What needs a person, the oldest first."""
        return [InboxRow.from_dict(values) for values in await self.call("inbox")]

    async def report(self, since: str | datetime = "10h") -> Report:
        """What happened since a moment, or in the last so long."""
        text = since.isoformat() if isinstance(since, datetime) else since
        return Report.from_dict(await self.call("report", since=text))

    async def statistics(self) -> LifecycleStatistics:
        totals = await self.call("statistics")
        return LifecycleStatistics.from_dict({name: value for name, value in totals.items() if name != "tasks"})

    async def prune(self, *, older_than: str | float | None = None, dry_run: bool = False) -> list[dict[str, Any]]:
        """Remove all instances that have ended, or did so longer ago than that; what was removed."""
        removed: list[dict[str, Any]] = await self.call("prune", older_than=older_than, dry_run=dry_run)
        return removed

    async def disk(self) -> DiskUsage:
        """What the home takes on the disk, by kind and by task."""
        values = await self.call("disk")
        tasks = [{name: value for name, value in task.items() if name != "total"} for task in values["tasks"]]
        rest = {name: value for name, value in values.items() if name not in {"total", "share"}}
        return DiskUsage.from_dict({**rest, "tasks": tasks})

    # --- tasks -----------------------------------------------------------------------------------

    async def add_task(self, task: str, *, key: str | None = None, **more: Any) -> Task:
        """`more` as in `TaskOrchestrator.submit`; `key` makes the call safe to repeat."""
        return _task(await self.call("add_task", key=key, new_task={"task": task, **more}))

    async def add_tasks(
        self, entries: Sequence[Mapping[str, Any]], *, near: str | None = None, key: str | None = None
    ) -> list[Task]:
        """All of them or none; an entry holds the arguments of `TaskOrchestrator.submit`."""
        added = await self.call("add_tasks", key=key, entries=list(map(dict, entries)), near=near)
        return [_task(values) for values in added]

    async def tasks(self, **criteria: Any) -> list[Task]:
        return [_task(values) for values in await self.call("tasks", **criteria)]

    async def task(self, key: str) -> Task:
        return _task(await self.call("task", task=key))

    async def accept(
        self, key: str, paths: Sequence[str] = (), *, message: str | None = None, branch_only: bool = False
    ) -> Task:
        answer = await self.call("accept", task=key, paths=list(paths), message=message, branch_only=branch_only)
        return _task(answer)

    async def undo(self, key: str) -> Task:
        return (await self.take_back(key))[0]

    async def take_back(self, key: str) -> tuple[Task, list[Undone]]:
        """As `undo`, with what it did and could not do."""
        answer = await self.call("undo", task=key)
        return _task(answer), [Undone.from_dict(part) for part in answer["undone"]]

    async def reject(self, key: str, reason: str) -> Task:
        return _task(await self.call("reject", task=key, reason=reason))

    async def hand_in(self, key: str) -> Task:
        """What a person has changed in the workdir of a completed task; see `TaskOrchestrator.hand_in`."""
        return _task(await self.call("hand_in", task=key))

    async def send_back(self, key: str, comment: str) -> Task:
        return _task(await self.call("send_back", task=key, comment=comment))

    async def why_task(self, key: str) -> TaskWhy:
        return TaskWhy.from_dict(await self.call("why_task", task=key))

    async def cancel_task(self, key: str, *, reason: str | None = None) -> Task:
        return _task(await self.call("cancel_task", task=key, reason=reason))

    async def requeue_task(self, key: str) -> Task:
        return _task(await self.call("requeue_task", task=key))

    async def hold_task(self, key: str) -> Task:
        return _task(await self.call("hold_task", task=key))

    async def task_waits(self, key: str) -> list[Wait]:
        """What it waits for."""
        return [Wait.from_dict(values) for values in (await self.call("task", task=key))["waits"]]

    # --- loops -----------------------------------------------------------------------------------

    async def put_in_loop(self, key: str, agent: str | None = None, **settings: Any) -> Task:
        """Drive a task through fresh starts; `settings` as in `LoopSettings`."""
        return _task(await self.call("put_in_loop", task=key, agent=agent, settings=settings))

    async def iterations(self, key: str) -> list[Iteration]:
        return [Iteration.from_dict(values) for values in await self.call("iterations", task=key)]

    async def wait_graph(self) -> dict[str, Any]:
        graph: dict[str, Any] = await self.call("wait_graph")
        return graph

    async def report_ci(self, commit: str, *, passed: bool, output: str = "") -> CiResult:
        """How CI judged a commit; kept, also when nothing waits for it yet."""
        return CiResult.from_dict(await self.call("report_ci", commit=commit, passed=passed, output=output))

    async def pull_requests(self, *, include_ended: bool = False) -> list[PullRequest]:
        replies = await self.call("pull_requests", include_ended=include_ended)
        return [PullRequest.from_dict(values) for values in replies]

    async def pull_request(self, number: int) -> PullRequest:
        return PullRequest.from_dict(await self.call("pull_request", number=number))

    async def comment(self, number: int, comment: str) -> PullRequest:
        return PullRequest.from_dict(await self.call("comment", number=number, comment=comment))

    async def approve(self, number: int) -> PullRequest:
        return PullRequest.from_dict(await self.call("approve", number=number))

    async def merge(self, number: int) -> PullRequest:
        return PullRequest.from_dict(await self.call("merge", number=number))

    async def close(self, number: int, *, reason: str | None = None) -> PullRequest:
        """Close a pull request without a merge."""
        return PullRequest.from_dict(await self.call("close", number=number, reason=reason))

    # --- crews -----------------------------------------------------------------------------------

    async def crews(self) -> list[CrewView]:
        return [CrewView.from_dict(values) for values in await self.call("crews")]

    async def crew_up(self, *names: str) -> list[CrewView]:
        """Bring up these crews, or all that are declared."""
        return [CrewView.from_dict(values) for values in (await self.call("crew_up", names=names))["crews"]]

    async def crew_stop(self, *names: str, force: bool = False) -> list[CrewView]:
        """Stop these crews, or all, in order; it returns when their agents have ended."""
        return [CrewView.from_dict(values) for values in await self.call("crew_stop", names=names, force=force)]

    async def crew_scale(self, name: str, count: int) -> CrewView:
        return CrewView.from_dict(await self.call("crew_scale", crew=name, count=count))

    async def crew_reload(self) -> list[CrewView]:
        return [CrewView.from_dict(values) for values in await self.call("crew_reload")]

    # --- streams ---------------------------------------------------------------------------------

    async def events(
        self, instance: str | UUID | None = None, *, after: int | None = None, metrics: bool = False
    ) -> AsyncIterator[Event]:
        """The log from a number on, then live. After a lost connection it goes on from the last number.

        With `metrics` also what each agent uses, every few seconds.
        """
        cursor = None if after is None else str(after)
        async for item in self._follow("events", cursor, {"instance": instance, "metrics": metrics}):
            if (kind := EVENT_CLASSES.get(item.event)) is not None:
                yield kind.from_dict({name: value for name, value in item.data.items() if name != "event_type"})

    async def logs(
        self,
        instance: str | UUID,
        *,
        after: str | None = None,
        tail: int | None = None,
        follow: bool = False,
        raw: bool = False,
    ) -> AsyncIterator[LogLine]:
        """Lines of output; with `follow` until the instance has ended, with `raw` as they were written."""
        if not follow:
            for line in await self.call("logs", instance=instance, after=after, tail=tail, raw=raw):
                yield LogLine.from_dict(line)
            return
        async for item in self._follow("logs", after, {"instance": instance, "tail": tail, "raw": raw}):
            yield LogLine.from_dict(item.data)

    async def _follow(self, verb: str, cursor: str | None, parameters: Mapping[str, Any]) -> AsyncIterator[StreamItem]:
        """As in the blocking client: after a lost connection on from its cursor, until the daemon ends the stream."""
        lost_at: float | None = None
        while True:
            query = parameters if cursor is None else {**parameters, "after": cursor}
            try:
                prepared = prepare(verb, {**query, "follow": True}, token=self._token, directory=self._directory)
                async for item in self._stream(prepared):
                    lost_at = None
                    if item.event == "end":
                        return
                    if item.event != "bye":
                        cursor = item.id or cursor
                        yield item
            except httpx2.TransportError as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > RECONNECT_SECONDS:
                    raise self._unreachable(error) from error
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _stream(self, prepared: Prepared) -> AsyncIterator[StreamItem]:
        async with self._http.stream(prepared.method, prepared.path, headers=prepared.headers) as response:
            if response.status_code >= 400:
                raise error_of(_document(await response.aread()))
            parser = StreamParser()
            async for line in response.aiter_lines():
                if (item := parser.feed(line)) is not None:
                    yield item

    def _unreachable(self, error: Exception) -> OstlerError:
        return StoreError(f"no daemon answers at {self._where} ({error}); start it with `ostler up -d`")


def _instance(values: Mapping[str, Any]) -> AgentInstance:
    return AgentInstance.from_dict({name: value for name, value in values.items() if name not in _EXTRA})


def _wait(values: Mapping[str, Any]) -> Wait:
    return Wait.from_dict({name: value for name, value in values.items() if name not in _WAIT_EXTRA})


def _task(values: Mapping[str, Any]) -> Task:
    return Task.from_dict({name: value for name, value in values.items() if name not in _TASK_EXTRA})


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document: Mapping[str, Any] = json.loads(body)
    except ValueError:
        return {"code": "failed", "detail": body.decode(errors="replace")[:500]}
    return document


def _short(place: Path) -> str:
    """A path that fits into the address of a socket."""
    text = str(place)
    if len(os.fsencode(text)) <= 100:
        return text
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{place.name}"
