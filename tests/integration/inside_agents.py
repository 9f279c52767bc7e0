"""The template that the tests of the inside share, and what its agents do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inside_ground import Template

MODULE = '''
import asyncio, os, random, sys, threading, time
from datetime import timedelta
from ostler.agents import Agent

class Scripted(Agent):
    def initialize(self, context):
        self.context = context
    async def process(self, request):
        return await getattr(self, request["do"])(request)
    def shutdown(self):
        self.context.signal("shut down")

    async def echo(self, request):
        return request.get("value")
    async def about(self, request):
        mine = self.context
        return {
            "instance": str(mine.instance_id), "data": dict(mine.data), "environment": dict(os.environ),
            "limits": [mine.limits.max_worker_threads, mine.limits.execution_timeout.total_seconds()],
            "fds": {one: os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{one}")},
            "stdin": sys.stdin.read(), "session": os.getsid(0), "parent": os.getppid(), "dice": random.random(),
        }
    async def noise(self, request):
        print("to whom it may concern")
        os.write(1, b"raw " * 10_000 + b"\\n")
        for number in (0, 1, 2):
            os.fstat(number)
        return "quiet"
    async def fail(self, request):
        raise ValueError("as told")
    async def set(self, request):
        return {1, 2}
    async def long(self, request):
        return "x" * request["length"]
    async def nan(self, request):
        return float("nan")
    async def leave(self, request):
        self.context.signal("last words")
        if request["how"] == "own task":
            async def leave():
                sys.exit(4)
            self.task = asyncio.create_task(leave())
            await asyncio.sleep(30)
        if request["how"] == "loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(30)
        raise {"exit": SystemExit(3), "text": SystemExit("because"), "none": SystemExit(),
               "key": KeyboardInterrupt(), "generator": GeneratorExit("odd")}[request["how"]]
    async def hang(self, request):
        self.context.signal("began")
        try:
            await asyncio.Event().wait()
        finally:
            self.context.signal("stopped")
    async def block(self, request):
        self.context.signal("began")
        time.sleep(30)
    async def wait(self, request):
        answer = await self.context.wait_for("human", reason="which?", timeout=timedelta(seconds=9))
        return [answer.outcome, answer.answer]
    async def flood(self, request):
        for number in range(request["count"]):
            self.context.report(number / request["count"], "x" * 500)
            if number % 100 == 0:
                self.context.signal("hundred", {"number": number})
        return "said"
    async def threads(self, request):
        running, most, lock = [0], [0], threading.Lock()
        def work():
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.02)
            self.context.report_tokens(1)
            with lock:
                running[0] -= 1
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(8)))
        return most[0]
    async def own_loop(self, request):
        """A question from a loop of its own, in a thread of its own."""
        return await asyncio.to_thread(lambda: asyncio.run(self.wait(request)))

class Plain(Agent):
    def initialize(self, context):
        self.context = context
    def process(self, request):
        self.context.signal("began")
        while True:
            self.context.raise_if_cancelled()
            time.sleep(0.002)

class Unmade(Agent):
    def __init__(self):
        raise ValueError("cannot be made")

class Leaving(Agent):
    def __init__(self):
        sys.exit(6)

class Outer:
    class Inner(Agent):
        def process(self, request):
            return "inner"

class Asked(Agent):
    def __init__(self, word):
        self.word = word
    def process(self, request):
        return self.word

def make():
    return Asked("made by a function")

constant = 5
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inside")
    (place / "scripted.py").write_text(MODULE)
    return place


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Template]:
    template = Template(directory, "scripted")
    assert template.answer["ready"] is True
    assert template.answer["forks"] is True, template.answer["why"]
    yield template
    template.close()
    assert template.process.returncode == 0, template.log()


@pytest.fixture
def template(shared: Template) -> Iterator[Template]:
    yield shared
    for agent in shared.agents:
        agent.close()
    shared.agents.clear()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Template]]:
    made: list[Template] = []

    def start(text: str, module: str = "mine", *, main: bool = False) -> Template:
        (tmp_path / f"{module}.py").write_text(text)
        made.append(Template(tmp_path, module, main=main))
        return made[-1]

    yield start
    for one in made:
        one.close()
