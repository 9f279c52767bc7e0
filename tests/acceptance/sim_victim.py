"""A program that plays a scenario and dies at a named point of its store: `python sim_victim.py HOME FILE [RUN]`.

OSTLER_FAULT says where, as "store.commit.before:3:kill". With RUN it goes on with that one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import UUID

from ostler.simulation import TurnReport, begin_run, load_scenario, resume_run

from ostler.seams import FaultPlan
from ostler.store import Seams, open_store


def acknowledge(report: TurnReport) -> None:
    """In one write, so that a kill cannot tear it."""
    os.write(1, f"{report.turn}\n".encode())


async def main(home: str, file: str, *run: str) -> None:
    scenario = load_scenario(file)
    async with open_store(home, Seams(fault=FaultPlan.parse(os.environ["OSTLER_FAULT"]))) as store:
        opening = resume_run(store, UUID(run[0]), scenario) if run else begin_run(store, scenario)
        async with opening as orchestrator:
            await orchestrator.finish(on_turn=acknowledge)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
