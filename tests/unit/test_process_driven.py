"""The log of a run is read as it grows, whatever the keeper does to the file; and each count is told once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostler.agents import Message, MetricReported, Progress, TokensUsed
from ostler.agents.messages import WaitAnswer, WaitAsked
from ostler.drivers import driver_named
from ostler.drivers.base import SessionUsage, Tokens
from ostler.isolation.process.driven import DrivenRun, Journal, LogFollower
from ostler.keeper.output import Log


@dataclass
class Ear:
    """Hears like the manager: what it has committed it does not hear again."""

    committed: int = 0
    heard: list[Message] = field(default_factory=list)

    def say(self, message: Message) -> None:
        if getattr(message, "number", 0) > self.committed or not getattr(message, "number", 0):
            self.heard.append(message)

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        return sum(message.count for message in self.heard if isinstance(message, TokensUsed))

    @property
    def cost(self) -> float | None:
        costs = [message.value for message in self.heard if isinstance(message, MetricReported)]
        return costs[-1] if costs else None


def read(follower: LogFollower, *, last: bool = False) -> list[str]:
    found = []
    while (one := follower.next_line(last=last)) is not None:
        found.append(one[1])
    return found


def message(number: int, cost: float = 0.5) -> str:
    usage = {"input": 100, "output": 10, "cost": {"total": cost}}
    content = [{"type": "text", "text": f"word {number}"}]
    return json.dumps({"type": "message_end", "message": {"role": "assistant", "content": content, "usage": usage}})


def driven(log: Path, journal: Journal, before: SessionUsage | None = None) -> DrivenRun:
    return DrivenRun("r1", log, driver_named("pi").reader(before), journal)


def told(run: DrivenRun) -> None:
    assert not run.catch_up(last=False)
    run.close()


def test_lines_come_when_they_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    follower = LogFollower(log)
    assert read(follower) == []
    with log.open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert read(follower) == ["one"]
        file.write("o é\r\n".encode())
        assert read(follower) == ["two é"]
        file.write(b"\xff\n\nrest")
        assert read(follower) == ["\ufffd", ""]
    assert read(follower, last=True) == ["rest"]
    assert read(follower, last=True) == []
    follower.close()


def test_a_log_that_is_turned_over_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    log = Log(str(path), 4096)
    follower = LogFollower(path)
    found: list[str] = []
    for number in range(300):
        log.write(f"line {number} {'x' * 50}\n".encode())
        found += read(follower)
    assert [line.split()[1] for line in found] == [str(number) for number in range(300)]
    follower.close()
    late = LogFollower(path)
    few = read(late)
    assert few[-1] == found[-1]
    assert few[1:] == found[-len(few) + 1 :], "whoever comes late has what is on the disk"
    log.close()
    late.close()


def test_places_count_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    log = Log(str(path), 4096)
    lines = [f"{number:099}\n" for number in range(100)]
    for line in lines:
        log.write(line.encode())
    log.close()
    follower = LogFollower(path)
    places = []
    while (one := follower.next_line(last=True)) is not None:
        places.append(one[0])
    assert places[-1] == 100 * 100
    assert all(place % 100 == 0 for place in places[1:])
    follower.close()


def test_a_line_without_an_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(b"a\n" + b"x" * 9_000_000 + b"\nb\n")
    follower = LogFollower(path)
    assert read(follower) == ["a", "b"]
    follower.close()


def test_what_was_committed_is_not_told_again(tmp_path: Path) -> None:
    log, file = tmp_path / "1.log", tmp_path / "1.told"
    first, ear = Ear(), Ear()
    journal = Journal(file, first)
    journal.begin("r1", None, None)
    log.write_text("".join(f"{message(number)}\n" for number in range(3)))
    told(driven(log, journal))
    assert (first.tokens, first.cost) == (330, 1.5)
    journal.confirm(2)  # and then the manager is killed
    with log.open("a") as more:
        more.write(f"{message(3)}\n")
    ear.committed = 2
    second = Journal(file, ear)
    told(driven(log, second, second.before("r1")))
    assert (ear.tokens, ear.cost) == (220, 2.0)
    assert [one.message for one in ear.heard if isinstance(one, Progress)] == ["word 2", "word 3"]


def test_a_commit_that_did_not_reach_the_journal_is_known_by_its_number(tmp_path: Path) -> None:
    log, file = tmp_path / "1.log", tmp_path / "1.told"
    journal = Journal(file, Ear())
    journal.begin("r1", None, None)
    log.write_text("".join(f"{message(number)}\n" for number in range(3)))
    told(driven(log, journal))
    ear = Ear(committed=2)  # written by the store, and killed before the journal was
    again = Journal(file, ear)
    told(driven(log, again))
    assert ear.tokens == 110
    assert [one.number for one in ear.heard if isinstance(one, TokensUsed)] == [3]


def test_cost_adds_up_over_runs_and_sessions_are_remembered(tmp_path: Path) -> None:
    file, ear = tmp_path / "1.told", Ear()
    journal = Journal(file, ear)
    for name in ("r1", "r2"):
        log = tmp_path / f"{name}.log"
        log.write_text(f'{{"type":"session","id":"s-1"}}\n{message(1, 0.25)}\n')
        before = journal.begin(name, "s-1", None)
        run = DrivenRun(name, log, driver_named("pi").reader(before), journal)
        run.catch_up(last=True)
        run.end()
        run.close()
    assert ear.cost == 0.5
    known = Journal(file, ear).begin("r3", "s-1", None)
    assert known == SessionUsage(tokens=Tokens(input=200, output=20), cost_usd=0.5)
    told = SessionUsage(tokens=Tokens(input=7))
    assert Journal(file, ear).begin("r4", "s-1", told) == told, "what the caller says counts more"
    assert Journal(file, ear).begin("r5", "unknown", None) is None


def test_a_journal_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "1.told"
    odd: list[Any] = ["", "[]", "{", "null"]
    for text in odd:
        file.write_text(text)
        assert Journal(file, Ear()).place("r1") == 0
    assert Journal(tmp_path / "no" / "1.told", Ear()).begin("r1", None, None) is None
