"""Ostler's story so far, told in a terminal with real parts. Run it with `make demo`.

It works in a temporary home of its own and removes it; `python examples/demo.py --keep DIR` leaves the home in
DIR, to be looked at with the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

from crash import examine, kill_in_flight
from ostler import (
    AgentInstance,
    AgentSpawnOptions,
    AgentState,
    HealthCheckConfig,
    InvalidOperationError,
    LeaseHeldError,
    LicenseError,
    MoveInstance,
    PutRecord,
    ReserveInstance,
    ResourceLimits,
    RestartFacts,
    RestartPolicy,
    SpawnRequest,
    StaleWriterError,
    Store,
    Tier,
    ValidationError,
    Workspace,
    decide_restart,
    open_store,
)

COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ
DEFINITION = uuid4()


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if COLOURED else f"\n{text}", flush=True)
    time.sleep(0.4 if COLOURED else 0)


def say(text: str = "") -> None:
    print(f"  {text}", flush=True)


def request(name: str, *tags: str) -> SpawnRequest:
    return SpawnRequest(agent_definition_id=DEFINITION, options=AgentSpawnOptions(name=name, tags=tags))


async def move(store: Store, instance_id: UUID, *states: AgentState) -> AgentInstance:
    for state in states:
        record = await store.commit(MoveInstance(instance_id=instance_id, to=state))
    return record


async def one_record(store: Store) -> None:
    title("1. One durable record per agent, and a numbered log of all that happened to it")
    ada = await store.commit(ReserveInstance(request=request("ada", "writing")))
    bo = await store.commit(ReserveInstance(request=request("bo", "testing")))
    await move(store, ada.instance_id, AgentState.READY, AgentState.PROCESSING, AgentState.WAITING)
    await move(store, bo.instance_id, AgentState.READY, AgentState.TERMINATING, AgentState.TERMINATED)
    for record in [await store.get_instance(ada.instance_id), await store.get_instance(bo.instance_id)]:
        if record is not None:
            say(f"{record.name:<4} {record.state:<11} version {record.version}  tags {', '.join(record.tags)}")
    async for event in store.replay():
        change = f"{getattr(event, 'previous_state', '')} → {getattr(event, 'new_state', '')}"
        who = {ada.instance_id: "ada", bo.instance_id: "bo"}[getattr(event, "instance_id", ada.instance_id)]
        say(f"#{event.sequence:<2} {event.event_type:<20} {who:<4} {change if change != ' → ' else ''}".rstrip())


async def refusals(store: Store) -> None:
    title("2. A plan for two agents; five ask at the same moment")
    small = Workspace(workspace_id=uuid4(), name="small team", tier=Tier.CORE, created_at=datetime.now(UTC))
    await store.commit(PutRecord(record=small))
    answers = await asyncio.gather(
        *(
            store.commit(ReserveInstance(request=request(f"agent-{n}"), workspace_id=small.workspace_id))
            for n in range(1, 6)
        ),
        return_exceptions=True,
    )
    for number, answer in enumerate(answers, 1):
        say(f"agent-{number}: {f'refused: {answer}' if isinstance(answer, LicenseError) else 'reserved'}")
    inside = next(answer for answer in answers if isinstance(answer, AgentInstance))
    say("and a move that the state machine does not know:")
    try:
        await move(store, inside.instance_id, AgentState.PROCESSING)
    except InvalidOperationError as error:
        say(f"refused: {error}")


async def bad_input(store: Store) -> None:
    title("3. Bad input: every fault at once, one sentence each, and nothing written")
    before = await store.head()
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
    for sentence in wrong.validate().errors:
        say(f"- {sentence}")
    try:
        await store.commit(ReserveInstance(request=wrong))
    except ValidationError:
        say(f"the log stood at {before.sequence} and stands at {(await store.head()).sequence}")


async def kill_nine(home: Path) -> None:
    title("4. kill -9 in mid-flight: what was acknowledged is there")
    told = await asyncio.to_thread(kill_in_flight, home)
    async with open_store(home) as store:
        found = await examine(store, told)
        report = await store.verify_audit()
    say(f"{found.acknowledged} moves of {len(told)} agents were acknowledged in about a second, then SIGKILL")
    say(f"acknowledged and missing: {found.missing}; written but not yet told: {found.untold}")
    say(f"illegal moves: {found.illegal}; gaps in the numbers: {found.gaps}; audit faults: {len(report.faults)}")
    if found.missing or found.illegal or found.gaps or report.faults:
        raise SystemExit("the promise of this act does not hold; please report it")


async def two_owners(home: Path) -> None:
    title("5. Two owners: the old one is refused")
    ttl = timedelta(seconds=30)
    async with open_store(home) as first, open_store(home) as second:
        lease = await first.take_lease("daemon-1", ttl=ttl)
        say(f"daemon-1 owns the home, epoch {lease.epoch}")
        try:
            await second.take_lease("daemon-2", ttl=ttl)
        except LeaseHeldError as error:
            say(f"daemon-2 asks: refused: {error}")
        lease = await second.take_lease("daemon-2", ttl=ttl, steal=True)
        say(f"daemon-2 holds the lock of the home, so daemon-1 must be dead: it takes over, epoch {lease.epoch}")
        try:
            await first.commit(ReserveInstance(request=request("ghost")))
        except StaleWriterError as error:
            say(f"daemon-1 was only asleep, and writes: refused: {error}")


async def tampering(home: Path) -> None:
    title("6. The audit is a chain: somebody edits one row behind our back")
    async with open_store(home) as store:
        report = await store.verify_audit()
        say(f"before: {report.entries} entries, {'sound' if report.is_sound else 'broken'}")
    with sqlite3.connect(home / "ostler.db") as database:
        database.execute("UPDATE audit SET actor = 'nobody' WHERE number = 3 AND action = 'move'")
    database.close()
    async with open_store(home) as store:
        report = await store.verify_audit()
    say(f"after:  {report.entries} entries, {'sound' if report.is_sound else 'broken'}: {'; '.join(report.faults)}")


async def deaths() -> None:
    title("7. An agent keeps dying: the policy decides, and says why")
    now, chance = datetime.now(UTC), random.Random(7)  # noqa: S311 - jitter, not a secret
    policy, first = RestartPolicy.default(), now
    for count in range(policy.max_retries + 1):
        facts = RestartFacts(
            restart_count=count,
            lifetime_restarts=count,
            failing_since=first if count else None,
            cause=("exit code 1", "out of memory", "killed by signal 11", "exit code 1")[count],
        )
        decision = decide_restart(policy, facts, now, chance)
        say(f"after {(now - first).total_seconds():4.1f} s: {decision.sentence}")
        now += decision.delay + timedelta(seconds=2)


def what_next(home: Path | None) -> None:
    title("What to try next")
    programs = Path(sys.executable).parent
    programs = programs.relative_to(Path.cwd()) if programs.is_relative_to(Path.cwd()) else programs
    say("make test                          every test, with a real PostgreSQL beside SQLite")
    say("make bench                         how fast, beside the bare database in the same run")
    say("README.md                          the same in code, in five minutes")
    if home is None:
        say(f"{programs}/python examples/demo.py --keep DIR   keep the home of this demo, then look at it:")
    where = home or "DIR"
    say(f"{programs}/ostler ps -a --home {where}")
    say(f"{programs}/ostler events -n 20 --home {where}")
    say(f"{programs}/ostler audit verify --home {where}   exit code 1, for somebody edited a row")


async def story(home: Path) -> None:
    async with open_store(home) as store:
        for act in (one_record, refusals, bad_input):
            await act(store)
    for later in (kill_nine, two_owners, tampering):
        await later(home)
    await deaths()


def main() -> int:
    parser = argparse.ArgumentParser(description="Ostler's story so far, in a terminal.")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="use this new directory, and leave it there")
    keep: Path | None = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} exists already; name a new directory")
    # Being asked to stop is an end like any other: the home goes, the child goes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    home = keep or Path(tempfile.mkdtemp(prefix="ostler-demo-"))
    began = time.monotonic()
    try:
        print("Ostler keeps AI agents alive. Today it remembers and decides; this is what that means.")
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
