"""A program that plays a run and is killed at a fault point of its store: `sim_victim.py HOME POINT [RUN]`.

Where RUN is `managed`, it begins one whose brains are processes of their own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from simulation_scenes import economy, steady

from ostler.failpoints import FaultPlan, Seams
from ostler.lifecycle.open import open_manager
from ostler.simulation import begin_run, resume_run
from ostler.store.store import Store

TURNS = 8


def tell(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main(home: str, point: str, run_id: str | None) -> None:
    fault = FaultPlan.parse(point) if point else FaultPlan()
    if run_id == "managed":
        async with open_manager(home) as manager, begin_run(manager.store, steady(), manager=manager) as run:
            tell(run.run_id)
            await run.finish(on_turn=lambda report: tell(report.turn))
        return
    async with Store(home, Seams(fault=fault)) as store:
        opening = begin_run(store, economy()) if run_id is None else resume_run(store, run_id, economy())
        async with opening as run:
            tell(run.run_id)
            await run.finish(TURNS, on_turn=lambda report: tell(report.turn))
            tell(run.record.digest)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
