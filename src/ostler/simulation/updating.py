"""The engine at work: where it runs, what it is held to, and that whatever goes wrong there is told as its failure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from ostler.errors import SimulationError
from ostler.model import shown
from ostler.simulation.answers import After, placed_text
from ostler.simulation.asking import Asking, Failed
from ostler.simulation.engine import Decisions, Engine
from ostler.simulation.foreign import is_call_off, own_task
from ostler.simulation.members import Member
from ostler.simulation.rounds import Decided, Update
from ostler.simulation.sprint import Sprint
from ostler.simulation.view import World


class Updating:
    """One turn of one engine. A plain one works in the thread of the brains, an async one on the loop."""

    def __init__(self, engine: Engine, world: World, asking: Asking) -> None:
        self._engine = engine
        self._world = world
        self._asking = asking
        self._before = world.state.changes
        self._is_async = inspect.iscoroutinefunction(engine.update)

    @property
    def plain(self) -> Update | None:
        """What the thread of the brains may call; None where the engine wants the loop."""
        return None if self._is_async else self._apply

    def _apply(self, decisions: Decisions) -> Any:
        """In whatever thread. From here on nobody is asked, so nobody is heard."""
        self._world.listening = False
        return self._engine.update(self._world.state, decisions, self._world)

    async def finish(self, decided: Decided, sprint: Sprint) -> list[tuple[Member, Failed]]:
        """Whose decisions the engine could not use."""
        turn = sprint.turn
        after = decided.after or await self._made(decided.decisions)
        if after.error is not None:
            # It was raised in the engine's own call, so that it is its own whatever it looks like.
            _fail(turn, after.error)
        outcome = after.value
        if inspect.isawaitable(outcome):
            task = own_task()
            try:
                outcome = await outcome
            except BaseException as error:
                if is_call_off(error, task):
                    raise
                _fail(turn, error)
        if outcome is self._world.state:
            outcome = None  # it was changed in place, and giving it back says no more than that
        self._check(turn, outcome)
        return self._refused(turn, outcome)

    async def _made(self, decisions: Decisions) -> After:
        if not self._is_async:
            # To its end, even when the turn is called off.
            return await self._asking.conclude(lambda: self._apply(decisions))
        try:
            return After(self._apply(decisions))
        except Exception as error:  # noqa: BLE001 - a call that does not fit the method; told like any other failure
            return After(error=error)

    def _check(self, turn: int, outcome: Any) -> None:
        state = self._world.state
        if state.changes != self._before or state.turn != turn:
            raise SimulationError(
                f"the engine let somebody come, go or pause, or turned the count of turns, in turn {turn}; "
                "only agents may ask for the one, and nobody for the other"
            )
        if state.global_state is None:
            raise SimulationError(
                f"the engine left None in the place of global_state in turn {turn}; "
                "let it change what is in it, or put something else there, such as {}"
            )
        if not isinstance(outcome, Mapping | None):
            raise SimulationError(
                f"the engine answered {shown(outcome)} in turn {turn}; let `update` return None, or a mapping of the "
                "names whose decisions it could not use, with the reasons"
            )

    def _refused(self, turn: int, outcome: Mapping[Any, Any] | None) -> list[tuple[Member, Failed]]:
        members = self._world.state.members
        refused: list[tuple[Member, Failed]] = []
        for name, why in (outcome or {}).items():
            member = members.get(name) if isinstance(name, str) else None
            if member is None:
                raise SimulationError(
                    f"the engine refused the decision of {shown(name)} in turn {turn}, but nobody here has that name; "
                    "let it answer with names of `decisions`"
                )
            refused.append((member, Failed(False, "RefusedDecisionError", str(why))))
        return sorted(refused, key=lambda one: one[0].number)


def _fail(turn: int, error: BaseException) -> NoReturn:
    raise SimulationError(f"the engine failed in turn {turn}: {placed_text(error)}") from error
