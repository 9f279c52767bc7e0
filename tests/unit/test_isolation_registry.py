from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from ostler.errors import InvalidOperationError, MissingExtraError
from ostler.isolation import BUILT_IN, Cell, Isolation, IsolationLevels, LevelSource, Listener, StartPlan, registry
from ostler.isolation.base import Capabilities
from ostler.isolation.none import NoIsolation
from ostler.isolation.thread import ThreadIsolation
from ostler.model.states import IsolationLevel
from ostler.testing.clock import ManualClock

NONE, THREAD, PROCESS, CONTAINER = IsolationLevel


class Box(Isolation):
    level = CONTAINER
    closed = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def start(self, plan: StartPlan, listener: Listener) -> Cell:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed += 1


class BrokenBox(Box):
    async def close(self) -> None:
        await super().close()
        raise OSError("the lid is stuck")


@pytest.fixture
def levels() -> IsolationLevels:
    return IsolationLevels(ManualClock())


def brought(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """As if installed packages brought these levels."""
    entries = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in values.items())
    monkeypatch.setattr(registry, "entry_points", lambda group: entries.select(group=group))


def test_each_level_is_made_once(levels: IsolationLevels) -> None:
    assert isinstance(levels.get(NONE), NoIsolation)
    assert isinstance(levels.get(THREAD), ThreadIsolation)
    assert levels.get(THREAD) is levels.get(THREAD)


def test_what_is_not_built_is_refused_with_what_there_is(
    levels: IsolationLevels, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought(monkeypatch)
    for level in set(IsolationLevel) - set(BUILT_IN):
        with pytest.raises(InvalidOperationError, match=f"level {level} is not part of this version.*use none or"):
            levels.get(level)
    assert levels.known() == tuple(level for level in IsolationLevel if level in BUILT_IN)


def test_a_missing_part_is_named() -> None:
    sources = {CONTAINER: LevelSource(path="no_such_module_here:Box", extra="container")}
    levels = IsolationLevels(ManualClock(), sources)
    with pytest.raises(MissingExtraError, match=r"level container.*ostler\[container\]") as caught:
        levels.get(CONTAINER)
    assert caught.value.extra == "container"
    assert levels.known()[-1] is CONTAINER, "it can be asked for, and then says what it needs"


def test_a_mistake_of_our_own_is_not_taken_for_a_missing_part() -> None:
    sources = {CONTAINER: LevelSource(path="ostler.isolation.no_such_room:Box", extra="container")}
    with pytest.raises(ModuleNotFoundError):
        IsolationLevels(ManualClock(), sources).get(CONTAINER)


def test_an_installed_package_brings_a_level(levels: IsolationLevels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "box_of_a_package", sys.modules[__name__])
    brought(monkeypatch, container="box_of_a_package:Box", thread="box_of_a_package:Box", attic="nowhere:Nothing")
    assert isinstance(levels.get(CONTAINER), Box)
    assert isinstance(levels.get(THREAD), ThreadIsolation), "what comes with Ostler is not taken over"
    assert set(levels.known()) == {*BUILT_IN, CONTAINER}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("no_such_module_here:Box", "does not load"),
        ("json:loads", "is no Isolation"),
        ("json:nothing", "does not load"),
    ],
)
def test_a_package_that_brings_nonsense_is_named(
    levels: IsolationLevels, monkeypatch: pytest.MonkeyPatch, value: str, complaint: str
) -> None:
    brought(monkeypatch, container=value)
    with pytest.raises(InvalidOperationError, match=complaint):
        levels.get(CONTAINER)


@pytest.mark.anyio
async def test_all_are_closed_also_those_that_were_replaced(
    levels: IsolationLevels, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    first, second, third = BrokenBox(clock), Box(clock), Box(clock)
    levels.use(CONTAINER, first)
    levels.use(CONTAINER, second)
    levels.use(CONTAINER, second)
    levels.use(THREAD, third)
    assert levels.get(CONTAINER) is second
    assert levels.get(THREAD) is third
    await levels.close()
    await levels.close()
    assert [box.closed for box in (first, second, third)] == [1, 1, 1]
    assert "failed to close" in caplog.text


def test_a_level_is_loaded_when_it_is_first_used() -> None:
    code = (
        "import sys, ostler.isolation as i; from ostler.clock import SystemClock\n"
        "from ostler.model.states import IsolationLevel\n"
        "levels = i.IsolationLevels(SystemClock()); levels.get(IsolationLevel.NONE)\n"
        "assert 'ostler.isolation.none' in sys.modules and 'ostler.isolation.thread' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
