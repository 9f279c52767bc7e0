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
from ostler.model.text import clipped
from ostler.model.validation import fault

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
_NO_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
_ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "TZ": "UTC",
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


#: How long git may sleep at a place where it only reads files of an agent: then one of them is a pipe.
ASLEEP_SECONDS = 5.0
_POLL_SECONDS = 0.5


class GitAsleepError(GitError):
    """git waits for something that never comes; a pipe or a device stands where it expects a file."""


class Answer(NamedTuple):
    code: int
    output: bytes
    error: str


@dataclass(frozen=True, kw_only=True)
class Git:
    """The places of a git call. `with_` makes a copy with others."""

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
    #: Only for reading them.
    settings_of_user: bool = False

    def with_(
        self,
        *,
        work_tree: Path | None = None,
        index: Path | None = None,
        objects: Path | None = None,
        borrowed: int | Path | None = None,
    ) -> Self:
        return replace(self, work_tree=work_tree, index=index, objects=objects, borrowed=borrowed)

    def run(
        self,
        *arguments: str | bytes,
        stdin: bytes | IO[bytes] | None = None,
        out: IO[bytes] | None = None,
        seconds: float = SECONDS,
        asleep_seconds: float | None = None,
    ) -> bytes:
        """The output of a call that must succeed."""
        answer = self.ask(*arguments, stdin=stdin, out=out, seconds=seconds, asleep_seconds=asleep_seconds)
        if answer.code != 0:
            raise GitError(f"git {_verb(arguments)} failed: {answer.error or f'exit code {answer.code}'}")
        return answer.output

    def text(self, *arguments: str | bytes, stdin: bytes | None = None) -> str:
        return self.run(*arguments, stdin=stdin).decode("utf-8", "replace").strip()

    def names(self, *arguments: str | bytes) -> list[bytes]:
        """The output of a call with `-z`, as its parts."""
        return [name for name in self.run(*arguments).split(b"\0") if name]

    def ask(
        self,
        *arguments: str | bytes,
        stdin: bytes | IO[bytes] | None = None,
        out: IO[bytes] | None = None,
        seconds: float = SECONDS,
        cut_at: int | None = None,
        asleep_seconds: float | None = None,
    ) -> Answer:
        """Run it and say how it ended. `out`: a file for the output. `cut_at`: what is beyond that is dropped.

        `asleep_seconds`: it is ended when it slept that long without any work, which reading files never takes.
        """
        with _as_file(stdin) as source, tempfile.TemporaryFile() as errors:
            process = self._start(arguments, source, subprocess.PIPE if out is None else out.fileno(), errors)
            asleep = None if asleep_seconds is None else _Watch(process, asleep_seconds)
            with _ended_after(process, seconds) as late:
                output, too_much = _read(process, cut_at or OUTPUT_LIMIT)
            if asleep is not None and asleep.ended():
                raise GitAsleepError
            if late.is_set():
                raise DeadlineError(f"git {_verb(arguments)} took too long and was ended; nothing was changed by it")
            if too_much and cut_at is None:
                raise GitError(f"git {_verb(arguments)} gave too much output; list what is no work in .gitignore")
            errors.seek(0)
            text = " ".join(errors.read(_MAX_ERROR * 4).decode("utf-8", "replace").split())
            return Answer(0 if too_much else process.returncode, output, clipped(text, _MAX_ERROR))

    def _start(
        self, arguments: Sequence[str | bytes], source: int, out: int, errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        safe = [part for setting in _SETTINGS for part in ("-c", setting)] if not self.settings_of_user else []
        borrowed = (self.borrowed,) if isinstance(self.borrowed, int) else ()
        return subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
            [_program(), *safe, "--literal-pathspecs", "--no-replace-objects", *arguments],
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
        if self.settings_of_user:
            environment |= {name: value for name in ("HOME", "XDG_CONFIG_HOME") if (value := os.environ.get(name))}
            return _ENVIRONMENT | environment
        return _ENVIRONMENT | _NO_SETTINGS | environment


def user_settings(directory: Path) -> list[tuple[str, str]]:
    """The settings that the user's own git sees in a repository. Reading them runs nothing."""
    git = Git(directory=directory, settings_of_user=True)
    entries = [os.fsdecode(entry).partition("\n") for entry in git.names("config", "--list", "-z", "--includes")]
    return [(name, value) for name, _, value in entries]


def require_version() -> None:
    """Refuse a git that lacks what is used here, with the sentence that says so."""
    version = _version()
    match = re.search(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_VERSION:
        least = ".".join(map(str, MINIMUM_VERSION))
        raise GitError(f"worktrees need git {least} or newer, and this is {version!r}; install a newer git")


def is_object_id(text: str) -> bool:
    return _OBJECT_ID.fullmatch(text) is not None


def object_id(text: str) -> str:
    """The name of an object, checked: nothing else may stand where git expects one."""
    if not is_object_id(text):
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


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1].decode()
    return _UNESCAPES[code] if code in _UNESCAPES else bytes([int(code, 8) & 0xFF])


def _quote(path: bytes) -> str:
    return '"' + "".join(_escaped(path[at : at + 1]) for at in range(len(path))) + '"'


def _escaped(byte: bytes) -> str:
    if byte in _ESCAPES:
        return _ESCAPES[byte]
    return byte.decode() if b" " <= byte <= b"~" else f"\\{byte[0]:03o}"


# --- one run -----------------------------------------------------------------------------------------


@cache
def _program() -> str:
    path = shutil.which("git")
    if path is None:
        raise GitError("the program git was not path; install it, or use workdirs of kind directory without review")
    return path


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


class _Watch:
    """Ends a program that sleeps all the time, from a thread that lives as long as the program."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self._process = process
        self._looks = max(1, round(seconds / _POLL_SECONDS))
        self._over = threading.Event()
        self._has_ended_it = False
        self._thread = threading.Thread(target=self._watch, name="git-asleep", daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Stop watching. Whether the program was ended for its sleep."""
        self._over.set()
        self._thread.join()
        return self._has_ended_it

    def _watch(self) -> None:
        before, same = None, 0
        while not self._over.wait(_POLL_SECONDS) and self._process.returncode is None:
            work = _work_of(self._process.pid)
            same = same + 1 if work is not None and work == before else 0
            before = work
            if same >= self._looks:
                self._has_ended_it = True
                _kill(self._process)
                return


def _work_of(pid: int) -> str | None:
    """What a process has done so far, where all its threads sleep at this moment; else None."""
    counted = []
    for place in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            facts = place.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if facts[0] != "S":
            return None
        counted.append(f"{place} {facts[7]} {facts[9]} {facts[11]} {facts[12]}")  # page faults and time spent
    return "\n".join(sorted(counted)) or None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[bytes], limit: int) -> tuple[bytes, bool]:
    parts: list[bytes] = []
    size = 0
    while process.stdout is not None and (part := process.stdout.read(_CHUNK)):
        parts.append(part)
        size += len(part)
        if size > limit:
            return b"".join(parts)[:limit], True
    process.wait()
    return b"".join(parts), False


def _verb(arguments: Sequence[str | bytes]) -> str:
    return os.fsdecode(arguments[0])
