"""The git program, run so that nothing an agent has written is ever run with it.

An agent may write any configuration, hook, attribute or index into its own repository. So no call here reads a
configuration that an agent can write: `GIT_DIR` is always a repository of ours or the user's, the system's and the
user's own settings are switched off, and so is every setting that names a program. This is the only module that starts
git.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, Self

from ostler.errors import DeadlineError, GitError
from ostler.model.faults import fault
from ostler.model.text import clipped

#: `git merge-tree --write-tree` came with it.
MINIMUM_VERSION = (2, 38)
SECONDS = 120.0
#: Bytes of output that one call may give.
OUTPUT_LIMIT = 256 * 1024 * 1024
_MAX_ERROR = 600
_CHUNK = 1024 * 1024
_OBJECT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.alternateRefsCommand=",
    "core.sshCommand=false",
    "core.gitProxy=",
    "core.askPass=false",
    "core.editor=false",
    "core.pager=cat",
    "core.commitGraph=false",  # of borrowed objects: it could lie about parents and trees
    "core.multiPackIndex=false",
    "core.splitIndex=false",
    "core.untrackedCache=false",
    "core.fsync=objects,reference",
    "core.fsyncMethod=batch",
    "checkout.workers=0",
    "credential.helper=",
    "diff.external=",
    "diff.ignoreSubmodules=all",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.allow=never",
    "submodule.recurse=false",
    "commit.gpgSign=false",
)


class Answer(NamedTuple):
    code: int
    output: bytes
    error: str


@dataclass(frozen=True, kw_only=True)
class Git:
    """Where git is told to work. Copies with other places come from `with_`."""

    #: None: git looks for the repository that `at` is in.
    directory: Path | None = None
    at: Path | None = None
    work_tree: Path | None = None
    index: Path | None = None
    #: Where new objects go, when not into `directory`.
    objects: Path | None = None
    #: An object directory to read from as well, as an open descriptor or a path.
    borrowed: int | Path | None = None
    #: Descriptors that the program keeps open: a lock among them outlives us until the program has ended.
    held: tuple[int, ...] = ()

    def with_(
        self,
        *,
        work_tree: Path | None = None,
        index: Path | None = None,
        objects: Path | None = None,
        borrowed: int | Path | None = None,
    ) -> Self:
        return replace(self, work_tree=work_tree, index=index, objects=objects, borrowed=borrowed)

    def run(self, *arguments: str | bytes, stdin: bytes | IO[bytes] | None = None, seconds: float = SECONDS) -> bytes:
        """The output of a call that must succeed."""
        return _required(self.ask(*arguments, stdin=stdin, seconds=seconds), arguments)

    def text(self, *arguments: str | bytes, stdin: bytes | None = None) -> str:
        return self.run(*arguments, stdin=stdin).decode("utf-8", "replace").strip()

    def names(self, *arguments: str | bytes) -> list[bytes]:
        """The output of a call with `-z`, as its parts."""
        return [name for name in self.run(*arguments).split(b"\0") if name]

    def ask(
        self,
        *arguments: str | bytes,
        stdin: bytes | IO[bytes] | None = None,
        seconds: float = SECONDS,
        limit: int = OUTPUT_LIMIT,
        cut: bool = False,
    ) -> Answer:
        """Run it and say how it ended. `cut`: output beyond the limit is dropped instead of refused."""
        with _as_file(stdin) as source, tempfile.TemporaryFile() as errors:
            process = self._start(arguments, source, subprocess.PIPE, errors)
            with _ended_after(process, seconds) as late:
                output, too_much = _read(process, limit)
            _judge(arguments, late, too_much=too_much and not cut)
            errors.seek(0)
            told = errors.read(_MAX_ERROR * 4).decode("utf-8", "replace")
            return Answer(0 if too_much else process.returncode, output, told)

    def write(self, out: IO[bytes], *arguments: str, stdin: bytes, seconds: float = SECONDS) -> None:
        """Let the output go into a file."""
        with _as_file(stdin) as source, tempfile.TemporaryFile() as errors:
            process = self._start(arguments, source, out.fileno(), errors)
            with _ended_after(process, seconds) as late:
                process.wait()
            _judge(arguments, late, too_much=False)
            errors.seek(0)
            _required(Answer(process.returncode, b"", errors.read().decode("utf-8", "replace")), arguments)

    def _start(
        self, arguments: Sequence[str | bytes], source: int, out: int, errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        borrowed = (self.borrowed,) if isinstance(self.borrowed, int) else ()
        return subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
            [_program(), *settings, "--literal-pathspecs", "--no-replace-objects", *arguments],
            stdin=source,
            stdout=out,
            stderr=errors,
            cwd=self.work_tree or self.at or self.directory,
            env=self._environment(),
            pass_fds=(*self.held, *borrowed),
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        places = {
            "GIT_DIR": self.directory,
            "GIT_WORK_TREE": self.work_tree,
            "GIT_INDEX_FILE": self.index,
            "GIT_OBJECT_DIRECTORY": self.objects,
        }
        environment = {name: str(place) for name, place in places.items() if place is not None}
        if isinstance(self.borrowed, int):
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f"/proc/self/fd/{self.borrowed}"
        elif self.borrowed is not None:
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = _quote(os.fsencode(self.borrowed))
        return _fixed_environment() | environment


def user_settings(directory: Path) -> list[tuple[str, str]]:
    """The settings that the user's own git sees in a repository. Reading them runs nothing."""
    home = {name: value for name in ("HOME", "XDG_CONFIG_HOME") if (value := os.environ.get(name))}
    environment = {**_fixed_environment(), "GIT_DIR": str(directory), **home}
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM"):
        environment.pop(name)
    done = subprocess.run(  # noqa: S603 - a list of arguments, no shell
        [_program(), "config", "--list", "-z", "--includes"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        cwd=directory,
        timeout=SECONDS,
        check=False,
    )
    entries = [entry.partition("\n") for entry in done.stdout.decode("utf-8", "surrogateescape").split("\0") if entry]
    return [(name, value) for name, _, value in entries]


def require_version() -> None:
    """Refuse a git that lacks what is used here, with the sentence that says so."""
    told = _version()
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_VERSION:
        least = ".".join(map(str, MINIMUM_VERSION))
        raise GitError(f"worktrees need git {least} or newer, and this is {told!r}; install a newer git")


def object_id(text: str) -> str:
    """The name of an object, checked: nothing else may stand where git expects one."""
    if not _OBJECT_ID.fullmatch(text):
        raise fault("commit", "must be the full name of an object in git", text)
    return text


# --- paths as text -----------------------------------------------------------------------------------

_ESCAPES = {b"\n": "\\n", b"\t": "\\t", b"\r": "\\r", b'"': '\\"', b"\\": "\\\\"}
_UNESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", '"': b'"', "\\": b"\\"}
_ESCAPED = re.compile(rb'\\([0-7]{3}|[ntr"\\])')


def path_text(path: bytes) -> str:
    """A path as records and people see it: itself, or in git's quotes where it is not printable UTF-8."""
    with contextlib.suppress(UnicodeDecodeError):
        text = path.decode()
        if text.isprintable() and not text.startswith('"'):
            return text
    return _quote(path)


def path_bytes(text: str) -> bytes:
    if not (text.startswith('"') and text.endswith('"') and len(text) > 1):
        return os.fsencode(text)
    return _ESCAPED.sub(_unescaped, text[1:-1].encode())


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1].decode()
    return _UNESCAPES[code] if code in _UNESCAPES else bytes([int(code, 8) & 0xFF])


