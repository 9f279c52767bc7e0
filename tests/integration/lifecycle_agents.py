"""Agents that do as they are told, at every level of isolation. They meet their test on a stage: a directory."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ostler import Agent, AgentContext

#: Agents that misbehave end after so many real seconds, even when a test forgets them; a slow test is not over by then.
_LAST_RESORT_SECONDS = 120.0
_ALL = "all"


class Stage:
    """Where a test and its agents meet; usable from every thread and every process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._made = time.monotonic()

    @property
    def said(self) -> list[str]:
        try:
            return (self.directory / "said").read_text().splitlines()
        except FileNotFoundError:
            return []

    def say(self, word: str) -> None:
        with (self.directory / "said").open("a") as file:
            file.write(f"{word}\n")

    def release(self, gate: str = _ALL) -> None:
        """What hangs at this gate goes on, now and later."""
        (self.directory / f"go-{gate}").touch()

    def is_released(self, gate: str) -> bool:
        names = (f"go-{gate}", f"go-{_ALL}")
        over = time.monotonic() - self._made > _LAST_RESORT_SECONDS
        return over or any((self.directory / name).exists() for name in names)

    async def hang(self, gate: str, *, heeds: bool = True) -> None:
        """Until the gate is released. One that does not heed its cancellation goes on all the same."""
        while not self.is_released(gate):
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:
                self.say("cancelled")
                if heeds:
                    raise

    def block(self, gate: str) -> None:
        """The same, but nothing else happens on this thread."""
        while not self.is_released(gate):
            time.sleep(0.002)


