"""Before the first fork: code that every agent runs is brought together.

Running a function writes to its code object (it counts who uses it), and in a forked child that copies the page. Code
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
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    spaces = [vars(module) for module in wholly]
    users: dict[CodeType, list[FunctionType]] = {code: [] for code in seen}
    for one in gc.get_objects():
        if type(one) is FunctionType and (one.__code__ in seen or any(one.__globals__ is space for space in spaces)):
            users.setdefault(one.__code__, []).append(one)
    filling = fill_holes()  # or the small ones would lie in holes
    for code, functions in users.items():
        for function in functions:
            function.__code__ = code.replace()
    return [*users, *filling]
