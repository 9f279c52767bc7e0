"""Results on standard output, talk on standard error; control characters leave as escapes."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any

import click

from ostler.durations import rough_duration


def plain(text: str) -> str:
    """The text with everything escaped that a terminal would act upon or hide."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


#: A moment in UTC, as sentences of the daemon carry it.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(?:\+00:00|Z| UTC)")
#: A change of colour or weight, the only sequence of an agent that may reach a terminal.
_STYLE = re.compile(r"(\x1b\[[0-9;:]*m)")


def sentence(text: str) -> str:
    """A sentence of the daemon for the screen: its moments in the local time zone."""
    return plain(_MOMENT.sub(lambda match: local_time(f"{match[1]}T{match[2]}+00:00"), text))


def written_by_agent(text: str) -> str:
    """A line that an agent wrote: as it is for a pipe or a file; on a terminal only its colours are left."""
    if not sys.stdout.isatty():
        return text
    parts = _STYLE.split(text)
    styled = "".join(part if place % 2 else plain(part) for place, part in enumerate(parts))
    return f"{styled}\x1b[0m" if len(parts) > 1 else styled


def has_colour() -> bool:
    """Colour only on a terminal, and never where NO_COLOR asks for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def silence_text(seconds: float) -> str:
    """For a list that stays on the screen while no daemon answers, so that nobody takes its rows for the present."""
    return f"no daemon answers since {rough_duration(seconds)}; these are the last rows; start it: ostler up -d"


# --- the pager ---------------------------------------------------------------------------------------

PAGER_VARIABLE = "OSTLER_PAGER"
_NOT_FOUND = 127


def page(text: str) -> None:
    """Through the pager where standard output is a terminal, by the rules of git; else as it is."""
    pager = _pager()
    if pager is None:
        click.echo(text)
        return
    import signal  # noqa: PLC0415 - only here
    import subprocess  # noqa: PLC0415 - likewise

    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environment)  # noqa: S602 - the user's own
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is the pager's
    try:
        process.communicate(f"{text}\n".encode(errors="backslashreplace"))  # the pager may end before it has read all
    finally:
        signal.signal(signal.SIGINT, before)
    if process.returncode == _NOT_FOUND:
        click.echo(text)


def _pager() -> str | None:
    """$OSTLER_PAGER, else $PAGER, else less; an empty one and cat mean none."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    import shutil  # noqa: PLC0415 - only here

    chosen = os.environ.get(PAGER_VARIABLE, os.environ.get("PAGER"))
    if chosen is None:
        chosen = "less" if shutil.which("less") else ""
    return None if chosen.strip() in {"", "cat"} else chosen


def diff_lines(text: str) -> str:
    """A diff, or its statistics, for the screen; in the colours of git where there are colours."""
    lines = map(plain, text.splitlines())
    return "\n".join(map(_coloured, lines) if has_colour() else lines)


def _coloured(line: str) -> str:
    match line[:1]:
        case "+" | "-" if line.startswith(("+++ ", "--- ")):
            return click.style(line, bold=True)
        case "+":
            return click.style(line, fg="green")
        case "-":
            return click.style(line, fg="red")
        case "@":
            return click.style(line, fg="cyan")
        case " " if (match := _STATISTICS.fullmatch(line)) is not None:
            return match[1] + click.style(match[2], fg="green") + click.style(match[3], fg="red")
        case " " | "":
            return line
        case _:
            return click.style(line, bold=True)


#: ` src/loader.py | 48 +++++-----`
_STATISTICS = re.compile(r"( .* \| +\d+ )(\+*)(-*)")


def as_json(value: Any, *, indent: int | None = 2) -> None:
    """In ASCII: an escape means the same, and no terminal acts upon it."""
    click.echo(json.dumps(value, indent=indent))


def note(text: str) -> None:
    """Also from a handler of a signal, which may come in the midst of other output."""
    line = f"ostler: {sentence(text)}"
    try:
        click.echo(line, err=True)
    except RuntimeError:  # a stream is not entered twice
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


# --- times -------------------------------------------------------------------------------------------


def moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def seconds_since(text: str | None) -> float:
    when = moment(text)
    return 0.0 if when is None else max((datetime.now(UTC) - when).total_seconds(), 0.0)


def local_time(text: str | None) -> str:
    when = moment(text)
    return "" if when is None else f"{when.astimezone():%Y-%m-%d %H:%M:%S}"


def cost_text(dollars: float | None) -> str:
    return "-" if dollars is None else "<$0.01" if 0 < dollars < 0.005 else f"${dollars:.2f}"


def tokens_text(count: int) -> str:
    return "" if not count else str(count) if count < 10_000 else f"{count / 1000:.0f} k"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(text: str | None) -> str:
    """The first line of an error or a summary."""
    return (text or "").strip().split("\n", 1)[0].removesuffix("; its last lines:").removesuffix(":")


def short_path(path: str | os.PathLike[str]) -> str:
    """With ~ for the user's own directory."""
    text, own = os.fspath(path), os.path.expanduser("~")  # noqa: PTH111 - pathlib would be one more import
    return "~" + text[len(own) :] if own != "/" and (text == own or text.startswith(own + "/")) else text
