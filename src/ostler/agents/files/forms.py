"""How a value may be written: `45m`, `2G`, `on-failure:3`. A reader gives the value, or says what is expected."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any

_DURATION = r"(\d+(\.\d+)?d)?(\d+(\.\d+)?h)?(\d+(\.\d+)?m)?(\d+(\.\d+)?s)?(\d+ms)?"
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|ms|m|s)")
_SECONDS = MappingProxyType({"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001})
_SIZE = r"\d+(\.\d+)?[KMGTkmgt](i?[Bb])?"
_SIZE_POWERS = "KMGT"
_COUNT = r"\d[\d_]*(\.\d+)?[kMG]?"
_COUNT_POWERS = MappingProxyType({"k": 10**3, "M": 10**6, "G": 10**9})
_PERCENT = r"\d+ ?%?"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._/:=@ -]*"
_ACP = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_CLASS = rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*"
_RESTART = r"no|always|on-failure(:\d+)?"
#: Longer numbers are no durations and no sizes that anybody means.
_DIGITS = 15

DRIVERS = ("acp", "command", "python")


class Form(StrEnum):
    """The forms of values that the table of keys may name."""

    TEXT = "text"
    WORD = "word"
    FLAG = "flag"
    COUNT = "count"
    PERCENT = "percent"
    NUMBER = "number"
    MONEY = "money"
    DURATION = "duration"
    SIZE = "size"
    TEXTS = "texts"
    NAMES = "names"
    COMMAND = "command"
    CLASS = "class"
    ACP = "acp"
    DRIVER = "driver"
    RESTART = "restart"
    CHOICE = "choice"  #: one of `Key.choices`
    KEYS = "keys"  #: the keys of `Key.keys`
    NAMED = "named"  #: any names, each with what `Key.each` says


@dataclass(frozen=True, kw_only=True, slots=True)
class FormRule:
    #: What is expected, as it follows "must be".
    hint: str
    #: Raises ValueError for anything else.
    read: Callable[[Any], Any]
    #: The same as JSON Schema.
    schema: Mapping[str, Any]


def duration(value: Any) -> timedelta:
    text = _text(value)
    if value == 0 and not isinstance(value, bool):
        return timedelta(0)
    if not text or not re.fullmatch(_DURATION, text, re.ASCII):
        raise ValueError
    seconds = sum(_number(amount) * _SECONDS[unit] for amount, unit in _DURATION_PART.findall(text))
    return timedelta(milliseconds=round(seconds * 1000))


def size(value: Any) -> int:
    """In bytes; a K is 1024 of them."""
    found = _matched(_SIZE, value).upper().rstrip("IB")
    return math.ceil(_number(found[:-1]) * float(1024 ** (_SIZE_POWERS.index(found[-1]) + 1)))


def count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = _matched(_COUNT, value).replace("_", "")
    power = _COUNT_POWERS.get(text[-1], 1)
    whole = _number(text.rstrip("kMG")) * power
    if whole != int(whole):
        raise ValueError
    return int(whole)


def percent(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(_number(_matched(_PERCENT, value).rstrip(" %")))


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError  # noqa: TRY004 - a reader says no in one way
    try:
        found = float(value)
    except OverflowError as error:
        raise ValueError from error
    if not math.isfinite(found):
        raise ValueError
    return found


def money(value: Any) -> float:
    found = number(value)
    if found < 0:
        raise ValueError
    return found


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - a reader says no in one way
    return value


def texts(value: Any) -> list[str]:
    """A single text is a list of one."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError
    return list(items)


def names(value: Any) -> list[str]:
    return [_matched(_NAME, item) for item in texts(value)]


def command(value: Any) -> list[str]:
    """A text is split as a shell would split it; no shell ever sees it."""
    parts = shlex.split(value) if isinstance(value, str) else value
    whole = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    if not whole or not parts or not parts[0].strip():
        raise ValueError
    return list(parts)


def driver(value: Any) -> dict[str, Any]:
    """The short form of what could be written as {acp: …}, {command: …} or {python: …}."""
    kind, colon, rest = (_text(value) or "").partition(":")
    if kind not in DRIVERS or not colon:
        raise ValueError
    return {kind: FORMS[Form.CLASS if kind == "python" else Form(kind)].read(rest.strip())}


