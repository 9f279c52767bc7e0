"""A program that works with workdirs and is killed: at a named point, or whenever its test likes.

`workdirs_victim.py HOME REPOSITORY VERBS POINT`: the verbs one after another on the workdir T1; each says when it is
done. POINT may be empty.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ostler.failpoints import FaultPlan, Seams, no_fault
from ostler.workdirs import Workdirs


async def main(home: str, repository: str, verbs: str, point: str) -> None:
    async with Workdirs(Path(home), Seams(fault=FaultPlan.parse(point) if point else no_fault)) as workdirs:
        workdir = await workdirs.plan("T1", near=Path(repository), base="start")
        place = Path(workdir.path)
        for number, verb in enumerate(verbs.split(",")):
            match verb:
                case "prepare":
                    await workdirs.prepare(workdir)
                case "work":
                    (place / "a.txt").write_text("agent\n")
                    (place / "new.txt").write_text(f"new {number}\n")
                    (place / "b.txt").unlink(missing_ok=True)
                case "accept" | "undo":
                    snapshot = await workdirs.snapshot(workdir, "as it is")
                    accepted = await workdirs.accept(workdir, snapshot, message="m", author="A <a@b>")
                    if verb == "undo":
                        await workdirs.undo(accepted)
                case "retire":
                    await workdirs.retire(workdir, record={"verb": number})
                case "restore":
                    entry = await workdirs.find("T1")
                    assert entry is not None
                    await workdirs.restore(entry)
            print(verb, flush=True)  # noqa: T201 - what its test waits for


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
