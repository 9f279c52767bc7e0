"""The part of the demo that is played in turns: a small economy whose program is killed in mid-turn.

Run as a program, `flock.py HOME`, it is the one that is killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from ostler import open_store
from ostler.simulation import TurnReport, begin_run, load_scenario, replay, resume_run
from telling import say, title

SCENARIO = Path(__file__).resolve().parent / "economy" / "scenario.toml"
TURNS = 60
#: It dies while it plays the turn after this one, or a little later.
LAST_HEARD = 25


async def flock(home: Path) -> None:
    title("15. A population in turns; its program is killed in mid-turn")
    run_id = await asyncio.to_thread(_kill_in_turn, home / "economy")
    scenario = load_scenario(SCENARIO, overrides={"turns": TURNS})
    async with open_store(home / "economy") as store:
        async with resume_run(store, run_id, scenario) as run:
            say(f"{len(run.state.agents)} traders; SIGKILL after turn {run.state.turn} was complete")
            await run.finish()
        played = [turn async for turn in replay(store, run_id, first=1)]
        done = [one["operation"] for turn in played for one in turn.operations if one.get("done", True)]
        born, left = done.count("add_agent"), done.count("remove_agent")
        say(f"resumed and played to turn {played[-1].turn}: {born} were brought up, {left} went bankrupt")
        async with begin_run(store, scenario) as whole:
            await whole.finish()
    same = whole.record.digest == run.record.digest
    told = "the same history" if same else "ANOTHER history"
    say(f"the same {TURNS} turns without a crash: {told}, digest {whole.record.digest[:12]}")
    if not same:
        raise SystemExit("the promise of this act does not hold; please report it")


def _kill_in_turn(home: Path) -> UUID:
    """Start the run as a program, listen to its turns, and kill -9 it."""
    child = subprocess.Popen([sys.executable, __file__, str(home)], stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(child.stdout.readline, "") if child.stdout is not None else iter(())
        run_id = UUID(next(lines).strip())
        for line in lines:
            if int(line) >= LAST_HEARD:
                break
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    return run_id


async def play(home: str) -> None:
    scenario = load_scenario(SCENARIO, overrides={"turns": TURNS})
    async with open_store(home) as store, begin_run(store, scenario) as run:
        os.write(1, f"{run.run_id}\n".encode())

        def heard(report: TurnReport) -> None:
            os.write(1, f"{report.turn}\n".encode())

        await run.finish(on_turn=heard)


if __name__ == "__main__":
    asyncio.run(play(sys.argv[1]))
