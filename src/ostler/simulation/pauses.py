"""Pauses, as the state has them. The tracker keeps nothing of its own, so it cannot disagree and cannot forget."""

from __future__ import annotations

from ostler.simulation.state import SimulationState


class PauseTracker:
    """Reads and writes the pauses of whatever state it is given. Override it to count differently."""

    def pause(self, name: str, auto_resume_turns: int | None, state: SimulationState) -> None:
        state.pause(name, auto_resume_turns)

    def resume(self, name: str, state: SimulationState) -> None:
        state.resume(name)

    def is_paused(self, name: str, state: SimulationState) -> bool:
        return name in state.paused

    def turns_left(self, name: str, state: SimulationState) -> int | None:
        """Until it goes on by itself; None when it does not."""
        return state.auto_resume.get(name)

    def count_down(self, state: SimulationState) -> list[str]:
        """One turn less for all; who goes on now, in the order of coming."""
        return state.count_down()
