"""Lets the rumour loose and draws what becomes of it: `python examples/rumour/run.py [PICTURE]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ostler import open_store
from ostler.simulation.history import replay
from ostler.simulation.runs import begin_run
from ostler.simulation.scenariofile import load_scenario

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from charts import line_chart  # noqa: E402 - it stands one directory up, beside the other examples

MOODS = ("ignorant", "spreading", "tired")


async def play(home: Path) -> str:
    """A run that is kept turn by turn, told in a few lines; the answer is the picture."""
    scenario = load_scenario(HERE / "scenario.yaml")
    series: dict[str, list[float]] = {mood: [] for mood in MOODS}
    async with open_store(home) as store:
        async with begin_run(store, scenario) as orchestrator:
            report = await orchestrator.finish()
        print(f"turn {report.turn}: {report.ended}")
        async for played in replay(store, orchestrator.run_id, first=1):
            moods = Counter(state["mood"] for state in played.states.values())
            for mood in MOODS:
                series[mood].append(moods[mood])
            back = len(played.resumed)
            if played.turn % 10 == 0:
                told = ", ".join(f"{moods[mood]} {mood}" for mood in MOODS)
                print(f"turn {played.turn}: {told}; {len(played.paused)} rest, {back} came back in this turn")
    print(f"{series['ignorant'][-1]:g} of {len(played.states)} never heard of it")
    return line_chart("A rumour in a small world", series, x_label="turn", y_label="people")


def main() -> None:
    picture = Path(sys.argv[1] if len(sys.argv) > 1 else "rumour.svg")
    with tempfile.TemporaryDirectory() as home:
        picture.write_text(asyncio.run(play(Path(home))), encoding="utf-8")
    print(f"drawn in {picture}")


if __name__ == "__main__":
    main()
