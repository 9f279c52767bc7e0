"""Turns in a row, in the thread of the brains, for as long as nothing happens that anybody else has to know.

To wake another thread costs more than a turn of a small population. So a thread that has asked everybody and has made
the update begins the next turn itself, unless somebody failed, asked for something, or is about to go on.
"""

from __future__ import annotations

from ostler.simulation.answers import After
from ostler.simulation.manager import LifecycleManager
from ostler.simulation.pauses import PauseTracker
from ostler.simulation.view import World


class Sprint:
    """Begins with the present turn; how many more may follow is said when its agents are known."""

    __slots__ = ("_changes", "_manager", "_world", "more", "turn")

    def __init__(self, world: World, manager: LifecycleManager) -> None:
        self._world = world
        self._manager = manager
        self._changes = -1
        self.more = 0
        #: The turn that is being played.
        self.turn = world.state.turn

    def begin(self, more: int) -> None:
        self._changes = self._world.state.changes
        self.more = more

    @staticmethod
    def suits(manager: LifecycleManager) -> bool:
        """Whoever does more than Ostler's own at the start of a turn does it where it always was."""
        return type(manager) is LifecycleManager and type(manager.pause_tracker) is PauseTracker

    def goes_on(self, made: After | None) -> bool:
        """After the update; true when the next turn has begun, with the same agents to be asked."""
        world, state = self._world, self._world.state
        if made is None or made.value is not None:
            return False  # somebody failed, or the engine has something to say
        if self.more < 1 or world.asked or state.countdown.next_is_due:
            return False
        if state.changes != self._changes or state.turn != self.turn or state.global_state is None:
            return False  # the engine did what it may not
        self.more -= 1
        self.turn += 1
        world.begin_turn(self.turn)
        self._manager.process_auto_resume(state)
        return True
