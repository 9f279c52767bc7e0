"""What public calls are handed, checked where it comes in: a wrong type is told in a sentence."""

from __future__ import annotations

from typing import Any

from ostler.errors import ValidationError
from ostler.model import Fault, shown
from ostler.model.validation import whole_number
from ostler.store import Store


def require_count(field: str, value: Any) -> int:
    number = whole_number(value)
    if number is None or number < 0:
        raise ValidationError([Fault(field=field, bound="must be a whole number, 0 or more", value=shown(value))])
    return number


def require_turn(field: str, value: Any) -> int:
    """Whether there is such a turn, the run tells."""
    number = whole_number(value)
    if number is None:
        raise ValidationError([Fault(field=field, bound="must be a whole number, that of a turn", value=shown(value))])
    return number


def require_kind(field: str, value: Any, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        raise ValidationError([Fault(field=field, bound=f"must be a {kind.__name__}", value=shown(value))])


def require_store(store: Any) -> None:
    if not isinstance(store, Store):
        bound = "must be a store, as `async with open_store(home) as store` gives it"
        raise ValidationError([Fault(field="store", bound=bound, value=shown(store))])
