"""Ostler's story so far, told in a terminal with real parts. Run it with `make demo`.

It works in a temporary home of its own and removes it; `python examples/demo.py --keep DIR` leaves the home in
DIR, to be looked at with the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import ostler
from crash import examine, kill_in_flight
from crew import Writer
from fleet import fleet
from flock import flock
from lives import lives, spawn
from ostler import (
    AgentInstance,
    AgentLifecycleManager,
    AgentSpawnOptions,
    GetInstancesFilter,
    HealthCheckConfig,
    LeaseHeldError,
    LicenseError,
    LifecycleSettings,
    Principal,
    PutRecord,
    ReserveInstance,
    ResourceLimits,
    Role,
    SpawnRequest,
    StaleWriterError,
    Tier,
    ValidationError,
    Workspace,
    open_store,
)
from telling import say, title

SETTINGS = LifecycleSettings(close_grace=timedelta(seconds=1))


async def refusals(manager: AgentLifecycleManager) -> None:
    title("7. A plan for two agents; five are spawned at the same moment")
    small = Workspace(workspace_id=uuid4(), name="small team", tier=Tier.CORE, created_at=datetime.now(UTC))
    await manager.store.commit(PutRecord(record=small))
    eve = Principal(
        principal_id=uuid4(),
        name="eve",
        workspace_id=small.workspace_id,
        roles=(Role.OPERATOR,),
        created_at=datetime.now(UTC),
    )
    theirs = manager.acting_as(eve)
    writer = manager.registry.register(Writer, name="writer")
    spawning = (spawn(theirs, writer, f"agent-{number}") for number in range(1, 6))
    answers = await asyncio.gather(*spawning, return_exceptions=True)
    for number, answer in enumerate(answers, 1):
        told = f"refused: {answer}" if isinstance(answer, LicenseError) else "ready"
        say(f"agent-{number}: {told}")
    found = [answer for answer in answers if isinstance(answer, AgentInstance)]
    if len(found) != 2:
        raise SystemExit("the promise of this act does not hold; please report it")
    await asyncio.gather(*(theirs.terminate(one.instance_id) for one in found))


async def bad_input(manager: AgentLifecycleManager) -> None:
    title("8. Bad input: every fault at once, one sentence each, and nothing started")
    before = await manager.store.head()
    wrong = SpawnRequest(
        agent_definition_id=UUID(int=0),
        options=AgentSpawnOptions(
            name="bell\a",
            tags=("ok", "not ok"),
            resource_limits=ResourceLimits(max_memory_mb=16, max_worker_threads=500),
            health_check=HealthCheckConfig(timeout=timedelta(seconds=9)),
        ),
        context={"Task": 1, "task": 2},
    )
    try:
        await manager.spawn(wrong)
    except ValidationError as error:
        for fault in error.faults:
            say(f"- {fault.message}")
    say(f"the log stood at {before.sequence} and stands at {(await manager.store.head()).sequence}")


async def kill_nine(home: Path) -> None:
    title("12. kill -9 in mid-flight: what was acknowledged is there")
    told = await asyncio.to_thread(kill_in_flight, home)
    async with open_store(home) as store:
        found = await examine(store, told)
        report = await store.verify_audit()
    say(f"{found.acknowledged} moves of {len(told)} agents were acknowledged in about a second, then SIGKILL")
    say(f"acknowledged and missing: {found.missing}; written but not yet told: {found.untold}")
    say(f"illegal moves: {found.illegal}; gaps in the numbers: {found.gaps}; audit faults: {len(report.faults)}")
    if found.missing or found.illegal or found.gaps or report.faults:
        raise SystemExit("the promise of this act does not hold; please report it")
    async with ostler.open(home, settings=SETTINGS) as manager:
        lost = await manager.get_active_instances(GetInstancesFilter(tag="doomed", include_terminated=True))
        say(f"the next manager finds {len(lost)} open starts, and writes down: {lost[0].error_message}")


async def two_owners(home: Path) -> None:
    title("13. One home, one manager; and a writer that slept through its time is refused")
    async with ostler.open(home, settings=SETTINGS):
        try:
            async with ostler.open(home):
                raise SystemExit("two managers of one home; please report it")
        except LeaseHeldError as error:
            say(f"a second manager: refused: {error}")
    ttl = timedelta(seconds=30)
    async with open_store(home) as first, open_store(home) as second:
        await first.take_lease("server-1", ttl=ttl)
        lease = await second.take_lease("server-2", ttl=ttl, steal=True)
        say(f"server-1 seems dead, server-2 takes over with epoch {lease.epoch}")
        try:
            await first.commit(ReserveInstance(request=SpawnRequest(agent_definition_id=uuid4())))
        except StaleWriterError as error:
            say(f"server-1 was only asleep, and writes: refused: {error}")


async def tampering(home: Path) -> None:
    title("14. The audit is a chain: somebody edits one row behind our back")
    async with open_store(home) as store:
        report = await store.verify_audit()
        say(f"before: {report.entries} entries, {'sound' if report.is_sound else 'broken'}")
    with sqlite3.connect(home / "ostler.db") as database:
        database.execute("UPDATE audit SET actor = 'nobody' WHERE number = 3 AND actor = 'owner'")
    database.close()
    async with open_store(home) as store:
        report = await store.verify_audit()
    say(f"after:  {report.entries} entries, {'sound' if report.is_sound else 'broken'}: {'; '.join(report.faults)}")


def what_next(home: Path | None) -> None:
    title("What to try next")
    programs = Path(sys.executable).parent
    programs = programs.relative_to(Path.cwd()) if programs.is_relative_to(Path.cwd()) else programs
    say("README.md                          an agent of your own, in five minutes")
    say("docs/guides/lifecycle.md           all that this story does, in code that you can paste")
    say("make test                          every test, with a real PostgreSQL beside SQLite")
    say("make bench                         how fast, beside a bare task, a bare thread and the bare database")
    if home is None:
        say(f"{programs}/python examples/demo.py --keep DIR   keep the home of this demo, then look at it:")
    where = home or "DIR"
    say(f"{programs}/ostler ps -a --home {where}")
    say(f"{programs}/ostler events -n 20 --home {where}")
    say(f"{programs}/ostler audit verify --home {where}   exit code 1, for somebody edited a row")
    say(f"{programs}/ostler sim show last --home {where}/economy")
    say(f"ls {where}/work/*   what the agents wrote")


async def story(home: Path) -> None:
    async with ostler.open(home, settings=SETTINGS) as manager:
        for act in (lives, refusals, bad_input):
            await act(manager)
    for later in (fleet, kill_nine, two_owners, tampering, flock):
        await later(home)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ostler's story so far, in a terminal.")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="use this new directory, and leave it there")
    keep: Path | None = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} exists already; name a new directory")
    # Being asked to stop is an end like any other: agents end in order, the home goes, the child goes.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # What the log of a real program would hold is told here by the events.
    logging.getLogger("ostler").addHandler(logging.NullHandler())
    home = keep or Path(tempfile.mkdtemp(prefix="ostler-demo-"))
    began = time.monotonic()
    try:
        print("Ostler keeps AI agents alive. This is what that means, with real agents, in threads and in processes.")
        asyncio.run(story(home))
        what_next(keep)
        print(f"\nTold in {time.monotonic() - began:.1f} s; nothing is left running.", flush=True)
    except KeyboardInterrupt:
        print("\nstopped; the home of the demo is removed", file=sys.stderr)
        return 130
    finally:
        if keep is None:
            shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
