"""Traders who stake coins against each other, a market that taxes gains, and a treasury that shares them out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ostler.simulation import AgentView, Decisions, Member, SimulationState, World


class Purse(BaseModel):
    """What a trader has. Whole coins, so that they can be counted."""

    coins: int = Field(default=0, ge=0)
    #: Turns in a row in which it had too little to live on.
    hungry: int = 0


class Trader:
    """Picks a partner; leaves when it was hungry for too long, and raises another trader when it is rich."""

    def decide(self, view: AgentView) -> dict[str, Any]:
        purse, told = view.state, view.parameters
        if purse.hungry >= told["patience"]:
            view.remove_agent()
            return {"leaves": True}
        others = [name for name in view.names if name != view.name]
        decision: dict[str, Any] = {"partner": view.random.choice(others) if others else None}
        if purse.coins >= told["rich"]:
            # Where the population is full, the request is refused; what was paid has gone to all.
            view.add_agent("trader", kind="trader", initial_state={"coins": 0})
            decision["pays"] = told["upbringing"]
        return decision


class Market:
    """Moves coins between purses and the treasury; their sum never changes."""

    def update(self, state: SimulationState, decisions: Decisions, world: World) -> None:
        shared = state.global_state
        leaving = {member.name for member, said in decisions.pairs() if said.get("leaves")}
        staying = [member for member in state.members.values() if member.name not in leaving]
        for member, said in decisions.pairs():
            if member.name in leaving:
                shared["treasury"] += _take(member, member.state.coins)
            else:
                shared["treasury"] += _take(member, said.get("pays", 0))
        for member, said in decisions.pairs():
            partner = said.get("partner")
            if partner is not None and not {member.name, partner} & leaving:
                shared["treasury"] += _trade(member, state.members[partner], world)
        self._share_out(shared, staying)
        for member in staying:
            poor = member.state.coins < world.parameters["poverty"]
            member.state.hungry = member.state.hungry + 1 if poor else 0

    @staticmethod
    def _share_out(shared: dict[str, Any], members: list[Member]) -> None:
        if members:
            share = shared["treasury"] // len(members)
            shared["treasury"] -= share * len(members)
            for member in members:
                member.state.coins += share


def _trade(one: Member, other: Member, world: World) -> int:
    """A fair toss for a part of what the poorer has. The answer is the tax."""
    stake = int(min(one.state.coins, other.state.coins) * world.parameters["stake"])
    chance = world.chance("trade", one.number, other.number)
    winner, loser = (one, other) if chance.random() < 0.5 else (other, one)
    tax = int(stake * world.parameters["tax"])
    winner.state.coins += _take(loser, stake) - tax
    return tax


def _take(member: Member, wanted: int) -> int:
    """As much as there is."""
    taken = min(member.state.coins, wanted)
    member.state.coins -= taken
    return int(taken)
