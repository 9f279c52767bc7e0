"""Mesa with agents that each get one coin a turn, in two phases: all decide, then all take. Runs without Ostler.

Prints one JSON object: by way and number of agents, the turns per processor second of each batch.
"""

from __future__ import annotations

import json
import sys
import time

import mesa  # type: ignore[import-not-found]  # only the benchmark installs it


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


class Town(mesa.Model):  # type: ignore[misc]  # untyped here
    def __init__(self, kind: type[Holder], count: int) -> None:
        super().__init__(seed=1)
        kind.create_agents(self, count)

    def step(self) -> None:
        self.agents.do("step")
        self.agents.do("advance")


def rates(kind: type[Holder], count: int, turns: int, batches: int) -> list[float]:
    town, measured = Town(kind, count), []
    town.step()
    for _ in range(batches):
        began = time.process_time()
        for _ in range(turns):
            town.step()
        measured.append(turns / (time.process_time() - began))
    assert all(holder.wealth == 2 + turns * batches for holder in town.agents)
    return measured


def main(batches: int, sizes: list[tuple[int, int]]) -> None:
    ways = {"plain": Holder, "reading": Reader}
    measured: dict[str, list[float]] = {}
    for count, turns in sizes:
        measured |= {f"{way} {count}": rates(kind, count, turns, batches) for way, kind in ways.items()}
    print(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), [(int(count), int(turns)) for count, turns in (size.split(":") for size in sys.argv[2:])])
