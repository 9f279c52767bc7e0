"""Plays the economy and draws it: `python examples/economy/run.py [PICTURE]`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ostler import open_store
from ostler.simulation.history import replay
from ostler.simulation.runs import begin_run
from ostler.simulation.scenariofile import load_scenario

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from charts import line_chart, stacked  # noqa: E402 - it stands one directory up, beside the other examples


def gini(coins: Sequence[int]) -> float:
    """0: everybody has the same; 1: one has all."""
    ordered, total = sorted(coins), sum(coins)
    if not total:
        return 0.0
    weighted = sum(rank * value for rank, value in enumerate(ordered, 1))
    return 2 * weighted / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)


async def play(home: Path) -> str:
    """A run that is kept turn by turn, told in a few lines; the answer is the picture."""
    scenario = load_scenario(HERE / "scenario.toml")
    inequality, population, born, left = [], [], 0, 0
    async with open_store(home) as store:
        async with begin_run(store, scenario) as orchestrator:
            report = await orchestrator.finish()
        print(f"turn {report.turn}: {report.ended}")
        async for played in replay(store, orchestrator.run_id, first=1):
            inequality.append(gini([state["coins"] for state in played.states.values()]))
            population.append(len(played.states))
            done = [one["operation"] for one in played.operations if one.get("done", True)]
            born, left = born + done.count("add_agent"), left + done.count("remove_agent")
            coins = sum(state["coins"] for state in played.states.values()) + played.global_state["treasury"]
    print(f"{population[-1]} traders: {born} were brought up, {left} went bankrupt")
    print(
        f"{coins} coins, as at the beginning; Gini {inequality[0]:.2f} after the first turn, {inequality[-1]:.2f} now"
    )
    return stacked(
        line_chart("How unequal they are", {"Gini": inequality}, x_label="turn", y_label="Gini coefficient"),
        line_chart("How many there are", {"traders": population}, x_label="turn", y_label="traders"),
    )


def main() -> None:
    picture = Path(sys.argv[1] if len(sys.argv) > 1 else "economy.svg")
    with tempfile.TemporaryDirectory() as home:
        picture.write_text(asyncio.run(play(Path(home))), encoding="utf-8")
    print(f"drawn in {picture}")


if __name__ == "__main__":
    main()