def restart(value: Any) -> dict[str, Any]:
    """The short form of {policy: …, max: …}. False is what older readers of YAML make of `no`."""
    policy, _, most = _matched(_RESTART, "no" if value is False else value).partition(":")
    return {"policy": policy, **({"max": int(_number(most))} if most else {})}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError  # noqa: TRY004 - a reader says no in one way
    return value


def word(value: Any) -> str:
    return _matched(_WORD, value)


def class_path(value: Any) -> str:
    return _matched(_CLASS, value)


def acp_name(value: Any) -> str:
    return _matched(_ACP, value)


def structure(value: Any) -> Any:
    """Mappings are read by the walk over the table; anything else in their place is wrong."""
    raise ValueError(value)


def _text(value: Any) -> str | None:
    return value.strip() if isinstance(value, str) else None


def _matched(pattern: str, value: Any) -> str:
    found = _text(value)
    if not found or not re.fullmatch(pattern, found, re.ASCII):
        raise ValueError
    return found


def _number(digits: str) -> float:
    if len(digits) > _DIGITS:
        raise ValueError
    return float(digits)


def _schema(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$", **more}


_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_NAME_LIST = {"anyOf": [_schema(_NAME), {"type": "array", "items": _schema(_NAME)}]}
_DRIVER_SCHEMA = {"type": "string", "pattern": f"^(?:{'|'.join(DRIVERS)}):"}
_NUMBER_SCHEMA = {"type": "number"}
_WHOLE_SCHEMA = {"type": "integer", "minimum": 0}

FORMS: Mapping[Form, FormRule] = MappingProxyType(
    {
        Form.TEXT: FormRule(hint="text", read=text, schema={"type": "string"}),
        Form.WORD: FormRule(hint="a short text", read=word, schema=_schema(_WORD)),
        Form.FLAG: FormRule(hint="true or false", read=flag, schema={"type": "boolean"}),
        Form.COUNT: FormRule(
            hint="a whole number such as 3, 500k or 2M", read=count, schema={"anyOf": [_WHOLE_SCHEMA, _schema(_COUNT)]}
        ),
        Form.PERCENT: FormRule(
            hint="a percentage such as 50%", read=percent, schema={"anyOf": [_WHOLE_SCHEMA, _schema(_PERCENT)]}
        ),
        Form.NUMBER: FormRule(hint="a number such as 1.5", read=number, schema=_NUMBER_SCHEMA),
        Form.MONEY: FormRule(hint="an amount such as 5.00", read=money, schema={**_NUMBER_SCHEMA, "minimum": 0}),
        Form.DURATION: FormRule(
            hint="a duration with its unit, such as 500ms, 20s, 45m, 1h30m or 3d",
            read=duration,
            schema={"anyOf": [{"const": 0}, _schema(_DURATION, minLength=1)]},
        ),
        Form.SIZE: FormRule(hint="a size with its unit, such as 512M or 2G", read=size, schema=_schema(_SIZE)),
        Form.TEXTS: FormRule(hint="a list of texts", read=texts, schema=_LIST),
        Form.NAMES: FormRule(hint="a list of names of variables, without values", read=names, schema=_NAME_LIST),
        Form.COMMAND: FormRule(
            hint='a command such as ["aider", "--message-file", "{prompt_file}"]', read=command, schema=_LIST
        ),
        Form.CLASS: FormRule(hint="a class such as my.module:Fixer", read=class_path, schema=_schema(_CLASS)),
        Form.ACP: FormRule(hint="the name of a driver, such as claude", read=acp_name, schema=_schema(_ACP)),
        Form.DRIVER: FormRule(
            hint="acp:NAME, python:module:Class, or keys with one of acp, command, python",
            read=driver,
            schema=_DRIVER_SCHEMA,
        ),
        Form.RESTART: FormRule(
            hint="no, always, on-failure, on-failure:3, or keys such as policy and max",
            read=restart,
            schema={"anyOf": [{"const": False}, _schema(_RESTART)]},
        ),
        Form.CHOICE: FormRule(hint="one of the choices", read=text, schema={"type": "string"}),
        Form.KEYS: FormRule(hint="keys with values", read=structure, schema={"type": "object"}),
        Form.NAMED: FormRule(hint="names with values", read=structure, schema={"type": "object"}),
    }
)
