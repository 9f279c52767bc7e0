"""What can be kept: values as JSON that reads back equal, and states typed by a Pydantic model where there is one."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pydantic
from pydantic_core import from_json, to_json

from ostler.agents.failures import error_text
from ostler.model.context import json_faults
from ostler.model.validation import Fault, fault, shown

#: The largest state that an agent may join with, and the largest decision.
MAX_VALUE_BYTES = 1024 * 1024
#: Lists around a value when it is tried out. Reading fails 200 levels deep, and the value will stand inside others.
_ROOM = 16
_CHANGED = "it would read back as something else: use lists for tuples and sets, text for keys, finite numbers"


class UnkeepableError(ValueError):
    """A value that cannot be written as JSON, or would not read back equal; the text says why."""


def write_json(value: Any) -> bytes:
    """JSON in which NaN and infinity are null, so that they do not read back equal."""
    return to_json(value, inf_nan_mode="null")


def read_back(values: Sequence[Any]) -> tuple[list[bytes], list[Any]]:
    """Each value as JSON, and the values as they read back; raises `UnkeepableError` unless all are equal."""
    try:
        texts = [to_json(value, inf_nan_mode="null") for value in values]
        again: list[Any] = from_json(b"".join((b"[" * _ROOM, b",".join(texts), b"]" * _ROOM)))
    except ValueError as error:  # all that pydantic raises for values that JSON has no word for
        raise UnkeepableError(_first_line(error)) from None
    except RecursionError:
        raise UnkeepableError("it is nested too deep") from None
    for _ in range(_ROOM - 1):
        again = again[0]
    if again != values:
        raise UnkeepableError(_CHANGED)
    return texts, again


def ordered_json(model: pydantic.BaseModel) -> Any:
    """A model as JSON values, with sets in an order that is the same in every program."""
    return _ordered(model.model_dump(mode="json", warnings=False), model.model_dump(warnings=False))


def _ordered(plain: Any, value: Any) -> Any:
    """Go through both in step: what was a set has become a list in the order of its hashes."""
    if isinstance(plain, dict) and isinstance(value, Mapping) and len(plain) == len(value):
        return {key: _ordered(entry, typed) for (key, entry), typed in zip(plain.items(), value.values(), strict=True)}
    if not isinstance(plain, list) or not isinstance(value, Collection) or len(plain) != len(value):
        return plain
    entries = [_ordered(entry, typed) for entry, typed in zip(plain, value, strict=True)]
    return sorted(entries, key=json.dumps) if isinstance(value, AbstractSet) else entries


class StateForm:
    """How the states of one population are checked, written and read."""

    def __init__(self, schema: Any = None) -> None:
        if schema is not None and not (isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)):
            raise fault("schema", "must be a Pydantic model class, or None for plain dicts", schema)
        self.schema: type[pydantic.BaseModel] | None = schema

    def make(self, value: Any, field: str = "initial_state") -> tuple[Any, tuple[Fault, ...]]:
        """A new state that shares nothing with `value`; or every fault of it."""
        if self.schema is not None and isinstance(value, self.schema):
            value = dict(value)  # with the models in it: a strict schema would take no dicts for them
        elif isinstance(value, pydantic.BaseModel):
            value = value.model_dump()
        if not isinstance(value, Mapping):
            return None, (Fault(field=field, bound="must be a mapping", value=shown(value)),)
        if self.schema is not None:
            return _validated(self.schema, value, field)
        try:
            (text,), (made,) = read_back([dict(value)])
        except UnkeepableError as error:
            faults = tuple(json_faults(field, value, MAX_VALUE_BYTES))
            return None, faults or (Fault(field=field, bound=f"cannot be kept: {error}"),)
        if len(text) > MAX_VALUE_BYTES:
            return None, (Fault(field=field, bound=f"must be at most {MAX_VALUE_BYTES >> 20} MiB as JSON"),)
        return made, ()

    def write(self, states: Sequence[Any]) -> tuple[list[bytes], list[Any]]:
        """Each state as JSON, and the states as they read back; raises `UnkeepableError` unless all are equal."""
        if self.schema is None:
            texts, again = read_back(states)
            if not all(type(state) is dict for state in again):
                raise UnkeepableError("a state must be a dict")
            return texts, again
        typed = [_write_model(self.schema, state) for state in states]
        return [text for text, _ in typed], [again for _, again in typed]

    def plain(self, state: Any) -> Any:
        """One state as JSON values."""
        return from_json(self.write([state])[0][0])

    def read(self, value: Any) -> Any:
        """A state from JSON values that `write` wrote; raises `pydantic.ValidationError`."""
        return value if self.schema is None else _read_model(self.schema, write_json(value))


def write_decision(value: Any) -> bytes:
    """One decision: a JSON value, or a Pydantic model; raises `UnkeepableError`."""
    typed = isinstance(value, pydantic.BaseModel)
    text = _write_model(type(value), value)[0] if typed else read_back([value])[0][0]
    if len(text) > MAX_VALUE_BYTES:
        raise UnkeepableError(f"it is larger than {MAX_VALUE_BYTES >> 20} MiB")
    return text


def _write_model(schema: type[pydantic.BaseModel], state: Any) -> tuple[bytes, Any]:
    try:
        text = write_json(ordered_json(state))
        again = _read_model(schema, text)
    except pydantic.ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise UnkeepableError(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise UnkeepableError(_first_line(error)) from None
    if again != state:
        raise UnkeepableError("a field of it would read back as something else; let the schema say what is in it")
    return text, again


def _read_model(schema: type[pydantic.BaseModel], text: bytes) -> pydantic.BaseModel:
    """From JSON, or a strict model would take no list for a tuple."""
    return schema.model_validate_json(text, by_alias=True, by_name=True)


def _validated(schema: type[pydantic.BaseModel], value: Mapping[str, Any], field: str) -> tuple[Any, tuple[Fault, ...]]:
    try:
        # A model keeps the objects of fields that do not say what is in them.
        return schema.model_validate(copy.deepcopy(dict(value)), by_alias=True, by_name=True), ()
    except pydantic.ValidationError as error:
        return None, tuple(_fault(field, detail) for detail in error.errors(include_url=False))
    except Exception as error:  # noqa: BLE001 - foreign objects may raise anything when they are copied
        return None, (Fault(field=field, bound=f"cannot be copied: {error_text(error)}"),)


def _fault(field: str, detail: Any) -> Fault:
    place = ".".join((field, *(str(step) for step in detail["loc"])))
    text = str(detail["msg"])
    value = "" if detail["type"] == "missing" else shown(detail["input"])
    return Fault(field=place, bound=f"does not fit: {text[:1].lower()}{text[1:]}", value=value)


def _first_line(error: BaseException) -> str:
    return str(error).removeprefix("Error serializing to JSON: ").partition("\n")[0]
