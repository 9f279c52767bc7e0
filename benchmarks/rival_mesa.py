"""Mesa with agents that each get one coin a turn: in two phases, as all decide on the same state, and in one.

Prints one JSON object: by way and number of agents, how many turns per second in each batch.
"""

from __future__ import annotations

import sys
import time

import mesa  # type: ignore[import-not-found]  # only the benchmark installs it

from measured import tell


class Holder(mesa.Agent):  # type: ignore[misc]  # untyped here
    def __init__(self, model: mesa.Model) -> None:
        super().__init__(model)
        self.wealth = 1
        self.amount = 0

    def step(self) -> None:
        self.amount = 1

    def advance(self) -> None:
        self.wealth += self.amount


class Reader(Holder):
    """Looks at what it has before it decides."""

    def step(self) -> None:
        self.amount = 1 if self.wealth > 0 else 0


class Hasty(Holder):
    """Decides and takes in one."""

    def step(self) -> None:
        self.wealth += 1


class Town(mesa.Model):  # type: ignore[misc]  # untyped here
    def __init__(self, count: int, way: str) -> None:
        super().__init__(seed=1)
        kinds = {"reading": Reader, "one": Hasty, "shuffled": Hasty}
        kinds.get(way, Holder).create_agents(self, count)
        self.way = way
        self.collector = mesa.DataCollector(agent_reporters={"wealth": "wealth"}) if way == "collected" else None

    def step(self) -> None:
        if self.way == "shuffled":
            self.agents.shuffle_do("step")
            return
        self.agents.do("step")
        if self.way != "one":
            self.agents.do("advance")
        if self.collector is not None:
            self.collector.collect(self)


def rates(way: str, count: int, turns: int, batches: int) -> list[float]:
    town, found = Town(count, way), []
    town.step()
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(turns):
            town.step()
        found.append(turns / (time.perf_counter() - begin))
    assert all(one.wealth == 2 + turns * batches for one in town.agents)
    return found


def main(batches: int, sizes: list[tuple[int, int]]) -> None:
    ways = ("two", "reading", "one", "shuffled", "collected")
    tell(**{f"{way} {count}": rates(way, count, turns, batches) for count, turns in sizes for way in ways})


if __name__ == "__main__":
    main(int(sys.argv[1]), [(int(count), int(turns)) for count, turns in (one.split(":") for one in sys.argv[2:])])
