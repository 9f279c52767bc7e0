"""Turns as they are written down: what happened, what it changed, and now and then the whole state.

What two equal histories must agree in is the core of a turn, and its digest carries the digest of the turn before.
What may differ (the words of an error, how often the whole is written) stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any

import pydantic

from ostler.errors import SimulationError, ValidationError
from ostler.model import Fault, shown
from ostler.simulation.answers import placed_text
from ostler.simulation.bodies import digest_of, sealed
from ostler.simulation.engine import Engine
from ostler.simulation.foreign import is_call_off
from ostler.simulation.members import Member
from ostler.simulation.reports import TurnReport
from ostler.simulation.schema import compact_json, json_values, written_json
from ostler.simulation.state import SimulationState

#: More than any decision should be.
MAX_DECISION_BYTES = 1024 * 1024

_UNKEPT = "its decision cannot be kept as JSON: {error}; decide with numbers, text, lists, dicts or Pydantic models"
_TOO_LARGE = f"it is larger than {MAX_DECISION_BYTES >> 20} MiB"


class _UnkeptError(ValidationError):
    """A state that cannot be written down, or would not be read again as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The text of one turn, and the digest of the history up to it."""

    turn: int
    body: str
    digest: str
    whole: bool
    #: The digest of the turn before; None where a history begins.
    follows: str | None = None


class Scribe:
    """Remembers how each agent was written last, so that only what changed is written again."""

    def __init__(self, state: SimulationState, engine: Engine, seed: int, digest: str = "") -> None:
        self._state = state
        self._engine = engine
        self._seed = seed
        #: Of the history up to now; empty before a new run begins.
        self.digest = digest
        self._heads: dict[int, str] = {}
        self._agents: dict[int, str] = {}
        self._shared = ""
        self._memory = ""
        #: Decisions as text, by number: as they were before the engine could change them.
        self._decided: dict[int, str] = {}

    def unkept(self, members: Sequence[Member], values: Sequence[Any]) -> list[tuple[int, str]]:
        """Which decisions cannot be written down, and why. The others are, here and now."""
        texts, again = _together(values) or (None, None)
        if texts is not None and again == values and max(map(len, texts), default=0) <= MAX_DECISION_BYTES:
            self._decided.update(zip((member.number for member in members), texts, strict=True))
            return []
        wrong: list[tuple[int, str]] = []
        for place, member in enumerate(members):
            text, why = _decision(values[place], None if texts is None else texts[place])
            if why is None:
                self._decided[member.number] = text
            else:
                wrong.append((place, _UNKEPT.format(error=why)))
        return wrong

    def begin(self) -> Written:
        """The state before the first turn, or where a fork begins; a new history begins with all that is in it."""
        self._changes()
        body = f'{{"turn":{self._state.turn},"seed":{self._seed},"whole":{self._whole()}}}'
        self.digest = self.digest or sha256(body.encode()).hexdigest()
        return Written(turn=self._state.turn, body=sealed(body, self.digest), digest=self.digest, whole=True)

    def learn(self) -> None:
        """The state is already written down as it is: begin to look for changes from here."""
        self._changes()

    def write(self, report: TurnReport, *, whole: bool) -> Written:
        failures = {
            name: {"timed_out": one.timed_out, "error_type": one.error_type, "became": one.became}
            for name, one in report.failures.items()
        }
        happened = "".join((
            f'{{"turn":{report.turn},"seed":{self._seed},"resumed":{to_json(report.resumed)}',
            f',"decisions":{self._decisions(report)}',
            f',"failures":{to_json(failures)}',
            f',"operations":{to_json([one.as_json() for one in report.operations])}',
        ))  # fmt: skip
        try:
            changes = self._changes()
        except _UnkeptError as error:
            # Agents only decide; what has become of a state in a turn is the engine's doing.
            raise SimulationError(f"the engine failed in turn {report.turn}: {error}") from error
        before, self.digest = self.digest, digest_of(self.digest, happened, changes)
        notes = to_json({name: one.message for name, one in report.failures.items()})
        # The whole has the changes in it; a large state must not be told twice.
        tail = f'"whole":{self._whole()}' if whole else f'"changes":{changes}'
        body = f'{happened},"notes":{notes},{tail}}}'
        if whole or report.failures:
            body = sealed(body, self.digest)
        return Written(turn=report.turn, body=body, digest=self.digest, whole=whole, follows=before)

    def _decisions(self, report: TurnReport) -> str:
        decided, self._decided = self._decided, {}
        texts = (
            f"{encode_basestring_ascii(member.name)}:{decided.get(member.number) or to_json(value)}"
            for member, value in report.decisions.pairs()
        )
        return f"{{{','.join(texts)}}}"

    def _whole(self) -> str:
        agents = ",".join(self._agents[member.number] for member in self._state.members.values())
        engine = f',"engine":{self._memory}' if self._memory else ""
        return f'{{{self._counts()},"agents":[{agents}],"gone":[],"global_state":{self._shared}{engine}}}'

    def _counts(self) -> str:
        return f'"tick":{self._state.countdown.tick},"last_number":{self._state.last_number}'

    def _changes(self) -> str:
        """What is not as it was written last; from now on it counts as written.

        Every state becomes the one that would be read again, also one that looks as before: what two of them share,
        and dicts and texts of a special kind, must not last longer here than in a run that was broken off.
        """
        parts = [self._counts()]
        agents: list[str] = []
        members = self._state.members.values()
        texts, states = self._states(members)
        _put_back(members, states)
        for member, own in zip(members, texts, strict=True):
            text = self._agent(member, own)
            if self._agents.get(member.number) != text:
                self._agents[member.number] = text
                agents.append(text)
        parts.append(f'"agents":[{",".join(agents)}]')
        if len(self._agents) > len(self._state.members):
            here = {member.number for member in self._state.members.values()}
            gone = [number for number in self._agents if number not in here]
            for number in gone:
                del self._agents[number], self._heads[number]
            parts.append(f'"gone":{to_json(gone)}')
        shared, self._state.global_state = _kept("global_state", partial(written_json, self._state.global_state))
        if shared != self._shared:
            self._shared = shared
            parts.append(f'"global_state":{shared}')
        memory = _memory(self._engine, "the engine")
        if memory != self._memory:
            self._memory = memory
            parts.append(f'"engine":{memory}')
        return f"{{{','.join(parts)}}}"

    def _states(self, members: Collection[Member]) -> tuple[list[str], list[Any]]:
        """As text, and as they will be read again."""
        form = self._state.form
        states = [member.state for member in members]
        texts, found = (_together(states) if form.schema is None else None) or (None, None)
        if texts is not None and found == states and all(type(one) is dict for one in found):
            return texts, found
        each = [_kept(f"states.{one.name}", partial(form.written, one.state)) for one in members]
        return [text for text, _ in each], [again for _, again in each]

    def _agent(self, member: Member, own: str) -> str:
        state, number, name = self._state, member.number, member.name
        head = self._heads.get(number)
        if head is None:
            if member.kind is None:
                bound = "came past the run, so nobody knows how to make its brain again; add it by `add_agent`"
                raise ValidationError([Fault(field=f"agents.{name}", bound=bound)])
            made = {"number": number, "name": name, "kind": member.kind, "params": member.params}
            head = self._heads[number] = to_json(made)[:-1]
        memory = f',"memory":{saved}' if (saved := _memory(member.agent, name)) else ""
        paused = "true" if name in state.paused else "false"
        due = state.countdown.due(name) if state.paused else None
        return f'{head},"paused":{paused},"due":{"null" if due is None else due}{memory},"state":{own}}}'


def _together(values: Sequence[Any]) -> tuple[list[str], list[Any]] | None:
    """Many plain values as JSON and as they will be read again, all at once; None when there are others among them."""
    try:
        text = compact_json(values)
        read, texts, found, at = json.JSONDecoder().raw_decode, [], [], 1
        for _ in values:
            value, end = read(text, at)
            found.append(value)
            texts.append(text[at:end])
            at = end + 1
    except (TypeError, ValueError, RecursionError):
        return None
    return texts, found


def _put_back(members: Collection[Member], states: list[Any]) -> None:
    """Plain dicts that belong to one member stay the same dicts: that is cheap, and an engine may hold on to them."""
    owned = len({id(member.state) for member in members}) == len(members)
    for member, again in zip(members, states, strict=True):
        state = member.state
        if owned and type(state) is dict:
            state.clear()
            state.update(again)
        else:
            member.state = again


def to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """A Pydantic model is a decision too, and so is a state that a brain has looked at."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, pydantic.BaseModel):
        return json_values(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _decision(value: Any, text: str | None) -> tuple[str, str | None]:
    """One of them as text, which may be known already, and why it cannot be kept."""
    if text is None:
        try:
            text = to_json(value)
            compact_json(json.loads(text))  # what is nested too deep can be written, but not read everywhere
        except (TypeError, ValueError, RecursionError) as error:
            return "", str(error)
    if len(text) > MAX_DECISION_BYTES:
        return "", _TOO_LARGE
    odd = _odd_keys(value)
    return text, f"keys must be text, not {shown(odd[0])}" if odd else None


def _odd_keys(value: Any) -> Sequence[Any]:
    """Keys that JSON would make text of. Without recursion, for the depth is chosen by a brain."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict | MappingProxyType):
            odd = [key for key in one if not isinstance(key, str)]
            if odd:
                return odd
            stack.extend(one.values())
        elif isinstance(one, list | tuple):
            stack.extend(one)
    return ()


def _memory(keeper: Any, who: str) -> str:
    """What it saves, as JSON; empty when it has no `save`, which is not the same as to save nothing."""
    save = getattr(keeper, "save", None)
    if not callable(save):
        return ""
    try:
        saved = save()
    except BaseException as error:
        if is_call_off(error):
            raise
        raise SimulationError(f"save() of {who} failed: {placed_text(error)}") from error
    try:
        return to_json(saved)
    except (TypeError, ValueError, RecursionError) as error:
        raise SimulationError(f"save() of {who} must return JSON values: {error}") from error


def _kept(field: str, write: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    try:
        return write()
    except ValidationError as error:
        faults = [Fault(field=field, bound=one.message.removeprefix("state ")) for one in error.faults]
        raise _UnkeptError(faults) from None
