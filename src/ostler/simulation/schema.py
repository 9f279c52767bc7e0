"""The typed state of agents: a Pydantic model for a whole population, or plain dicts where there is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import pydantic

from ostler.agents.failures import error_text
from ostler.errors import ValidationError
from ostler.model import Fault, shown
from ostler.model.context import json_faults
from ostler.simulation.foreign import is_call_off

_CHANGED = "would come back as something else: use lists for tuples and text for keys, or give a schema"

#: So many levels less than can be written are kept.
_ROOM = 200


class StateForm:
    """How a state is checked, written down and read again."""

    __slots__ = ("_has_sets", "schema")

    def __init__(self, schema: Any = None) -> None:
        if schema is not None and not (isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)):
            bound = "must be a Pydantic model class, or None for plain dicts"
            raise ValidationError([Fault(field="schema", bound=bound, value=shown(schema))])
        self.schema: type[pydantic.BaseModel] | None = schema
        self._has_sets = self.schema is not None and _has_sets(self.schema)

    def make(self, given: Any, field: str = "initial_state") -> tuple[Any, tuple[Fault, ...]]:
        """The state that was asked for, or all that is wrong with it. What was given is never shared."""
        if self.schema is not None and isinstance(given, self.schema):
            given = dict(given)  # with the models in it: a strict schema would take no dicts for them
        elif isinstance(given, pydantic.BaseModel):
            given = given.model_dump()
        if not isinstance(given, Mapping):
            return None, (Fault(field=field, bound="must be a mapping", value=shown(given)),)
        if self.schema is None:
            faults = tuple(json_faults(field, given))
            if faults:
                return None, faults
            made = json.loads(json.dumps(dict(given)))
            return (made, ()) if made == given else (None, (Fault(field=field, bound=_CHANGED),))
        return _made(self.schema, given, field)

    def dump(self, state: Any) -> str:
        """The state as JSON. What would come back as something else is refused."""
        return self.written(state)[0]

    def written(self, state: Any) -> tuple[str, Any]:
        """The same, and the state as it will be read again: equal to the first, but a thing of its own."""
        if self.schema is not None:
            return self._typed(self.schema, state)
        text, again = written_json(state)
        if not isinstance(again, dict):
            raise _unkept("it must be a mapping", "let the engine change what is in it, or put another dict there")
        return text, again

    def _typed(self, schema: type[pydantic.BaseModel], state: Any) -> tuple[str, Any]:
        try:
            if self._has_sets:
                text = json.dumps(json_values(state), separators=(",", ":"), allow_nan=False)
            else:
                text = str(state.model_dump_json(warnings=False))
            again = _read(schema, text)
        except (pydantic.ValidationError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise _unkept(f"it does not come back ({_first_line(error)})", _TYPED) from None
        if again != state:
            raise _unkept(f"{_changed(state, again)} would come back as something else", _TYPED)
        return text, again

    def plain(self, state: Any) -> Any:
        """The state as JSON values, for the caller to keep."""
        return json.loads(self.dump(state))

    def load(self, value: Any) -> Any:
        """What `dump` wrote, parsed already."""
        return value if self.schema is None else _read(self.schema, json.dumps(value))


def compact_json(value: Any) -> str:
    """As short as can be, and with room to spare: it will be read inside of other things, far down in some program.

    Writing fails where reading would, at the limit of recursion; with some lists around it, it fails before that.
    """
    for _ in range(_ROOM):
        value = [value]
    return json.dumps(value, separators=(",", ":"), allow_nan=False)[_ROOM:-_ROOM]


def written_json(value: Any) -> tuple[str, Any]:
    """A plain value as JSON, and as it will be read again; refused where the two are not equal."""
    try:
        text = compact_json(value)
        again = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unkept(str(error)) from None
    if again != value:
        raise _unkept("a tuple or a key that is no text would come back as something else")
    return text, again


def json_values(model: pydantic.BaseModel) -> Any:
    """A model as JSON values, with sets in an order that is the same in every process."""
    return _ordered(model.model_dump(mode="json", warnings=False), model.model_dump(warnings=False))


def _ordered(plain: Any, value: Any) -> Any:
    """Go through both in step: what was a set has become a list in the order of its hashes."""
    if isinstance(plain, dict) and isinstance(value, Mapping) and len(plain) == len(value):
        return {key: _ordered(one, other) for (key, one), other in zip(plain.items(), value.values(), strict=True)}
    if not isinstance(plain, list) or not isinstance(value, Collection) or len(plain) != len(value):
        return plain
    found = [_ordered(one, other) for one, other in zip(plain, value, strict=True)]
    return sorted(found, key=json.dumps) if isinstance(value, AbstractSet) else found


def _has_sets(schema: type[pydantic.BaseModel]) -> bool:
    """Whether a state may hold any; where nobody can tell, it may."""
    try:
        return "uniqueItems" in json.dumps(schema.model_json_schema(mode="serialization"), default=str)
    except Exception:  # noqa: BLE001 - not every model has a JSON schema, and foreign types may do anything here
        return True


def _made(schema: type[pydantic.BaseModel], given: Mapping[str, Any], field: str) -> tuple[Any, tuple[Fault, ...]]:
    """A foreign object may do anything when it is copied, and so may the validators of a schema."""
    own: dict[str, Any] | None = None
    try:
        # A model keeps the objects that it is given where its fields do not say what is in them.
        own = copy.deepcopy(dict(given))
        return schema.model_validate(own, by_alias=True, by_name=True), ()
    except pydantic.ValidationError as error:
        return None, tuple(_fault(field, found) for found in error.errors(include_url=False))
    except BaseException as error:
        if is_call_off(error):
            raise
        bound = f"cannot be copied: {error}" if own is None else f"does not fit: {error_text(error)}"
        return None, (Fault(field=field, bound=bound),)


_PLAIN = "use numbers, text, lists and dicts with text keys, or give a schema"
_TYPED = "let the fields of the schema say exactly what is in them, with finite numbers, and exclude none"


def _read(schema: type[pydantic.BaseModel], text: str) -> pydantic.BaseModel:
    """As JSON, or a strict model would take no list for a tuple."""
    return schema.model_validate_json(text, by_alias=True, by_name=True)


def _unkept(why: str, advice: str = _PLAIN) -> ValidationError:
    bound = f"cannot be kept: {why}; {advice}"
    return ValidationError([Fault(field="state", bound=bound)])


def _first_line(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
    return str(error).partition("\n")[0]


def _changed(state: Any, again: Any) -> str:
    """The field that did not come back as it was."""
    names = [name for name, value in dict(state).items() if dict(again).get(name) != value]
    return f"the field {names[0]}" if names else "something that is no field"


def _fault(field: str, found: Any) -> Fault:
    place = ".".join((field, *(str(step) for step in found["loc"])))
    text = str(found["msg"])
    value = "" if found["type"] == "missing" else shown(found["input"])
    return Fault(field=place, bound=f"does not fit: {text[:1].lower()}{text[1:]}", value=value)
