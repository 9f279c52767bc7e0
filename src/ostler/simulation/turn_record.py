"""`TurnWriter`: a turn as it is written down, and the state replaced by what would be read back.

The core of a turn holds what two equal histories agree in: who decided what, who resumed or failed, what was done, and
what changed. Its digest covers the digest before, so that two runs with one digest had one history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import UUID

from ostler.errors import SimulationError
from ostler.model.simulation import SimulationTurn, SimulationWhole
from ostler.simulation.ask import Failed
from ostler.simulation.schema import MAX_VALUE_BYTES, UnkeepableError, read_back, write_decision, write_json
from ostler.simulation.state import Member, SimulationState
from ostler.simulation.turn import TurnReport
from ostler.simulation.view import Decisions


def core_digest(before: str, core: str | bytes) -> str:
    return sha256(before.encode() + (core if isinstance(core, bytes) else core.encode())).hexdigest()


def whole_seal(turn: int, digest: str, body: str | bytes) -> str:
    return sha256(f"{turn} {digest} ".encode() + (body if isinstance(body, bytes) else body.encode())).hexdigest()


@dataclass(slots=True)
class _Entry:
    """How one agent was written last."""

    #: Number, name, kind and params, which never change.
    head: bytes
    text: bytes = b""
    #: What its brain saved last, as JSON; empty where it has no `save`.
    memory: bytes = b""


class TurnWriter:
    """Remembers how each agent was written last, so that only what changed is written again."""

    def __init__(self, state: SimulationState, engine: Any, digest: str = "") -> None:
        self._state = state
        self._engine = engine
        #: Of the history so far.
        self.digest = digest
        self._entries: dict[int, _Entry] = {}
        self._global: bytes = b""
        self._engine_memory: bytes = b""
        self._decided: tuple[Sequence[Member], bytes] = ((), b"[]")
        self._names: tuple[Sequence[Member], bytes] = ((), b"[]")

    # --- writing ---------------------------------------------------------------------------------

    def note(self, decisions: Decisions) -> dict[int, str]:
        """Write the decisions down before the engine can change them. By place, why one cannot be kept."""
        try:
            text = b",".join(read_back(decisions.values_in_order)[0])
            if len(text) <= MAX_VALUE_BYTES:
                self._decided = (decisions.members, b"[%b]" % text)
                return {}
        except UnkeepableError:
            pass
        kept: list[Member] = []
        written: list[bytes] = []
        unkept: dict[int, str] = {}
        for place, (member, value) in enumerate(decisions.pairs()):
            try:
                written.append(write_decision(value))
                kept.append(member)
            except UnkeepableError as error:
                unkept[place] = f"its decision cannot be kept: {error}"
        self._decided = (kept, b"[%b]" % b",".join(written))
        return unkept

    def begin(self, run_id: UUID) -> SimulationWhole:
        """The state before the first turn of a run. The digest of a new history covers it."""
        self.learn()
        body = self._whole()
        self.digest = self.digest or sha256(body).hexdigest()
        return self._sealed(run_id, body)

    def learn(self) -> None:
        """The state is written down already as it is: look for changes from here on."""
        try:
            self._changes()
        except UnkeepableError as error:
            raise SimulationError(f"the state of the run does not read back as it was written: {error}") from None

    def write(self, report: TurnReport, run_id: UUID, *, whole: bool) -> tuple[SimulationTurn, SimulationWhole | None]:
        """The row of a turn, and that of the whole state where `whole` asks for it."""
        members, values = self._decided
        if self._names[0] is not members:
            self._names = (members, write_json([member.name for member in members]))
        failures = {
            name: {"timed_out": failure.timed_out, "error_type": failure.error_type, "became": failure.became}
            for name, failure in report.failures.items()
        }
        try:
            changes = self._changes()
        except UnkeepableError as error:
            # Agents only decide; what became of a state is the doing of the engine.
            raise SimulationError(f"the engine failed in turn {report.turn}: it left {error}") from None
        core = b'{"turn":%d,"decided":[%b,%b],"resumed":%b,"failures":%b,"operations":%b,"changes":%b}' % (
            report.turn,
            self._names[1],
            values,
            write_json(list(report.resumed)),
            write_json(failures),
            write_json([operation.as_json() for operation in report.operations]),
            changes,
        )
        self.digest = core_digest(self.digest, core)
        notes = {name: failure.message for name, failure in report.failures.items()}
        turn = SimulationTurn(
            run_id=run_id,
            turn=report.turn,
            core=core.decode(),
            notes=write_json(notes).decode() if notes else None,
            digest=self.digest,
        )
        return turn, self._sealed(run_id, self._whole()) if whole else None

    def memory_of(self, member: Member) -> bytes:
        """What its brain saved last, as JSON; empty where it has no `save`."""
        entry = self._entries.get(member.number)
        return b"" if entry is None else entry.memory

    # --- the state -------------------------------------------------------------------------------

    def _sealed(self, run_id: UUID, body: bytes) -> SimulationWhole:
        turn, digest = self._state.turn, self.digest
        seal = whole_seal(turn, digest, body)
        return SimulationWhole(run_id=run_id, turn=turn, digest=digest, body=body.decode(), seal=seal)

    def _whole(self) -> bytes:
        agents = b",".join(self._entries[member.number].text for member in self._state.members.values())
        engine = b',"engine":%b' % self._engine_memory if self._engine_memory else b""
        last = self._state.last_number
        return b'{"last_number":%d,"agents":[%b],"global_state":%b%b}' % (last, agents, self._global, engine)

    def _changes(self) -> bytes:
        """What is not as it was written last. The live state becomes what would be read back.

        All of it, changed or not: shared lists, tuples and special dicts must not live longer here than in a run
        that was resumed.
        """
        state = self._state
        members = list(state.members.values())
        texts, again = self._states(members)
        for member, read in zip(members, again, strict=True):
            member.state = read
        paused, counters, turn = state.paused_agents, state.auto_resume, state.turn
        changed: list[bytes] = []
        for member, text in zip(members, texts, strict=True):
            entry = self._entries.get(member.number) or self._new_entry(member)
            name = member.name
            # 0: paused until it is resumed; else the turn at whose start it resumes, so that it does not change.
            until = b"null" if name not in paused else b"%d" % (turn + counters[name] if name in counters else 0)
            entry.memory = _saved(member.agent, name)
            memory = b',"memory":%b' % entry.memory if entry.memory else b""
            written = b'%b,"until":%b%b,"state":%b}' % (entry.head, until, memory, text)
            if written != entry.text:
                entry.text = written
                changed.append(written)
        parts = [b'"last_number":%d,"agents":[%b]' % (state.last_number, b",".join(changed))]
        if len(self._entries) > len(members):
            present = {member.number for member in members}
            gone = [number for number in self._entries if number not in present]
            for number in gone:
                del self._entries[number]
            parts.append(b'"gone":%b' % write_json(gone))
        parts += self._shared_changes()
        return b"{%b}" % b",".join(parts)

    def _shared_changes(self) -> list[bytes]:
        parts = []
        try:
            (text,), (self._state.global_state,) = read_back([self._state.global_state])
        except UnkeepableError as error:
            raise UnkeepableError(f"a global state that cannot be kept: {error}") from None
        if text != self._global:
            self._global = text
            parts.append(b'"global_state":%b' % text)
        memory = _saved(self._engine, "the engine")
        if memory != self._engine_memory:
            self._engine_memory = memory
            parts.append(b'"engine":%b' % memory)
        return parts

    def _states(self, members: Sequence[Member]) -> tuple[list[bytes], list[Any]]:
        form = self._state.form
        try:
            return form.write([member.state for member in members])
        except UnkeepableError:
            for member in members:  # find out whose it is
                try:
                    form.write([member.state])
                except UnkeepableError as error:
                    raise UnkeepableError(f"a state of {member.name} that cannot be kept: {error}") from None
            raise

    def _new_entry(self, member: Member) -> _Entry:
        if member.kind is None:
            raise UnkeepableError(f"the agent {member.name}, whose brain cannot be made again; add it by `add_agent`")
        head = {"number": member.number, "name": member.name, "kind": member.kind, "params": dict(member.params)}
        entry = self._entries[member.number] = _Entry(write_json(head)[:-1])
        return entry


def _saved(owner: Any, who: str) -> bytes:
    """What it saves, as JSON; empty where it has no `save`, which is not the same as to save nothing."""
    save = getattr(owner, "save", None)
    if save is None or not callable(save):
        return b""
    try:
        return read_back([save()])[0][0]
    except UnkeepableError as error:
        raise SimulationError(f"save() of {who} must return JSON values: {error}") from None
    except BaseException as error:
        raise SimulationError(f"save() of {who} failed: {Failed.of(error).message}") from error


def restore(owner: Any, saved: Mapping[str, Any], key: str, who: str) -> None:
    """Give back what `save` had returned, also None; not to an owner that had no `save`."""
    if key not in saved:
        return
    give_back = getattr(owner, "restore", None)
    if not callable(give_back):
        if saved[key] is None:
            return
        raise SimulationError(f"{who} has saved something, and has no `restore` to take it back; add that method")
    try:
        give_back(saved[key])
    except BaseException as error:
        raise SimulationError(f"restore() of {who} failed: {Failed.of(error).message}") from error