def _quote(path: bytes) -> str:
    return '"' + "".join(_escaped(path[at : at + 1]) for at in range(len(path))) + '"'


def _escaped(one: bytes) -> str:
    if one in _ESCAPES:
        return _ESCAPES[one]
    return one.decode() if b" " <= one <= b"~" else f"\\{one[0]:03o}"


# --- one run -----------------------------------------------------------------------------------------


def _fixed_environment() -> dict[str, str]:
    return {
        "PATH": os.defpath,
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_PROTOCOL_FROM_USER": "0",
        "GIT_AUTHOR_NAME": "Ostler",
        "GIT_AUTHOR_EMAIL": "ostler@localhost",
        "GIT_COMMITTER_NAME": "Ostler",
        "GIT_COMMITTER_EMAIL": "ostler@localhost",
    }


@cache
def _program() -> str:
    found = shutil.which("git")
    if found is None:
        raise GitError("the program git was not found; install it, or use workdirs of kind directory without review")
    return found


@cache
def _version() -> str:
    done = subprocess.run(  # noqa: S603 - our own arguments
        [_program(), "--version"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    return done.stdout.strip()


@contextlib.contextmanager
def _as_file(source: bytes | IO[bytes] | None) -> Iterator[int]:
    if source is None:
        yield subprocess.DEVNULL
    elif isinstance(source, bytes):
        with tempfile.TemporaryFile() as file:
            file.write(source)
            file.seek(0)
            yield file.fileno()
    else:
        yield source.fileno()


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kill the program and its children when its time is over, or when the block is left early."""
    late = threading.Event()

    def end() -> None:
        if process.poll() is None:
            late.set()
            _kill(process)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        if process.poll() is None:
            _kill(process)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[bytes], limit: int) -> tuple[bytes, bool]:
    if process.stdout is None:
        return b"", False
    parts: list[bytes] = []
    size = 0
    while part := process.stdout.read1(_CHUNK):  # type: ignore[attr-defined]  # a buffered reader
        parts.append(part)
        size += len(part)
        if size > limit:
            return b"".join(parts)[:limit], True
    process.wait()
    return b"".join(parts), False


def _judge(arguments: Sequence[str | bytes], late: threading.Event, *, too_much: bool) -> None:
    if late.is_set():
        raise DeadlineError(f"git {_verb(arguments)} took too long and was ended; nothing was changed by it")
    if too_much:
        raise GitError(
            f"git {_verb(arguments)} gave more output than is read; list what is not part of the work in .gitignore"
        )


def _required(answer: Answer, arguments: Sequence[str | bytes]) -> bytes:
    if answer.code == 0:
        return answer.output
    told = " ".join(answer.error.split()) or f"exit code {answer.code}"
    raise GitError(f"git {_verb(arguments)} failed: {clipped(told, _MAX_ERROR)}")


def _verb(arguments: Sequence[str | bytes]) -> str:
    return os.fsdecode(arguments[0]) if arguments else ""
