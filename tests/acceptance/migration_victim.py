"""Programs that are killed while they open a store: `migration_victim.py ADDRESS`.

Each line that it reads is a plan of a fault; a program that meets it opens the store, and how that ended is answered
with a line: its exit code, or the number of the signal that ended it, below zero. They are forked here, where all is
imported, for there are many of them.
"""

from __future__ import annotations

import asyncio
import os
import sys

import ostler.store.postgres  # noqa: F401 - else each of them would import it anew
from ostler.seams import FaultPlan
from ostler.store import Seams, open_store


async def opened(address: str, plan: FaultPlan) -> None:
    async with open_store(address, Seams(fault=plan)) as store:
        await store.head()


def outcome(address: str, plan: FaultPlan) -> int:
    child = os.fork()
    if not child:
        asyncio.run(opened(address, plan))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{outcome(sys.argv[1], FaultPlan.parse(line.strip()))}\n")
        sys.stdout.flush()
