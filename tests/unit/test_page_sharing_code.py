"""Code that is run in every agent is brought together before the first fork, and does what it did."""

from __future__ import annotations

import subprocess
import sys

#: In a program of its own: it replaces code.
_PROGRAM = """
import argparse, gc, json, textwrap
from types import FunctionType
from ostler.agent_process.page_sharing import gather_code

def run():
    parser = argparse.ArgumentParser(prog="it")
    parser.add_argument("--so", type=int)
    return json.dumps({"a": [1]}, indent=1), textwrap.fill("so it goes", 5), parser.parse_args(["--so", "1"]).so

expected = run()
before = {one: one.__code__ for one in gc.get_objects() if type(one) is FunctionType}
kept = gather_code(run, ())
assert run() == expected
moved = {one: code for one, code in before.items() if one.__code__ is not code}
assert run in moved and json.dumps in moved and argparse.ArgumentParser.parse_args in moved
assert {id(code) for code in moved.values()} <= set(map(id, kept[1])), "no new object takes their places"

def pages(codes):
    return len({id(code) // 4096 for code in codes})

print(len(moved), pages(moved.values()), pages(one.__code__ for one in moved))
"""


def test_code_that_is_run_is_brought_together() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert not told.stderr
    functions, scattered, together = (int(word) for word in told.stdout.split())
    assert functions > 50
    assert together < scattered
