"""A dict that is filled when it is first looked at.

`get_active_agents` promises a dict of its own to each caller. Most look at few of a hundred thousand entries, or only
at how many there are; so what is handed out knows where to read, and reads before the population changes, or when
somebody looks, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Self

Source = Callable[[], Mapping[str, Any]]

_READING = (
    *("__contains__", "__eq__", "__getitem__", "__ge__", "__gt__", "__iter__", "__le__", "__len__", "__lt__", "__ne__"),
    *("__or__", "__repr__", "__reversed__", "__ror__", "__sizeof__", "copy", "get", "items", "keys", "values"),
)
_WRITING = ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update")
#: Stands inside while nothing has been read: what asks a dict for its size past `__len__`, as the writer of JSON does,
#: must not take it for empty.
_UNREAD = "(not read yet)"


class LateDict(dict[str, Any]):
    """Made as any dict, or by `reading`: then it behaves as the dict that the source would have given at that time."""

    __slots__ = ("__weakref__", "source")

    #: Where to read; None once it has been read.
    source: Source | None

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        made = super().__new__(cls)
        made.source = None
        return made

    @classmethod
    def reading(cls, source: Source) -> Self:
        made = cls()
        dict.__setitem__(made, _UNREAD, None)
        made.source = source
        return made

    def fill(self) -> None:
        source, self.source = self.source, None
        if source is not None:
            dict.clear(self)
            dict.update(self, source())

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain dict: it has nothing more to wait for."""
        self.fill()
        return dict, (dict(self),)


def _filled(name: str) -> Any:
    plain = getattr(dict, name)

    @wraps(plain)
    def look(self: LateDict, *args: Any, **named: Any) -> Any:
        if self.source is not None:
            self.fill()
        if args and isinstance(args[0], LateDict):  # two of them are compared past their methods
            args[0].fill()
        return plain(self, *args, **named)

    return look


for _name in (*_READING, *_WRITING):
    setattr(LateDict, _name, _filled(_name))
