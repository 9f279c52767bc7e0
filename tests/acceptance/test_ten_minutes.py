"""The guide "Ten minutes with Ostler": its commands run in the installed program and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from shell import SECONDS, Shell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "ten-minutes.md"
BLOCK = re.compile(r"^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What differs from run to run, and the word that stands for it in both texts.
VARYING = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\+00:00)?", "TIME"),
    (r"\d+ acts, head \d+ [0-9a-f]{64}", "HEAD"),
    (r"(less than )?\d+(\.\d+)? (ms|s|min|h|d|B|K|M|G|%)(?!\w)", "AMOUNT"),
    (r"AMOUNT +(\d +)?AMOUNT( +AMOUNT)*", "AMOUNTS"),
    (r"\d+(\.\d+)+", "VERSION"),
    (r"healthy", "unknown"),
    (r"[ ]+", " "),
)
#: These may be typed until they show what the page does.
LOOKS = re.compile(r"ostler (ps|logs|why|waits|answer)\b")


def steady(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def matches(shown: str, printed: str) -> bool:
    """Whether this was printed; a line of `…` stands for any lines."""
    lines = steady(shown).splitlines()
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in lines)
    return re.fullmatch(pattern, steady(printed)) is not None


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a block with what it prints."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


class Typist:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._environment = shell.environment | {"PATH": f"{shell.program.parent}:{shell.environment['PATH']}"}
        self._code = 0

    def type(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"(exit {self._code})\n{line}"],
            env=self._environment,
            cwd=self._shell.project,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        self._code = done.returncode
        return done.stdout.replace(str(self._shell.project), "~/ten-minutes")


def test_the_commands_of_the_page_print_what_it_shows(shell: Shell) -> None:
    typist = Typist(shell)
    for kind, block in BLOCK.findall(PAGE.read_text()):
        if kind == "sh":
            assert typist.type(block) == ""
            continue
        for line, shown in commands(block):
            printed, end = typist.type(line), time.monotonic() + SECONDS
            while LOOKS.match(line) and not matches(shown, printed) and time.monotonic() < end:
                time.sleep(0.2)
                printed = typist.type(line)
            assert matches(shown, printed), f"$ {line}\n{printed}\nThe page shows:\n{shown}"
