"""A scenario in files, for tests of `ostler sim` as a program; and the program itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from ostler.simulation import PlayedTurn, replay

from ostler.model import SimulationRun
from ostler.store import view_store

PROGRAM = Path(sys.executable).parent / "ostler"

#: Chance, failures, pauses with a term, comings and goings; and where SIM_PLAN says so, an end or a halt in mid-turn.
CODE = '''\
import os, signal, threading
from pathlib import Path

def step(name, turn):
    """Tell that this was reached; die or wait here, if that is the plan."""
    folder = os.environ.get("SIM_MARK")
    if folder is None:
        return
    plan = os.environ.get("SIM_PLAN", "")
    if plan == f"kill:{name}:{turn}":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == f"wait:{name}:{turn}":
        Path(folder, "waiting").write_text(str(os.getpid()))
        threading.Event().wait()

class Trader:
    def __init__(self, step=1):
        self.step = step

    def decide(self, view):
        if view.number == 3:
            step("deciding", view.turn)
        what = view.random.random()
        if what < 0.06:
            raise RuntimeError("no luck")
        if what < 0.2:
            view.pause_agent(auto_resume_turns=view.random.randint(1, 4))
        elif what < 0.3:
            view.add_agent("child", kind="trader", params={"step": self.step + 1}, initial_state={"wealth": 3})
        elif what < 0.35 and len(view.names) > 3:
            view.remove_agent(view.random.choice(view.names))
        return {"give": view.random.randint(0, self.step), "to": view.random.choice(view.names)}

class Market:
    moved = 0

    def save(self):
        step("saving", self.turn) if hasattr(self, "turn") else None
        return self.moved

    def restore(self, saved):
        self.moved = saved

    def update(self, state, decisions, world):
        step("updating", state.turn)
        self.turn = state.turn
        for member, decision in decisions.pairs():
            give = min(decision["give"], member.state["wealth"])
            member.state["wealth"] -= give
            state.members[decision["to"]].state["wealth"] += give
            self.moved += give
        state.global_state["moved"] = self.moved * world.parameters["weight"]
'''

SCENARIO = """\
name = "market"
turns = 12
seed = 7
engine = "market:Market"

[settings]
max_agents = 60
failure_pause_turns = 2
snapshot_every = 4

[parameters]
weight = 1

[brains]
trader = "market:Trader"

[[agents]]
name = "trader"
kind = "trader"
count = 6
params = { step = 2 }
state = { wealth = 10 }
"""


class Scene:
    """One scenario, one home, and the program over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.file = folder / "market.toml"
        folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(SCENARIO)
        (folder / "market.py").write_text(CODE)

    def environment(self, **more: str) -> dict[str, str]:
        base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "OSTLER_HOME": str(self.home)}
        return base | {"PYTHONDONTWRITEBYTECODE": "1"} | more

    def sim(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, "sim", *arguments],
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )

    def told(self, *arguments: str | Path) -> Any:
        """What it says as JSON, when all goes well."""
        done = self.sim(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def runs(self) -> list[SimulationRun]:
        """Those in the home, newest first; not by the program, which takes longer."""

        async def within() -> list[SimulationRun]:
            async with view_store(self.home) as store:
                return list(await store.list_runs())

        return asyncio.run(within())

    def turns(self, run: str | None = None) -> list[PlayedTurn]:
        """Of the newest run, or of this one."""
        run_id = self.runs()[0].run_id if run is None else UUID(run)

        async def within() -> list[PlayedTurn]:
            async with view_store(self.home) as store:
                return [turn async for turn in replay(store, run_id)]

        return asyncio.run(within())


def until(sign: Path, program: subprocess.Popen[Any]) -> None:
    """Wait until the program has left this sign."""
    end = time.monotonic() + 60
    while not sign.exists():
        assert program.poll() is None, "the program ended before"
        assert time.monotonic() < end, "the program did not get there"
        time.sleep(0.01)
