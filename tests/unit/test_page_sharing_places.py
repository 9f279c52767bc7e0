"""What is made after the holes are filled stands together: in a forked agent, on few pages of its own."""

from __future__ import annotations

import subprocess
import sys

#: In a program of its own: the memory of this one has seen much.
_PROGRAM = """
import sys
from ostler.agent_process.page_sharing import fill_places

def pools(objects):
    return len({id(one) // (16 * 1024) for one in objects})

holes = [bytes(200) for _ in range(600)][::2]
made = [bytes(200) for _ in range(300)]
scattered = pools(made)
del made
filling = fill_places()
print(scattered, pools([bytes(200) for _ in range(30)]), sum(map(sys.getsizeof, filling)))
"""


def test_what_is_made_after_the_holes_are_filled_stands_together() -> None:
    told = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    scattered, together, size = (int(word) for word in told.stdout.split())
    assert scattered > 2
    assert together <= 2
    assert size < 4 * 1024 * 1024
