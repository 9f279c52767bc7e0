"""A manager that is killed again and again: it commits answers and messages to a file, and confirms them after that.

    python seam_victim.py HOME EPOCH JOURNAL

Each line of the journal is JSON: {"answer": [agent, index], "value": ...} or {"said": [agent, number], ...}. A line
that is torn was not committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from ostler.agents import (
    Agent,
    AgentContext,
    AgentKind,
    AgentManifest,
    CommandSpec,
    Message,
    Signal,
    TokensUsed,
    WaitAnswer,
    WaitAsked,
)
from ostler.clock import SystemClock
from ostler.isolation import Cell, Exit, Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.spawn import ResourceLimits

SPACE = UUID(int=0x5EA)
AGENTS = ("one", "two", "tool")
COMMAND = ("sh", "-c", 'printf %s "$(cat $OSTLER_PROMPT_FILE)" | tee -a ran; echo >> ran')


class Counter(Agent):
    """Says and answers how often it was asked."""

    def initialize(self, context: AgentContext) -> None:
        self.context = context
        self.times = 0

    async def process(self, request: int) -> list[int]:
        self.times += 1
        self.context.signal("did", {"index": request, "times": self.times})
        self.context.report_tokens(1)
        self.context.report(0.5)
        await asyncio.sleep(0.002 * (request % 3))
        return [request, self.times]


def call_id(agent: str, index: int) -> UUID:
    return uuid5(SPACE, f"{agent}:{index}")


def plan_of(agent: str, home: Path) -> StartPlan:
    is_command = agent == "tool"
    return StartPlan(
        instance_id=uuid5(SPACE, agent),
        attempt=1,
        name=agent,
        manifest=AgentManifest(
            id=UUID(int=1),
            name="victim",
            kind=AgentKind.COMMAND if is_command else AgentKind.PYTHON,
            command=CommandSpec(argv=COMMAND) if is_command else None,
        ),
        maker=Counter,
        limits=ResourceLimits(),
        context={},
        workdir=home.parent / agent,
    )


class Journal:
    def __init__(self, path: Path) -> None:
        self.answers: dict[tuple[str, int], Any] = {}
        self.heard: dict[str, int] = dict.fromkeys(AGENTS, 0)
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        for line in whole.splitlines():
            self._take(json.loads(line))
        path.write_bytes(whole + b"\n" if whole else b"")
        self._file = path.open("ab", buffering=0)

    def _take(self, entry: dict[str, Any]) -> None:
        if "answer" in entry:
            agent, index = entry["answer"]
            self.answers[agent, index] = entry["value"]
        elif "said" in entry:
            agent, number = entry["said"]
            self.heard[agent] = number

    def commit(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._take(entry)


class RecordingListener:
    """Commits what counts, in order, and acknowledges it a moment later."""

    def __init__(self, agent: str, journal: Journal) -> None:
        self.agent = agent
        self.journal = journal
        self.cell: Cell | None = None
        #: Calls of an earlier manager, once the agent has reported them.
        self.reported: asyncio.Future[Mapping[UUID, Verb]] = asyncio.get_running_loop().create_future()

    def on_message(self, attempt: int, message: Message) -> None:
        assert attempt == 1
        if isinstance(message, Signal | TokensUsed) and message.number > self.journal.heard[self.agent]:
            about = message.payload if isinstance(message, Signal) else None
            self.journal.commit({"said": [self.agent, message.number], "about": about})
        if self.cell is not None:
            self.cell.ack(message=self.journal.heard[self.agent])

    async def on_question(self, attempt: int, wait: WaitAsked) -> WaitAnswer:
        raise NotImplementedError

    def on_report(self, attempt: int, calls: Mapping[UUID, Verb], questions: Collection[UUID]) -> None:
        assert attempt == 1
        assert not questions
        self.reported.set_result(calls)

    def on_exit(self, attempt: int, how: Exit) -> None:
        assert attempt == 1
        self.journal.commit({"exited": str(how)})


async def live(agent: str, level: ProcessIsolation, journal: Journal, home: Path, *, is_first: bool) -> None:
    listener, plan = RecordingListener(agent, journal), plan_of(agent, home)
    if is_first:
        await level.prepare(plan)
        cell = await level.start(plan, listener)
        await cell.call(Verb.INITIALIZE)
        journal.commit({"started": agent})
    else:
        adopted = await level.adopt(None, plan, listener)
        if isinstance(adopted, Exit):
            journal.commit({"lost": str(adopted)})
            return
        cell = adopted
    listener.cell = cell
    index = max((one for name, one in journal.answers if name == agent), default=-1) + 1
    earlier_calls = {} if is_first else await listener.reported
    for earlier_id in earlier_calls:
        known = next(number for number in range(index + 2) if call_id(agent, number) == earlier_id)
        journal.commit({"found": [agent, known]})
        answer = await cell.call(Verb.PROCESS, call_id=earlier_id)
        if (agent, known) in journal.answers:  # committed by one that was killed before it could acknowledge
            value = answer if isinstance(answer, list) else answer["output"]
            if journal.answers[agent, known] != value:
                journal.commit({"differs": [agent, known, answer]})
        else:
            keep(journal, agent, known, answer)
            index = max(index, known + 1)
        cell.ack([earlier_id])
    while True:
        answer = await cell.call(Verb.PROCESS, str(index) if agent == "tool" else index, call_id=call_id(agent, index))
        await asyncio.sleep(0)
        keep(journal, agent, index, answer)
        await asyncio.sleep(0.001)
        cell.ack([call_id(agent, index)])
        index += 1


def keep(journal: Journal, agent: str, index: int, answer: Any) -> None:
    journal.commit({"answer": [agent, index], "value": answer if isinstance(answer, list) else answer["output"]})


async def main() -> None:
    home, epoch, path = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    level = ProcessIsolation(SystemClock(), Site(directory=home, outlive=timedelta(seconds=30), epoch=epoch))
    journal = Journal(path)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.gather(*(live(one, level, journal, home, is_first=epoch == 1) for one in AGENTS))


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    asyncio.run(main())
