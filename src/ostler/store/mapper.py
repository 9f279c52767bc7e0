"""Rows of a table to records and back, in the form that a database wants."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import compress
from typing import Any, cast
from uuid import UUID

from ostler.errors import DamagedRowError
from ostler.model import AgentState, HealthState, Record
from ostler.model.codec import dump_compact
from ostler.store.damage import damaged_row, shown_key
from ostler.store.kinds import Key, Ledger
from ostler.store.shapes import LEDGER_CHAIN, LEDGER_TOTALS, Form, Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
    """How a database spells the few things that differ."""

    name: str
    true: str
    uuid_out: Callable[[UUID], Any]
    uuid_in: Callable[[Any], UUID]
    #: A UUID that is still a number.
    id_out: Callable[[int], Any]
    time_out: Callable[[datetime], Any]
    time_in: Callable[[Any], datetime]
    flag_out: Callable[[bool], Any]

    def encoder(self, form: Form) -> Callable[[Any], Any]:
        """How a field of this form goes into its column; None stays None and is not asked."""
        match form:
            case "text" | "int":
                return _same
            case "uuid":
                return self.uuid_out
            case "time":
                return self.time_out
            case "flag":
                return self.flag_out
            case "json" | ("map", _):
                return lambda value: json.dumps(dict(value), separators=(",", ":"))
            case ("list", _):
                return lambda value: json.dumps([str(item) for item in value], separators=(",", ":"))
            case _ if isinstance(form, type) and issubclass(form, StrEnum):
                return str.__str__
            case _:
                return dump_compact

    def decoder(self, form: Form) -> Callable[[Any], Any]:
        match form:
            case "text" | "int":
                return _same
            case "uuid":
                return self.uuid_in
            case "time":
                return self.time_in
            case "flag":
                return bool
            case "json":
                return json.loads
            case ("map", element):
                return lambda value: {key: element(item) for key, item in json.loads(value).items()}
            case ("list", element):
                return lambda value: tuple(element(item) for item in json.loads(value))
            case type() if issubclass(form, Record):
                return form.from_json
            case _:
                return cast("Callable[[Any], Any]", form)

    def encode(self, form: Form, value: Any) -> Any:
        return None if value is None else self.encoder(form)(value)

    def decode(self, form: Form, value: Any) -> Any:
        return None if value is None else self.decoder(form)(value)


def _same(value: Any) -> Any:
    return value


#: Columns, how to read their fields at once, and which of the values need another form.
_Plan = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]], tuple[tuple[int, Callable[[Any], Any]], ...]]


class Mapper:
    """The rows of one shape in one dialect; everything that can be looked up is looked up once."""

    def __init__(self, dialect: Dialect, shape: Shape) -> None:
        self.shape = shape
        self._names = tuple(column.name for column in shape.columns)
        self._fields = tuple(column.field for column in shape.columns)
        self._encoders = tuple(dialect.encoder(column.form) for column in shape.columns)
        self._decoders = tuple(dialect.decoder(column.form) for column in shape.columns)
        self._derived = tuple(
            (column.name, column.field, dialect.encoder(column.form), work_out) for column, work_out in shape.derived
        )
        self._values: Callable[[Any], tuple[Any, ...]] = (
            _ledger_values if shape.record is Ledger else operator.attrgetter(*self._fields)
        )
        places = [self._names.index(name) for name in shape.keys]
        self._keys = tuple(self._encoders[place] for place in places)
        self._key_decoders = tuple(self._decoders[place] for place in places)
        self._plans: dict[frozenset[str], _Plan] = {}
        #: The columns of `row`, in its order.
        self.columns = self._names + tuple(name for name, _, _, _ in self._derived)

    def row(self, record: Any) -> tuple[Any, ...]:
        """Every column."""
        plain = [
            None if value is None else encode(value)
            for encode, value in zip(self._encoders, self._values(record), strict=True)
        ]
        for _, _, encode, work_out in self._derived:
            value = work_out(record)
            plain.append(None if value is None else encode(value))
        return tuple(plain)

    def changes(self, old: Any, new: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Only the columns whose fields are not what they were, and what they are now."""
        names, values, fields = [], [], set()
        before, after = self._values(old), self._values(new)
        for place in compress(range(len(after)), map(operator.is_not, before, after)):
            value = after[place]
            if value != before[place]:
                names.append(self._names[place])
                values.append(None if value is None else self._encoders[place](value))
                fields.add(self._fields[place])
        for name, field, encode, work_out in self._derived:
            if field in fields and (value := work_out(new)) != work_out(old):
                names.append(name)
                values.append(None if value is None else encode(value))
        return tuple(names), tuple(values)

    def picked(self, record: Any, fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The columns of some fields, without looking whether they differ. Derived columns are left alone."""
        plan = self._plans.get(fields)
        if plan is None:
            plan = self._plans[fields] = self._plan(fields)
        names, read, encoders = plan
        values = list(read(record))
        for place, encode in encoders:
            if values[place] is not None:
                values[place] = encode(values[place])
        return names, tuple(values)

    def _plan(self, fields: frozenset[str]) -> _Plan:
        chosen = [place for place, field in enumerate(self._fields) if field in fields]
        encoders = [(at, self._encoders[place]) for at, place in enumerate(chosen)]
        return (
            tuple(self._names[place] for place in chosen),
            operator.attrgetter(*(self._fields[place] for place in chosen)),
            tuple((at, encode) for at, encode in encoders if encode is not _same),
        )

    def key(self, key: Key) -> tuple[Any, ...]:
        """The values that name one row."""
        if len(key) == 1:
            return (self._keys[0](key[0]),)
        return tuple([encode(value) for encode, value in zip(self._keys, key, strict=True)])

    def key_from(self, row: tuple[Any, ...]) -> Key:
        """The key of a row that holds nothing else."""
        return tuple([decode(value) for decode, value in zip(self._key_decoders, row, strict=True)])

    def records(self, names: list[str], rows: list[tuple[Any, ...]]) -> list[Any]:
        """Plain rows as records; where each column stands is looked up once."""
        places = [names.index(name) for name in self._names]
        columns = list(zip(self._fields, places, self._decoders, strict=True))
        try:
            return [
                self._made(
                    {field: None if row[place] is None else decode(row[place]) for field, place, decode in columns}
                )
                for row in rows
            ]
        except MemoryError:  # the row may well be sound
            raise
        except Exception as error:
            if len(rows) > 1:  # one by one, so that it is known which
                return [one for row in rows for one in self.records(names, [row])]
            raise self._damaged(rows[0], places, error) from error

    def _damaged(self, row: tuple[Any, ...], places: list[int], error: Exception) -> DamagedRowError:
        """Which column of this row cannot be read; if each can, they do not go together."""
        key = ", ".join(f"{name} {shown_key(row[places[self._names.index(name)]])}" for name in self.shape.keys)
        for name, place, decode in zip(self._names, places, self._decoders, strict=True):
            try:
                row[place] is None or decode(row[place])
            except MemoryError:
                raise
            except Exception as reason:  # noqa: BLE001 - whatever a damaged row makes of our decoders
                return damaged_row(self.shape.table, key, reason, name)
        return damaged_row(self.shape.table, key, error)

    def _made(self, values: dict[str, Any]) -> Any:
        return _ledger_from(values) if self.shape.record is Ledger else self.shape.record(**values)


def _ledger_values(ledger: Ledger) -> tuple[Any, ...]:
    """In the order of the columns."""
    plain = _ledger_plain(ledger)
    return (*plain[:2], *ledger.states.values(), *ledger.healths.values(), *plain[2:])


_ledger_plain = operator.attrgetter("workspace_id", "active", *LEDGER_TOTALS, *LEDGER_CHAIN)


def _ledger_from(values: dict[str, Any]) -> Ledger:
    states = {state: values.pop(f"states.{state}") for state in AgentState}
    healths = {state: values.pop(f"healths.{state}") for state in HealthState}
    return Ledger(**values, states=states, healths=healths)
