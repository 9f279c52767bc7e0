"""A home with three agents, and the console script as a real process over it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from ostler import (
    AgentInstance,
    AgentSpawnOptions,
    AgentState,
    MoveInstance,
    ReserveInstance,
    SpawnRequest,
    open_store,
)

PROGRAM = Path(sys.executable).parent / "ostler"
STATES = [AgentState.READY, AgentState.TERMINATING, AgentState.TERMINATED]


def ostler(*arguments: str | Path, home: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    if home is not None:
        base["OSTLER_HOME"] = str(home)
    command = [PROGRAM, *arguments]
    return subprocess.run(
        command, env=base | environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


async def populate(home: Path) -> list[AgentInstance]:
    records = []
    async with open_store(home) as store:
        for name, tag in (("ada", "red"), ("bo", "blue"), ("cy", "red")):
            options = AgentSpawnOptions(name=name, tags=(tag,))
            request = SpawnRequest(agent_definition_id=UUID(int=7), options=options)
            records.append(await store.commit(ReserveInstance(request=request)))
        for state in STATES:
            # A reason is foreign text: this one would clear a terminal.
            await store.commit(MoveInstance(instance_id=records[2].instance_id, to=state, reason="\x1b[2J\u202e"))
    return records


def tamper(home: Path, sql: str) -> None:
    database = sqlite3.connect(home / "ostler.db")
    with database:
        database.execute(sql)
    database.close()
