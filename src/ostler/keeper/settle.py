"""What a newborn process does before it is an agent: its own session, its box, its walls, its descriptors.

It runs in the child, after the fork and before anything of the agent's. It is the same for a program that is about to
be executed and for a process forked from a template.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 23, 24, 38
_CAP_VERSION = 0x20080522
#: By these an agent could reach out of its box: into other processes, the kernel, or above its limits.
_TAKEN_AWAY = (16, 17, 19, 21, 22, 24, 38, 39, 40)
#: Python ignores these two and its own code counts on it; a program that is executed expects their default.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
_UNCATCHABLE = frozenset({int(signal.SIGKILL), int(signal.SIGSTOP), 32, 33})
#: How long a child waits to become the keeper's.
_ADOPTION_SECONDS = 2.0
_OOM_SCORE = 500
_PAST_ALL = 0x7FFFFFFF
#: Has no name in Python; the same number on every architecture. See `tag`.
RLIMIT_LOCKS = 10

_C = ctypes.CDLL(None, use_errno=True)
#: Looked up here and not in each child, where it would cost time and memory.
_prctl = _C.prctl


class SettleError(Exception):
    """The process could not be put where it belongs; it must end."""


def settle_in(
    settle: Mapping[str, Any],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    keep: Sequence[int],
    had: Mapping[str, str] | None = None,
) -> None:
    """All of it, in the order that the rights for each step ask for. Raises `SettleError` with a sentence.

    `settle`: entrances, env, cwd (None: stays), nice, keeper (the pid; 0: anybody's child), nofile ([soft, hard]),
    umask (None: stays), tag and execs (a program follows). A descriptor of -1 is /dev/null. Of the others only those in
    `keep` stay open. `had` is the environment with which the process was started, when its own code may have changed it
    since.
    """
    step = "begin a session"
    try:
        _wear(settle.get("tag"))
        if os.getsid(0) != os.getpid():
            os.setsid()
        # Before its box: in one that is frozen it stands still, and must not hold the lock and socket of its keeper.
        step = "take its descriptors"
        take_descriptors(stdin, stdout, stderr, keep)
        step = "enter its box"
        for path in settle.get("entrances", ()):
            _enter(path)
        step = "take its limits"
        _limit_itself(settle)
        _default_signals(execs=bool(settle.get("execs")))
        step = "give up rights"
        _give_up_rights()
        step = "bind its life to the keeper"
        _die_with(int(settle.get("keeper") or 0))
        cwd = settle.get("cwd")
        step = f"go to its directory {cwd}"
        if cwd is not None:
            os.chdir(cwd)
        _mask(settle.get("umask"))
        step = "take its environment"
        _take_environment(settle.get("env") or {}, dict(os.environ) if had is None else had)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettleError(f"the new process could not {step}: {reason}") from error


def settle_fork(
    settle: Mapping[str, Any], *, output: int, keep: Sequence[int], caught: Sequence[int], had: Mapping[str, str]
) -> None:
    """The same for a child of a process that has itself settled in: limits, rights and most else are inherited.

    Each step that it need not take leaves memory shared. `caught` are the signals that its parent handles or ignores,
    `had` is the environment with which its parent was started.
    """
    step = "begin a session"
    try:
        _wear(settle.get("tag"))
        os.setsid()
        step = "take its descriptors"
        take_descriptors(-1, output, output, keep)
        step = "enter its box"
        for path in settle["entrances"]:
            _enter(path)
        if settle.get("nice"):
            os.nice(int(settle["nice"]))
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        step = "bind its life to the keeper"
        _die_with(int(settle.get("keeper") or 0))
        cwd = settle.get("cwd")
        step = f"go to its directory {cwd}"
        if cwd is not None:
            os.chdir(cwd)
        _mask(settle.get("umask"))
        step = "take its environment"
        _take_environment(settle.get("env") or {}, had)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettleError(f"the new process could not {step}: {reason}") from error


def caught_signals() -> tuple[int, ...]:
    """Those that this process does not leave to their default, and opens all; for its children."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    found = (one for one in range(1, signal.NSIG) if one not in _UNCATCHABLE and one not in _PYTHONS_OWN)
    return tuple(one for one in found if signal.getsignal(one) != signal.SIG_DFL)


def _wear(tag: int | None) -> None:
    """Where somebody has set this bound before, it goes without: its box and its mark are there too."""
    if tag is None:
        return
    try:
        resource.setrlimit(RLIMIT_LOCKS, (tag, tag))
    except (OSError, ValueError):
        return


def _take_environment(wanted: Mapping[str, str], had: Mapping[str, str]) -> None:
    """Only where it is to be another than it was: what a module does to it when it is loaded is for its agents."""
    for name in had:
        if name not in wanted:
            os.environ.pop(name, None)
    for name, value in wanted.items():
        if had.get(name) != value:
            os.environ[name] = value


def _mask(umask: int | None) -> None:
    """That of the manager's program: the keeper's own is for the keeper's files."""
    if umask is not None:
        os.umask(umask)


def _enter(path: str) -> None:
    """By the system calls themselves: a file object can swallow the refusal when it is closed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"0")
    finally:
        os.close(descriptor)


def _limit_itself(settle: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # an unprivileged keeper's child may not; its keeper does it once it runs
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(_OOM_SCORE).encode())
        finally:
            os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nofile = settle.get("nofile")
    if nofile:
        resource.setrlimit(resource.RLIMIT_NOFILE, (nofile[0], nofile[1]))
    nice = int(settle.get("nice") or 0)
    if nice:
        os.nice(nice)


def _default_signals(*, execs: bool) -> None:
    """Handlers first, then open: what was sent since the fork does to the child what it does to any process."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        if number in _UNCATCHABLE or (number in _PYTHONS_OWN and not execs):
            continue
        if signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _give_up_rights() -> None:
    """From the bounding set too, or the next program run by root would have them again."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise _failure()
    for number in _TAKEN_AWAY:
        # Who may not change the bounding set cannot gain from it: it has no privilege and gets none below.
        if _prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            _prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = _CapHeader(_CAP_VERSION, 0)
    held = (_CapData * 2)()
    if _C.capget(ctypes.byref(header), held):
        raise _failure()
    had = bytes(held)
    for number in _TAKEN_AWAY:
        mask = ~(1 << (number % 32)) & 0xFFFFFFFF
        part = held[number // 32]
        part.effective &= mask
        part.permitted &= mask
        part.inheritable &= mask
    # A template gave them up before; its children have nothing left to give.
    if bytes(held) != had and _C.capset(ctypes.byref(header), held):
        raise _failure()


def _die_with(keeper: int) -> None:
    """The kernel kills it when its parent dies; so the parent must be the keeper, and still live, when that is set."""
    if not keeper:
        return
    give_up = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != keeper:
        if time.monotonic() > give_up:
            raise ValueError("the keeper is gone")
        time.sleep(0.0005)
    if _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise _failure()
    if os.getppid() != keeper:
        raise ValueError("the keeper is gone")


def take_descriptors(stdin: int, stdout: int, stderr: int, keep: Sequence[int]) -> None:
    """Those three become 0, 1 and 2, whatever stood there; all others but `keep` are closed."""
    wanted = []
    null = -1
    for one in (stdin, stdout, stderr):
        if one < 0 and null < 0:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # Copies above them first, so that none is overwritten before it is read.
        wanted.append(fcntl.fcntl(null if one < 0 else one, fcntl.F_DUPFD_CLOEXEC, 3))
    for number, one in enumerate(wanted):
        os.dup2(one, number)
    low = 3
    for one in sorted({one for one in keep if one >= low}):
        os.closerange(low, one)
        low = one + 1
    os.closerange(low, _PAST_ALL)


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