class Actor(Agent):
    """A request is a mapping: `do` names a method below. What else it does stands in the context of its spawn."""

    agent_name = "actor"
    context: AgentContext
    stage: Stage

    async def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.stage = Stage(Path(context.data["stage"]))
        self.stage.say("initialize")
        self.stage.say(f"attempt {context.attempt}")
        quirk = context.data.get("initialize")
        if context.attempt in context.data.get("bad_attempts", ()):
            raise ValueError("a bad start")
        if context.attempt in context.data.get("slow_attempts", ()):
            await self.stage.hang("start")
        match quirk:
            case "fail":
                _ = context.workdir
                raise ValueError("not today")
            case "exit":
                raise SystemExit(3)
            case "long error":
                raise RuntimeError("x" * 200_000)
            case "hang" | "stubborn":
                await self.stage.hang("start", heeds=quirk == "hang")

    async def process(self, request: Mapping[str, Any]) -> Any:
        return await getattr(self, f"do_{request['do']}")(request)

    async def health(self) -> Any:
        self.stage.say("health")
        file = self.stage.directory / "health"
        said = file.read_text() if file.exists() else ""
        if said == "raise":
            raise ValueError("no idea")
        if said == "hang":
            await self.stage.hang("health")
        return said or None

    async def final_state(self) -> Any:
        self.stage.say("final_state")
        return {"notes": self.stage.said.count("initialize")}

    async def shutdown(self) -> None:
        self.stage.say("shutdown")
        match self.context.data.get("shutdown"):
            case "fail":
                raise ValueError("it does not close")
            case "hang" | "stubborn" as quirk:
                await self.stage.hang("stop", heeds=quirk == "hang")

    # --- what it can be told to do ---------------------------------------------------------------

    async def do_echo(self, request: Mapping[str, Any]) -> Any:
        return request.get("value")

    async def do_count(self, request: Mapping[str, Any]) -> int:
        """Each execution leaves a line."""
        self.stage.say(f"executed {request.get('what', '')}")
        return self.stage.said.count(f"executed {request.get('what', '')}")

    async def do_fail(self, request: Mapping[str, Any]) -> None:
        raise ValueError(request.get("text", "as told"))

    async def do_exit(self, _request: Mapping[str, Any]) -> None:
        raise SystemExit(3)

    async def do_kill(self, _request: Mapping[str, Any]) -> None:
        """Only at level process."""
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_survive(self, _request: Mapping[str, Any]) -> str:
        """Dies in the attempts that its context names."""
        if self.context.attempt in self.context.data.get("dies_at", ()):
            raise SystemExit(3)
        return f"survived at {self.context.attempt}"

    async def do_hang(self, request: Mapping[str, Any]) -> Any:
        self.stage.say("began")
        await self.stage.hang(request.get("gate", "work"))
        self.stage.say("ended")
        return request.get("value", "let go")

    async def do_hang_and_fail(self, _request: Mapping[str, Any]) -> None:
        self.stage.say("began")
        await self.stage.hang("work")
        self.stage.say("ended")
        raise ValueError("as told")

    async def do_stubborn(self, _request: Mapping[str, Any]) -> str:
        self.stage.say("began")
        await self.stage.hang("work", heeds=False)
        return "let go"

    async def do_block(self, _request: Mapping[str, Any]) -> str:
        self.stage.say("began")
        self.stage.block("work")
        return "let go"

    async def do_stand_still(self, _request: Mapping[str, Any]) -> str:
        """Blocks its loop and uses no CPU, so far as that can be."""
        self.stage.say("began")
        while not self.stage.is_released("work"):
            time.sleep(0.5)  # noqa: ASYNC251 - its loop stands still on purpose
        return "let go"

    async def do_mumble(self, _request: Mapping[str, Any]) -> str:
        """Blocks its loop, and reports all the same."""
        self.stage.say("began")
        while not self.stage.is_released("work"):
            time.sleep(0.005)  # noqa: ASYNC251 - its loop stands still on purpose
            self.context.report(message="still at it")
        return "let go"

    async def do_ask(self, request: Mapping[str, Any]) -> Any:
        limit = request.get("seconds")
        answer = await self.context.wait_for(
            request.get("kind", "human"),
            reason=request.get("reason", "which colour?"),
            timeout=timedelta(seconds=limit) if limit else None,
        )
        self.stage.say(f"answered {answer.outcome}")
        return [answer.outcome, dict(answer.answer) if answer.answer else None]

    async def do_ask_briefly(self, request: Mapping[str, Any]) -> str:
        """Gives its question up by itself."""
        try:
            async with asyncio.timeout(request["seconds"]):
                await self.context.wait_for("human", reason="quickly?")
        except TimeoutError:
            self.stage.say("gave up")
            return "gave up"
        return "answered"

    async def do_speak_alone(self, request: Mapping[str, Any]) -> None:
        """Later, beside any request, when the gate is released."""
        self.speaking = asyncio.get_running_loop().create_task(self._speak_alone(request))

    async def _speak_alone(self, request: Mapping[str, Any]) -> None:
        await self.stage.hang("speak")
        for number in range(request["signals"]):
            self.context.signal("count", {"number": number})
        self.stage.say("spoken")
        if request.get("ends"):
            os._exit(3)

    async def do_ask_often(self, request: Mapping[str, Any]) -> list[str]:
        answers = await asyncio.gather(*(self.context.wait_for("human") for _ in range(request["times"])))
        return [one.outcome for one in answers]

    async def do_ask_for_ever(self, _request: Mapping[str, Any]) -> None:
        await self.context.wait_for("human", timeout=timedelta.max)

    async def do_ask_beside(self, _request: Mapping[str, Any]) -> None:
        """A wait that belongs to no request."""
        self.asking = asyncio.get_running_loop().create_task(self._ask_beside())

    async def _ask_beside(self) -> None:
        from ostler.agents.context import CURRENT_CALL  # noqa: PLC0415 - only this one steps out of its request

        CURRENT_CALL.set(None)
        answer = await self.context.wait_for("human", reason="beside")
        self.stage.say(f"beside {answer.outcome}")

    async def do_speak(self, request: Mapping[str, Any]) -> Any:
        for number in range(request.get("progress", 0)):
            self.context.report((number + 1) / request["progress"], f"step {number + 1}")
        for number in range(request.get("signals", 0)):
            self.context.signal(request.get("name", "count"), {"number": number, "pad": "x" * request.get("size", 0)})
        if "tokens" in request:
            self.context.report_tokens(request["tokens"])
        for name, value in request.get("metrics", {}).items():
            self.context.report_metric(name, value)
        if request.get("dies"):
            raise SystemExit(3)
        return request.get("value")

    async def do_know(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        """What it knows of itself."""
        mine = self.context
        return {
            "instance_id": str(mine.instance_id),
            "attempt": mine.attempt,
            "name": mine.name,
            "depth": mine.data.get("ANALYSISDEPTH"),
            "workdir": str(mine.workdir),
            "cwd": str(Path.cwd()),
            "env": dict(mine.env),
            "variable": os.environ.get("OSTLER_TEST_VARIABLE"),
            "threads": mine.limits.max_worker_threads,
            "thread": threading.get_ident(),
            "pid": os.getpid(),
        }

    async def do_grow(self, request: Mapping[str, Any]) -> int:
        self.ballast = bytearray(request["megabytes"] << 20)
        return len(self.ballast)

    async def do_log(self, request: Mapping[str, Any]) -> None:
        self.context.logger.info("noted %s", request["value"])
        print(request["value"], flush=True)  # noqa: T201 - what it prints is in its log

    async def do_write(self, request: Mapping[str, Any]) -> None:
        assert self.context.workdir is not None
        (self.context.workdir / request["name"]).write_text("kept")

    async def do_hook(self, request: Mapping[str, Any]) -> None:
        """Add clean-up hooks, each with a quirk."""
        for name, quirk in request["hooks"].items():
            self.context.add_cleanup(self._hook(name, quirk), name=name, timeout=timedelta(seconds=1))

    def _hook(self, name: str, quirk: str | None) -> Any:
        async def run() -> None:
            self.stage.say(f"hook {name}")
            if quirk == "fail":
                raise ValueError("dirty")
            if quirk is not None:
                await self.stage.hang("hook", heeds=quirk == "hang")

        return run


class Unmade(Actor):
    """Cannot be made."""

    agent_name = "unmade"

    def __init__(self) -> None:
        raise ValueError("cannot be made")


class SlowlyMade(Actor):
    agent_name = "slowly made"

    def __init__(self) -> None:
        time.sleep(2)


class NeverMade(Actor):
    agent_name = "never made"

    def __init__(self) -> None:
        time.sleep(600)


class Plain(Agent):
    """Methods without async."""

    agent_name = "plain"

    def initialize(self, context: AgentContext) -> None:
        self.stage = Stage(Path(context.data["stage"]))

    def process(self, request: Any) -> Any:
        self.stage.say("began")
        self.stage.block("work")
        return ["plain", request]


async def greet(request: Any, context: AgentContext) -> str:
    """An agent that is one function."""
    return f"hello {request} from {context.name}"
