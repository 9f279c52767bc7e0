"""A program in a directory whose name is no UTF-8, as older disks and archives have them: its agents live there too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ostler
from ostler.agent_process.framing import LineReader, encode

ODD = "caf\udce9"
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from uuid import UUID
from ostler.agents import Agent, AgentKind, AgentManifest, CommandSpec
from ostler.isolation import Site, StartPlan, Verb
from ostler.isolation.process.level import ProcessIsolation
from ostler.model.spawn import ResourceLimits
from ostler.clock import SystemClock

class Settler(Agent):
    def initialize(self, context):
        self.context = context

    def process(self, request):
        (self.context.workdir / "note").write_text(request)
        return [ascii(Path(__file__).parent.name), ascii(Path.cwd().name)]

class Mute:
    def on_message(self, attempt, message): pass
    async def on_question(self, attempt, wait): raise NotImplementedError
    def on_report(self, attempt, calls, questions): pass
    def on_exit(self, attempt, how): pass

async def main(home, room):
    level, found = ProcessIsolation(SystemClock(), Site(directory=Path(home))), []
    for spec in (None, CommandSpec(argv=("sh", "-c", "echo done > $0", "note"))):
        kind = AgentKind.PYTHON if spec is None else AgentKind.COMMAND
        plan = StartPlan(
            instance_id=UUID(int=len(found) + 1), attempt=1, name="one", maker=Settler, limits=ResourceLimits(),
            manifest=AgentManifest(id=UUID(int=1), name="one", kind=kind, command=spec), context={},
            workdir=Path(room, str(len(found))),
        )
        await level.prepare(plan)
        cell = await level.start(plan, Mute())
        await cell.call(Verb.INITIALIZE)
        answer = await cell.call(Verb.PROCESS, "was here")
        found.append([answer if spec is None else None, (plan.workdir / "note").read_text().strip()])
        await cell.destroy()
    await level.close()
    print(json.dumps(found))

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def test_agents_live_and_work_where_a_name_is_no_utf8(tmp_path: Path) -> None:
    place = tmp_path / ODD
    place.mkdir()
    (place / "program.py").write_text(PROGRAM)
    room = place / "room"
    room.mkdir()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, str(place / "program.py"), str(tmp_path / "home"), str(room)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[[ascii(ODD), ascii(ODD)], "was here"], [None, "done"]]


def test_a_path_goes_over_the_channel_as_it_is_and_nothing_else_does() -> None:
    plan = {"t": "begin", "plan": {"workdir": f"/x/{ODD}", "name": "café"}}
    assert list(LineReader().feed(encode(plan, paths=True))) == [plan]
    with pytest.raises(ValueError, match="surrogates"):
        encode(plan)


def test_a_command_cannot_be_kept_with_a_directory_that_is_no_text() -> None:
    """Its definition stands in the store, which keeps text."""
    spec = ostler.CommandSpec(argv=("true",), cwd=f"/x/{ODD}")
    (fault,) = spec.validate().faults
    assert fault.message == (
        r"cwd must be a path that is UTF-8, for it is kept as text; rename the directory, or name a link to it, "
        r"was '/x/caf\udce9'"
    )
