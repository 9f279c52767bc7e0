"""A request as it came in, read field by field; what does not fit is refused with a sentence that names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostler.keeper.boxes import BoxLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Send = Callable[[Mapping[str, Any], Sequence[int]], None]


class RefusedError(Exception):
    """What the peer hears instead of an answer."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Reply:
    """The one answer to one request; given at once or later."""

    def __init__(self, number: Any, send: Send) -> None:
        self.number = number
        self._send = send

    def ok(self, body: Mapping[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
        self._send({"id": self.number, "ok": dict(body or {})}, fds)

    def refuse(self, kind: str, sentence: str) -> None:
        self._send({"id": self.number, "error": sentence, "kind": kind}, ())


class Asked:
    """The fields of one mapping. Every reader raises `RefusedError` of kind "request"."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def name(self, key: str) -> str:
        """Becomes part of a path, so it is one plain word."""
        found = self.text(key)
        if not _NAME.fullmatch(found):
            raise _wrong(key, "must be letters, digits, dots and dashes")
        return found

    def name_or_none(self, key: str) -> str | None:
        return None if self._fields.get(key) is None else self.name(key)

    def text(self, key: str) -> str:
        found = self._fields.get(key)
        if not isinstance(found, str) or "\0" in found:
            raise _wrong(key, "must be a text")
        return found

    def text_or_none(self, key: str) -> str | None:
        return None if self._fields.get(key) is None else self.text(key)

    def number(self, key: str, default: float, most: float) -> float:
        found = self._fields.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= most:
            raise _wrong(key, f"must be a number from 0 to {most:g}")
        return float(found)

    def whole(self, key: str, default: int, least: int, most: int) -> int:
        found = self._fields.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise _wrong(key, f"must be a whole number from {least} to {most}")
        return found

    def flag(self, key: str) -> bool:
        found = self._fields.get(key, False)
        if not isinstance(found, bool):
            raise _wrong(key, "must be true or false")
        return found

    def texts(self, key: str) -> list[str]:
        found = self._fields.get(key)
        if (
            not isinstance(found, list)
            or not found
            or not all(isinstance(one, str) and "\0" not in one for one in found)
        ):
            raise _wrong(key, "must be a list of texts, with one at least")
        return found

    def environment(self, key: str) -> dict[str, str]:
        found = self._fields.get(key) or {}
        if not isinstance(found, dict):
            raise _wrong(key, "must be an object")
        for name, value in found.items():
            if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
                raise _wrong(key, f"cannot have {name!r}")
        return dict(found)

    def part(self, key: str) -> Asked:
        found = self._fields.get(key)
        if not isinstance(found, dict):
            raise _wrong(key, "must be an object")
        return Asked(found)

    def has(self, key: str) -> bool:
        return self._fields.get(key) is not None

    def anything(self, key: str) -> Any:
        return self._fields.get(key)

    def limits(self, key: str) -> BoxLimits:
        part = self.part(key) if self.has(key) else Asked({})
        most = 2**62
        return BoxLimits(
            memory_bytes=part.whole("memory_bytes", 1, 1, most) if part.has("memory_bytes") else None,
            cpu_percent=part.whole("cpu_percent", 1, 1, 1_000_000) if part.has("cpu_percent") else None,
            pids=part.whole("pids", 1, 1, 4_000_000) if part.has("pids") else None,
            weight=part.whole("weight", 100, 1, 10_000) if part.has("weight") else 100,
        )


def _wrong(key: str, what: str) -> RefusedError:
    return RefusedError("request", f"{key} {what}")
