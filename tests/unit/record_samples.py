"""A record of every class with every field set, made from the annotations."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from ostler import model
from ostler.model.record import PartialRecord, Record
from ostler.policy.retention import RetentionPolicy

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
ID = UUID(int=7)
_BASES = {Record, PartialRecord}
_SAMPLES: dict[Any, Any] = {
    UUID: ID,
    str: "text",
    int: 70,
    float: 1.5,
    bool: True,
    datetime: NOW,
    timedelta: timedelta(seconds=45),
    Any: [1, None, {"b": "é"}],
}
#: Values that more than a type decides.
_FIELDS: dict[str, Any] = {
    "depends_on": ("another",),
    "max_worker_threads": 3,
    "max_retries": 2,
    "summary_limit": 800,
    "burst_limit": 7,
    "target": "http://localhost/health",
    "probe": "http",
    "hash": "0" * 64,
    "idempotency": timedelta(hours=1),
    "finished": timedelta(hours=2),
    "events": timedelta(hours=3),
    "audit": timedelta(hours=4),
}


def _classes() -> list[type[Any]]:
    modules = [importlib.import_module(f"ostler.model.{found.name}") for found in pkgutil.iter_modules(model.__path__)]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Record) and value not in _BASES
    }
    return sorted({*found, RetentionPolicy}, key=lambda cls: cls.__name__)


#: Every record of the model.
RECORDS = _classes()


def sample(hint: Any) -> Any:
    """A value that is not the default."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return sample(arguments[0])
    if origin is tuple:
        return (sample(arguments[0]),)
    if origin is Mapping:
        return {sample(arguments[0]): sample(arguments[1])}
    if origin is typing.Literal:
        return arguments[0]
    if hint in _SAMPLES:
        return _SAMPLES[hint]
    return list(hint)[-1] if issubclass(hint, Enum) else full(hint)


def full(cls: type[Any]) -> Any:
    hints = typing.get_type_hints(cls)
    values = {field.name: sample(hints[field.name]) for field in dataclasses.fields(cls)}
    if hints.get("workdir") == str | None:
        values["workdir"] = "/somewhere"  # of a task it is a record, of a spawn a path
    if hints.get("tasks") == str | None:
        values["tasks"] = "tag:text"  # those that a crew takes
    return cls(**{**values, **{name: value for name, value in _FIELDS.items() if name in values}}).checked()
