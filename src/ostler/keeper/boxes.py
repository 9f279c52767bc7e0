"""What holds the processes of one agent together: their limits, their freezing, and the certainty that all are gone.

A *box* belongs to one start of one instance. `Boxes` is one way to make them; which one this machine allows is found
out by doing it once. Each method here is documented here and nowhere else.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

#: How well a limit is held, as `ostler.model.Enforcement` spells it.
ENFORCED, APPROXIMATED, ADVISORY = "enforced", "approximated", "advisory"
_FREEZE_ALL_SECONDS = 3.0


class BoxLimits(NamedTuple):
    """What one agent may use. None is no limit."""

    memory_bytes: int | None = None
    #: Of one core: 100 is one whole core.
    cpu_percent: int | None = None
    #: Processes and threads together.
    pids: int | None = None
    #: Its share when all cores are busy; 100 is an ordinary one, 1 to 10,000.
    weight: int = 100


class BoxUsage(NamedTuple):
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    #: Threads where the machine counts them, else processes.
    threads: int = 0


class Box(ABC):
    name: str

    @property
    @abstractmethod
    def enforcement(self) -> Mapping[str, str]:
        """For "memory", "cpu" and "pids": how well this box holds it."""

    @abstractmethod
    def entrances(self, leaf: str | None = None) -> Sequence[str]:
        """Files into which a newborn process writes "0" to be inside. `leaf` is a room of its own within the box."""

    def birthplace(self, leaf: str | None = None) -> str | None:
        """A directory for clone3(CLONE_INTO_CGROUP), where there is one: who is born there needs no entrance.

        Worth it: to enter by `cgroup.procs` costs about ten milliseconds on a machine that was quiet.
        """
        del leaf
        return None

    @abstractmethod
    def took_in(self, pid: int, leaf: str | None = None) -> None:
        """A process that was started for this box; the ways without cgroups find the others from here."""

    @abstractmethod
    def move_in(self, pids: Iterable[int], leaf: str | None = None) -> None:
        """Fetch in processes that began elsewhere, each with all its threads; who is gone by now is passed over."""

    @abstractmethod
    def pids(self, leaf: str | None = None) -> set[int]:
        """All that live in it, zombies not counted."""

    @abstractmethod
    def kill(self, leaf: str | None = None) -> None:
        """One blow to everything in it, also while frozen. Call it again until `pids` is empty."""

    @abstractmethod
    def freeze(self) -> None:
        """All of it stands still when this returns; raises `OSError` when that cannot be had within a second."""

    @abstractmethod
    def thaw(self) -> None: ...

    def held(self) -> list[tuple[int, int]]:
        """Pid and start time of those that stand still because of us, where no kernel keeps that list."""
        return []

    def resume(self, held: Iterable[Sequence[int]] | None, *, frozen: bool) -> None:
        """In a box that was found, with its processes in it again: what `held` said before, if somebody asked."""
        del held, frozen

    @abstractmethod
    def oom_kills(self) -> int | None:
        """How often the kernel, or we in its place, killed in it for memory; None where nobody counts."""

    @abstractmethod
    def usage(self) -> BoxUsage: ...

    def police(self) -> str | None:
        """Called every tenth of a second where `Boxes.polices`: hold by hand what the machine does not hold.

        Answers why the agent must die now, or None.
        """
        return None

    @abstractmethod
    def remove(self, leaf: str | None = None) -> None:
        """Take it away once it is empty; never raises."""


class Boxes(ABC):
    #: Whether `Box.police` has to be called.
    polices: bool = False
    #: What the user is told: "cgroup v2", "cgroup v1", "cgroup v1 with v2 freezer and kill", "signals".
    title: str

    @abstractmethod
    def make(self, name: str, limits: BoxLimits) -> Box:
        """A new, empty box. Raises `OSError` with a sentence when that fails; then nothing is left."""

    @abstractmethod
    def find(self, name: str, limits: BoxLimits) -> Box:
        """One that this keeper made before it was exchanged for a newer one."""

    def freeze_all(self, boxes: Iterable[Box]) -> list[str]:
        """As `Box.freeze` for each, within bounds for all of them; a sentence for each that moves on."""
        failed: list[str] = []
        until = time.monotonic() + _FREEZE_ALL_SECONDS
        for box in boxes:
            try:
                if time.monotonic() > until:
                    raise TimeoutError(f"there was no time left for box {box.name}")
                box.freeze()
            except OSError as error:
                failed.append(str(error))
        return failed

    @contextlib.contextmanager
    def one_look(self) -> Iterator[None]:
        """While it lasts, one look at all processes may serve many boxes, where they are found by looking."""
        yield

    @abstractmethod
    def enforcement(self) -> Mapping[str, str]:
        """What a box of this kind would hold, by the probe."""

    @abstractmethod
    def sweep(self) -> list[int]:
        """Kill and remove what an earlier keeper of this home left, proven by cgroup or marker; who was killed."""


#: How well a limit is held where the kernel has no controller for it.
_BY_HAND: Mapping[str, str] = {"memory": APPROXIMATED, "cpu": ADVISORY, "pids": APPROXIMATED}


def held_by(controllers: Iterable[str]) -> dict[str, str]:
    """What boxes with these controllers of the kernel hold."""
    present = set(controllers)
    return {one: ENFORCED if one in present else lacking for one, lacking in _BY_HAND.items()}


@contextlib.contextmanager
def making(name: str) -> Iterator[None]:
    """What the kernel refuses becomes a sentence that says for whom."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"no control group for box {name}: {error}") from error
