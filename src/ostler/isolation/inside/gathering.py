"""Before the first fork: code that every agent runs is brought together.

Running a function writes to its code object (it counts its users), and in a forked child that copies the page. Code
objects lie where their modules were loaded, each hot one among many that are never run; so each would cost a page.
Copies made one after the other lie side by side.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from ostler.isolation.inside.filling import fill_holes


def gather(run: Callable[[], object], *wholly: ModuleType) -> list[object]:
    """What `run` runs is brought together, and all functions of some modules.

    Returns what is to be kept: new objects would take the places of the old copies, and those are as scattered as ever.
    """
    # By where it is and not by what it holds: to compare code is to read it, and there are thousands.
    seen: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    spaces = {id(vars(module)) for module in wholly}
    users = [
        one
        for one in gc.get_objects()
        if type(one) is FunctionType and (id(one.__code__) in seen or id(one.__globals__) in spaces)
    ]
    turns = {place: turn for turn, place in enumerate(seen)}
    users.sort(key=lambda one: turns.get(id(one.__code__), len(turns)))
    kept: list[object] = [*seen.values(), *(one.__code__ for one in users)]
    kept += fill_holes()  # or the small ones would lie in holes
    for function in users:
        function.__code__ = function.__code__.replace()
    return kept
