"""People who tell a rumour to those they know, until they are tired of it and pause themselves for a while."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from ostler.simulation.engine import Decisions
from ostler.simulation.state import SimulationState
from ostler.simulation.view import AgentView, World

Mood = Literal["ignorant", "spreading", "tired"]


class Person(BaseModel):
    mood: Mood = "ignorant"
    #: How often it was tired of the rumour.
    rests: int = 0


class Citizen:
    """Tells one acquaintance in a turn. Nobody asks those who rest: they are paused."""

    def decide(self, view: AgentView) -> dict[str, Any]:
        known = view.global_state.get("ties", {}).get(view.name, ())
        if view.state.mood == "ignorant" or not known:
            return {}
        if view.state.mood == "tired":
            return {"mood": "spreading"}  # it was paused and is asked again, so it has rested
        friend = view.random.choice(known)
        knows = view.state_of(friend).mood != "ignorant"
        if not knows or view.random.random() >= view.parameters["boredom"]:
            return {"tells": friend}
        last = view.state.rests + 1 >= view.parameters["tries"]
        view.pause_agent(auto_resume_turns=None if last else view.parameters["rest"])
        return {"mood": "tired"}


class Town:
    """Knows who knows whom, and carries what is told from one to the other."""

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> None:
        if "ties" not in state.global_state:
            state.global_state["ties"] = _small_world(world)
        for member, said in decisions.pairs():
            if "mood" in said:
                member.state.mood = said["mood"]
                member.state.rests += said["mood"] == "tired"
            if "tells" in said:
                listener = state.members[said["tells"]].state
                listener.mood = "spreading" if listener.mood == "ignorant" else listener.mood


def _small_world(world: World) -> dict[str, list[str]]:
    """Everybody in a ring, tied to the nearest; then some ties are laid elsewhere. The seed decides which."""
    names, chance = world.names, world.chance("ties")
    ties: dict[str, set[str]] = {name: set() for name in names}
    for place, name in enumerate(names):
        for step in range(1, world.parameters["neighbours"] // 2 + 1):
            near = names[(place + step) % len(names)]
            far = chance.choice(names)
            other = far if chance.random() < world.parameters["far"] and far != name else near
            ties[name].add(other)
            ties[other].add(name)
    # Sorted, for the order of a set is another in every process.
    return {name: sorted(others) for name, others in ties.items()}
